"""The shape class of a run on one device, chosen by cost over a sample of its rounds (MuxTune 3.5).

All tasks are one hTask: any of them may share a microbatch. On one device that is what MuxTune's
fusion (`planner.fusion`) comes to: there is no pipeline to fill, and tasks apart would take
microbatches of their own, of which the last is partly empty and each spends some time that does not
shrink with its tokens. By the estimates for an H200, two hTasks, each in its own best shape class,
take 0.96 to 1.15 times as long as one over mixes of real data sets, and one hTask a task 1.1 to 1.5
times: shorter rows for short samples are not worth a second program to compile.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxmux.data import GlobalBatches
from jaxmux.engine import PreparedTask
from jaxmux.engine.backbone_size import size_of
from jaxmux.models import Backbone, BackboneConfig, device_memory, planned_remat
from jaxmux.planner.costs.cost_models import PROFILES, CostModels, device_models
from jaxmux.planner.costs.device_profile import BackboneSize
from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.costs.replica_costs import ReplicaCosts
from jaxmux.planner.devices import Replica
from jaxmux.planner.errors import PlanningError
from jaxmux.planner.numbers import numbered
from jaxmux.planner.packing.sampled_rounds import sample_rounds
from jaxmux.planner.packing.shape_choice import (
    PricedShape,
    ShapeRequest,
    choose_shape,
    plain_shape,
)
from jaxmux.planner.packing.shape_class import MIN_CHUNK_LEN, ShapeClass


class BatchLengths(Sequence[list[int]]):
    """By step, the stream lengths of the samples of a task's global batch, read when asked for.

    Attributes:
      batches: of the task.
      steps: that it trains.
    """

    def __init__(self, batches: GlobalBatches, steps: int):
        self.batches, self.steps = batches, steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> list[int]:
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} of {self.steps}")
        return [sample.stream_length for sample in self.batches[step]]


class RunCosts(NamedTuple):
    """What microbatches of a run take on this device.

    Attributes:
      mesh: their costs, by shape class.
      source: where the costs come from.
      least_chunk_len: shortest chunk that the device's kernels take.
    """

    mesh: ReplicaCosts
    source: str
    least_chunk_len: int


class Choice(NamedTuple):
    """A shape class and why.

    Attributes:
      alignment: the choice, and what it costs over the rounds that were looked at.
      plain: what the plain rule would have chosen.
      source: where the costs come from.
    """

    alignment: PricedShape
    plain: PricedShape
    source: str

    def __str__(self) -> str:
        chosen, plain = map(_described, (self.alignment, self.plain))
        text = f"microbatches of {chosen}"
        if chosen == plain:
            return text
        return f"{text}, the fastest by costs {self.source}; the plain rule: {plain}"


def run_costs(
    tasks: Sequence[PreparedTask],
    config: BackboneConfig,
    dtype: jnp.dtype,
    remat: str = "auto",
    memory: int | None = None,
) -> RunCosts:
    """The costs of training these tasks together on this device.

    Args:
      dtype: of the backbone's weights.
      remat, memory: as the engine has them.
    """
    models = _device_models(size_of(config, dtype), dtype, memory or device_memory())
    # Of the optimizer with most moments, as the engine reckons.
    pool = PoolSpec(
        slots=len(tasks),
        rank=max(task.task.adapter.rank for task in tasks),
        modules=tuple(sorted({module for task in tasks for module in task.targets})),
        dropout=any(task.task.adapter.dropout > 0 for task in tasks),
    )
    return RunCosts(
        ReplicaCosts(models.times, models.memory, pool, Replica(), planned_remat(remat)),
        f"{models.source.kind} for {models.source.device}",
        models.least_chunk_len if jax.default_backend() == "gpu" else MIN_CHUNK_LEN,
    )


def choose_run_shape(
    tasks: Sequence[PreparedTask],
    costs: RunCosts,
    tokens: int,
    row_len: int | None = None,
    chunk_len: int | None = None,
) -> Choice:
    """The shape class in which the tasks' rounds are predicted to take the least time.

    Args:
      tokens: N, the most tokens of a microbatch; all of them where both lengths are given.
      row_len, chunk_len: None for the best.
    """
    request = ShapeRequest(tokens, row_len, chunk_len, costs.least_chunk_len)
    lengths = [length for task in tasks for length in task.lengths]
    rounds = sample_rounds([BatchLengths(task.batches, task.steps) for task in tasks])
    given = (rounds, request, costs.mesh.microbatch, lengths)
    return Choice(choose_shape(*given), plain_shape(*given), costs.source)


def best_shape(
    tasks: Sequence[PreparedTask],
    backbone: Backbone,
    tokens_per_microbatch: int = 8192,
    remat: str = "auto",
    memory: int | None = None,
) -> ShapeClass:
    """The shape class that `fine_tune` would train these tasks in, for an engine of one's own.

    Args:
      tokens_per_microbatch: at most; longer samples have a row of their own length all the same.
      remat, memory: as of `EngineOptions`.

    Raises:
      PlanningError: there are no tasks.
    """
    if not tasks:
        raise PlanningError("no tasks to choose a shape class for")
    costs = run_costs(tasks, backbone.config, backbone.dtype, remat, memory)
    return choose_run_shape(tasks, costs, tokens_per_microbatch).alignment.shape


def _device_models(size: BackboneSize, dtype: jnp.dtype, memory: int | None) -> CostModels:
    """Those of this machine's devices; estimates for H200s serve any, for they only rank shape
    classes."""
    device = jax.local_devices()[0].device_kind
    return device_models(size, memory, Replica(), device, jnp.dtype(dtype).name, PROFILES)


def _described(alignment: PricedShape) -> str:
    shape = alignment.shape
    several = "several sequences" if shape.max_sequences > 1 else "one sequence"
    return (
        f"{numbered(shape.rows, 'row')} of {shape.row_len} tokens, {several} each, in chunks of "
        f"{shape.chunk_len} ({alignment.padding:.0%} padding)"
    )
