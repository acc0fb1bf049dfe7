"""Objectives that are functions in `jax.numpy`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from pydantic import PlainSerializer, PlainValidator

from jaxmux.data.sources import Records
from jaxmux.field_checks import checked_dataclass

from .objective import Graded, Objective


class LossInputs(NamedTuple):
    """The samples of a global batch, or all held-out samples, as a `CustomLoss` gets them. Of
    pairs, the chosen answers are the samples 0, 2, 4 and so on; the rejected one follows each.
    Target tokens fill the rows from the left; the rest of a row is 0.

    Attributes:
      is_target: which entries belong to target tokens.
      reference: log-probabilities under the adapter with which the task began; None without
        `CustomLoss.with_reference`.
      values: of rollouts, "logprobs" and "advantages" of target tokens; NaN where a record has
        none.
      numbers: of rollouts, "reward" and "group" of samples; NaN where a record has none.
    """

    is_target: Bool[np.ndarray, "samples targets"]
    reference: Float[np.ndarray, "samples targets"] | None
    values: Mapping[str, Float[np.ndarray, "samples targets"]]
    numbers: Mapping[str, Float[np.ndarray, " samples"]]


# Maps the log-probabilities, float64 [samples, targets], and the inputs of a batch to the loss, a
# scalar; or to the loss and metrics, scalars by name. All of them are arrays of JAX.
LossFunction = Callable[[Any, LossInputs], Any]


def _callable(function: Any) -> LossFunction:
    if not callable(function):
        raise ValueError(f"function should be a function of Python, found {function!r:.60}")
    return function


def _name_of(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"


@checked_dataclass
class CustomLoss(Objective):
    """A function in `jax.numpy` of a task's global batch. It is called on the host in float64, and
    JAX differentiates it.

    Only Python code can use it: files of tasks and servers do not have it. A run that is resumed
    needs a function of the same name.

    Attributes:
      function: the loss, see `LossFunction`.
      of: what the records are: "answers", "pairs" or "rollouts".
      with_reference: whether `LossInputs.reference` is computed.

    Raises:
      ValueError: a value is outside its range. While training, the function returns no scalar.
    """

    function: Annotated[Any, PlainValidator(_callable), PlainSerializer(_name_of)]
    of: Literal["answers", "pairs", "rollouts"] = "answers"
    with_reference: bool = False

    kind: ClassVar[str] = "custom"
    unit: ClassVar[str] = "record"
    by_token: ClassVar[bool] = True

    @property
    def records(self) -> Records:
        return self.of

    @property
    def members(self) -> int:
        return 2 if self.of == "pairs" else 1

    @property
    def needs_reference(self) -> bool:
        return self.with_reference

    def grade(self, log_probs, reference=None, recorded=None, log_squares=None):
        lengths = np.array([len(each) for each in log_probs])
        is_target = np.arange(lengths.max()) < lengths[:, None]

        def rows(of_samples: Sequence[np.ndarray]) -> Float[np.ndarray, "samples targets"]:
            found = np.zeros(is_target.shape)
            found[is_target] = np.concatenate(of_samples)
            return found

        inputs = LossInputs(
            is_target,
            None if reference is None else rows(reference),
            {name: rows(values) for name, values in recorded.values.items()} if recorded else {},
            recorded.numbers if recorded else {},
        )
        # Commands that train nothing start faster without JAX.
        import jax

        on_host = jax.default_device(jax.local_devices(backend="cpu")[0])
        with jax.enable_x64(True), on_host:
            (loss, metrics), slopes = jax.value_and_grad(self._with_metrics, has_aux=True)(
                jax.numpy.asarray(rows(log_probs)), inputs
            )
            slopes = np.asarray(slopes)
        of_samples = np.split(slopes[is_target], np.cumsum(lengths)[:-1])
        return Graded(float(loss), of_samples, {name: float(x) for name, x in metrics.items()})

    def _with_metrics(self, log_probs: Any, inputs: LossInputs) -> tuple[Any, Mapping[str, Any]]:
        found = self.function(log_probs, inputs)
        loss, metrics = found if isinstance(found, tuple) else (found, {})
        if np.shape(loss):
            raise self._error(
                f"{_name_of(self.function)} should return a scalar, found shape {np.shape(loss)}"
            )
        return loss, metrics
