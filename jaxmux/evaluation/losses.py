"""The cases of an evaluation, and their losses, computed by an engine: with adapters, and with the
bare backbone."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from jaxmux.data import GlobalBatches, Samples, StoredSamples
from jaxmux.data.stored_samples import target_tokens
from jaxmux.engine import Engine, EngineOptions, PreparedTask
from jaxmux.engine.rounds.results import Scores, grade, of_targets
from jaxmux.engine.tasks.prepared_task import with_virtual_tokens
from jaxmux.models import Backbone, BackboneConfig
from jaxmux.objectives import SFT, Objective
from jaxmux.optimizers import SGD
from jaxmux.peft import LoRA, initial_adapter, kind_of, size_of_adapter
from jaxmux.runs import best_shape
from jaxmux.tasks import Task

# An adapter that changes nothing, because its B is zero.
_NOTHING = LoRA(rank=1)


class HeldOutData(NamedTuple):
    """Held-out samples.

    Attributes:
      name: name of the data, for reports.
      samples: at least one.
      objective: what is measured of them.
    """

    name: str
    samples: StoredSamples
    objective: Objective = SFT()


class EvalCase(NamedTuple):
    """An adapter, from `import_adapter`, and held-out samples.

    Attributes:
      task: name of the adapter's task; None for the bare backbone, which has no `spec` and no
        `adapter`.
      held_out: the samples.
      tokenizer: the tokenizer with which the samples were read.
      reference: the adapter that is the reference of the objective, as its specification and its
        weights; None for the bare backbone.
    """

    task: str | None
    held_out: HeldOutData
    spec: Any
    adapter: Any
    tokenizer: Any
    reference: tuple[Any, Any] | None = None

    @property
    def objective(self) -> Objective:
        return self.held_out.objective

    @property
    def records(self) -> int:
        return self.objective.count(self.samples)

    @property
    def data(self) -> str:
        return self.held_out.name

    @property
    def samples(self) -> StoredSamples:
        return self.held_out.samples

    @property
    def target_tokens(self) -> int:
        return target_tokens(self.objective.trained(self.samples))


def first_with_data(cases: Sequence[EvalCase]) -> list[int]:
    """The index of the first case with the same samples, for each case. The samples of all cases
    come from one `Loaded`."""
    first_with_key: dict[Any, int] = {}
    return [first_with_key.setdefault(case.samples.tokens_key, i) for i, case in enumerate(cases)]


class Measured(NamedTuple):
    """The value of a case's objective, for `SFT` the mean cross entropy in nats per target token;
    NaN if the forward pass is not finite. `metrics` are those of `Graded`."""

    loss: float
    metrics: Mapping[str, float]


class Losses(NamedTuple):
    """What has been measured of a case with its adapter, and with the bare backbone."""

    adapter: Measured
    backbone: Measured


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
    firsts, prepared = first_with_data(cases), []
    for number, case in enumerate(cases):
        adapters = {"adapter": (case.spec, case.adapter)}
        if firsts[number] == number:
            adapters["backbone"] = (None, None)
        if case.reference:
            adapters["reference"] = case.reference
        prepared += [
            untrained(f"{which}.{number}", case.samples, config, *of_case)
            for which, of_case in adapters.items()
        ]
    options = EngineOptions(best_shape(prepared, backbone, tokens_per_microbatch))
    with closing(Engine(backbone, options)) as engine:
        engine.register_tasks(prepared)
        of_losses = {n for n, case in enumerate(cases) if isinstance(case.objective, SFT)}
        engine.begin_evaluation([x for x in engine.names if int(x.split(".")[1]) in of_losses])
        engine.drain()
        losses = {x.task: Measured(x.loss, {}) for x in engine.take_evaluations()}
        return [
            Losses(losses[f"adapter.{n}"], losses[f"backbone.{m}"])
            if n in of_losses
            else _graded(engine, cases[n], n, m)
            for n, m in enumerate(firsts)
        ]


def _graded(engine: Engine, case: EvalCase, number: int, first: int) -> Losses:
    """Measures a case by the log-probabilities of all its samples; `first` is the first case with
    the same samples."""

    def scores(name: str) -> list[Scores]:
        return engine.scores(name, case.samples)

    of_adapter, of_backbone = scores(f"adapter.{number}"), scores(f"backbone.{first}")
    reference = None
    if case.objective.needs_reference:
        of_reference = scores(f"reference.{number}") if case.reference else of_backbone
        reference = case.objective.known(of_targets(case.samples, of_reference))
    of_both = of_adapter, of_backbone
    graded = [grade(case.objective, case.samples, scores, reference) for scores in of_both]
    return Losses(*(Measured(each.loss, each.metrics) for each in graded))


def untrained(
    name: str,
    samples: StoredSamples,
    config: BackboneConfig,
    spec: Any = None,
    adapter: Any = None,
    batch_size: int | None = None,
) -> PreparedTask:
    """A task with these held-out samples, which is never trained. Without `spec` it is the bare
    backbone. The shape of microbatches is chosen for batches of `batch_size` samples, or for all
    together."""
    if spec is None:
        spec = _NOTHING
        adapter = initial_adapter(spec, kind_of(spec).targets(spec, config), config, 0)
    held_out = with_virtual_tokens(samples, spec)
    batches = GlobalBatches(held_out, batch_size or len(held_out), seed=0)
    steps = batches.batches_per_epoch
    # An optimizer without moments takes the least memory.
    task = Task(name, "held-out data", spec, SGD(0.0), batch_size=len(held_out), steps=steps)
    return PreparedTask(
        task,
        dict(kind_of(spec).targets(spec, config)),
        lambda: adapter,
        Samples(held_out, read=len(held_out), truncated=0, dropped=0, skipped=0),
        batches,
        steps=steps,
        eval_samples=held_out,
        size=size_of_adapter(spec, config),
    )
