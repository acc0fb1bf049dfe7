"""The cases of an evaluation, and their losses, computed by an engine: with adapters, and with the
bare backbone."""

from collections.abc import Sequence
from contextlib import closing
from typing import Any, NamedTuple

from jaxmux.data import GlobalBatches, Samples, StoredSamples
from jaxmux.data.stored_samples import target_tokens
from jaxmux.engine import Engine, EngineOptions, PreparedTask
from jaxmux.engine.tasks.prepared_task import with_virtual_tokens
from jaxmux.models import Backbone, BackboneConfig
from jaxmux.optimizers import SGD
from jaxmux.peft import LoRA, initial_adapter, kind_of, size_of_adapter
from jaxmux.runs import best_shape
from jaxmux.tasks import Task

# An adapter that changes nothing, because its B is zero.
_NOTHING = LoRA(rank=1)


class EvalCase(NamedTuple):
    """An adapter, from `import_adapter`, and held-out samples.

    Attributes:
      data: name of the held-out data.
      samples: at least one.
      tokenizer: the tokenizer with which the samples were read.
    """

    task: str
    data: str
    spec: Any
    adapter: Any
    samples: StoredSamples
    tokenizer: Any

    @property
    def target_tokens(self) -> int:
        return target_tokens(self.samples)


def first_with_data(cases: Sequence[EvalCase]) -> list[int]:
    """The index of the first case with the same samples, for each case. The samples of all cases
    come from one `Loaded`."""
    first_with_key: dict[Any, int] = {}
    return [first_with_key.setdefault(case.samples.tokens_key, i) for i, case in enumerate(cases)]


class Losses(NamedTuple):
    """Mean cross entropy of a case's samples, in nats per target token.

    Attributes:
      adapter: with the adapter; NaN if the forward pass is not finite.
      backbone: with the bare backbone.
    """

    adapter: float
    backbone: float


def losses_of(
    cases: Sequence[EvalCase], backbone: Backbone, tokens_per_microbatch: int = 8192
) -> list[Losses]:
    """Measures the losses of all cases together, as training measures held-out losses. If several
    cases have the same samples, the loss of the bare backbone is measured once.

    Args:
      cases: at least one; their samples come from one `Loaded`.
      tokens_per_microbatch: most tokens of one forward pass.
    """
    config = backbone.config
    targets = kind_of(_NOTHING).targets(_NOTHING, config)
    nothing = initial_adapter(_NOTHING, targets, config, 0)
    firsts, prepared = first_with_data(cases), []
    for number, case in enumerate(cases):
        prepared.append(
            _prepared(
                f"adapter.{number}",
                spec=case.spec,
                adapter=case.adapter,
                samples=case.samples,
                config=config,
            )
        )
        if firsts[number] == number:
            prepared.append(
                _prepared(
                    f"backbone.{number}",
                    spec=_NOTHING,
                    adapter=nothing,
                    samples=case.samples,
                    config=config,
                )
            )
    options = EngineOptions(best_shape(prepared, backbone, tokens_per_microbatch))
    with closing(Engine(backbone, options)) as engine:
        engine.register_tasks(prepared)
        engine.begin_evaluation(engine.names)
        engine.drain()
        losses = {evaluation.task: evaluation.loss for evaluation in engine.take_evaluations()}
    return [Losses(losses[f"adapter.{n}"], losses[f"backbone.{m}"]) for n, m in enumerate(firsts)]


def _prepared(
    name: str, spec: Any, adapter: Any, samples: StoredSamples, config: BackboneConfig
) -> PreparedTask:
    """A task with these held-out samples, which is never trained."""
    held_out = with_virtual_tokens(samples, spec)
    # An optimizer without moments takes the least memory.
    task = Task(name, "held-out data", spec, SGD(0.0), batch_size=len(held_out), steps=1)
    return PreparedTask(
        task,
        dict(kind_of(spec).targets(spec, config)),
        lambda: adapter,
        Samples(held_out, read=len(held_out), truncated=0, dropped=0, skipped=0),
        GlobalBatches(held_out, len(held_out), seed=0),
        steps=1,
        eval_samples=held_out,
        size=size_of_adapter(spec, config),
    )
