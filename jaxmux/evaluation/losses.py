"""Losses of held-out samples, with adapters and with the bare backbone, by an engine."""

from collections.abc import Sequence
from contextlib import closing
from typing import Any, NamedTuple

from jaxmux.data import GlobalBatches, Samples, StoredSamples
from jaxmux.engine import Engine, EngineOptions, PreparedTask
from jaxmux.engine.tasks.task_data import with_virtual_tokens
from jaxmux.models import Backbone, BackboneConfig
from jaxmux.optimizers import SGD
from jaxmux.peft import LoRA, initial_adapter, kind_of, size_of_adapter
from jaxmux.runs import best_shape
from jaxmux.tasks import Task

from .cases import Case, first_with_data

# An adapter that changes nothing, because its B is zero.
_NOTHING = LoRA(rank=1)


class Losses(NamedTuple):
    """Mean cross entropy of a case's samples, in nats per target token.

    Attributes:
      adapter: with the adapter; NaN if the forward pass is not finite.
      backbone: with the bare backbone.
    """

    adapter: float
    backbone: float


def losses_of(
    cases: Sequence[Case], backbone: Backbone, tokens_per_microbatch: int = 8192
) -> list[Losses]:
    """Measures the losses of all cases together, in the way in which training measures held-out
    losses. Those of the bare backbone are measured once for cases with the same samples.

    Args:
      cases: the cases, at least one; their samples come from one `Loaded`.
      backbone: the backbone.
      tokens_per_microbatch: most tokens of one forward pass.
    """
    config = backbone.config
    targets = kind_of(_NOTHING).targets(_NOTHING, config)
    nothing = initial_adapter(_NOTHING, targets, config, 0)
    firsts, prepared = first_with_data(cases), []
    for number, case in enumerate(cases):
        own = case.samples, config
        prepared.append(_prepared(f"adapter.{number}", case.spec, case.adapter, *own))
        if firsts[number] == number:
            prepared.append(_prepared(f"backbone.{number}", _NOTHING, nothing, *own))
    options = EngineOptions(best_shape(prepared, backbone, tokens_per_microbatch))
    with closing(Engine(backbone, options)) as engine:
        engine.register_tasks(prepared)
        engine.begin_evaluation(engine.names)
        engine.drain()
        found = {own.task: own.loss for own in engine.take_evaluations()}
    return [Losses(found[f"adapter.{n}"], found[f"backbone.{m}"]) for n, m in enumerate(firsts)]


def _prepared(
    name: str, spec: Any, adapter: Any, samples: StoredSamples, config: BackboneConfig
) -> PreparedTask:
    """A task whose held-out samples are given, and which is never trained."""
    own = with_virtual_tokens(samples, spec)
    # An optimizer without moments takes least memory.
    task = Task(name, "held-out data", spec, SGD(0.0), batch_size=len(own), steps=1)
    return PreparedTask(
        task,
        dict(kind_of(spec).targets(spec, config)),
        lambda: adapter,
        Samples(own, read=len(own), truncated=0, dropped=0, skipped=0),
        GlobalBatches(own, len(own), seed=0),
        steps=1,
        eval_samples=own,
        size=size_of_adapter(spec, config),
    )
