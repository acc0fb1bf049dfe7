"""Chooses the shape class of a training run on one device by predicted time (MuxTune 3.5).

An *hTask* (MuxTune's hybrid task) is a group of tasks that may share microbatches. Here all tasks
form one hTask. MuxTune uses several hTasks to fill a pipeline (`planner.pipeline.groupings`), but
one device has no pipeline. Separate hTasks have separate microbatches: the last microbatch of each
hTask in a round is partly empty, and every microbatch takes some time that does not depend on its
tokens. For mixes of real data sets on an H200, the time model predicts that two hTasks, each in its
own best shape class, take 0.96 to 1.15 times as long as one hTask, and that one hTask per task
takes 1.1 to 1.5 times as long. It is therefore not worth compiling a second program with shorter
rows for short samples.
"""

import dataclasses
import logging
import math
from collections.abc import Sequence
from functools import cache
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxmux.engine import EngineSize, PreparedTask
from jaxmux.engine.queued_engine import Shrinking
from jaxmux.engine.tasks.prepared_task import size_of
from jaxmux.models import Backbone, BackboneConfig, backbone_dtype, device_memory, planned_remat
from jaxmux.planner import PlanningError
from jaxmux.planner.costs import (
    PROFILES,
    CostSource,
    PoolSpec,
    ReplicaCosts,
    device_models,
    measured_models,
    merge_pool_specs,
)
from jaxmux.planner.devices import AUTO_SCHEDULE, ONE_DEVICE, Replica
from jaxmux.planner.numbers import numbered
from jaxmux.planner.packing import (
    MIN_CHUNK_LEN,
    PartOfBatches,
    PricedShape,
    ShapeClass,
    ShapeRequest,
    at_most,
    choose_shape,
    sample_rounds,
    with_fewer_rows,
)

from .run_options import RunOptions

_log = logging.getLogger("jaxmux")


class PlannedDevice(NamedTuple):
    """A kind of device whose costs are predicted; this machine need not have one. `kind` is the
    name that JAX gives it, for example "NVIDIA H200" or "cpu". `profile` is the file of the costs;
    None means a profile that ships with jaxmux, or estimates."""

    kind: str
    profile: Path | None = None


class RunCosts(NamedTuple):
    """Predicted costs of a training run.

    Attributes:
      replica: gives the seconds and bytes of a microbatch for a shape class.
      source: origin of the costs. Estimates suffice to compare choices, but do not predict the
        device's times.
      least_chunk_len: tokens of the shortest chunk that the device's kernels support.
    """

    replica: ReplicaCosts
    source: CostSource
    least_chunk_len: int

    @property
    def measured(self) -> bool:
        """Whether the costs were measured on a device of this kind."""
        return self.source.kind == "measured"


class Choice(NamedTuple):
    """The chosen shape class.

    Attributes:
      alignment: the shape class, with its predicted cost over a sample of the rounds.
      source: origin of the costs, as messages show it, for example "measured for cpu".
      rounds: number of rounds in the sample.
    """

    alignment: PricedShape
    source: str
    rounds: int

    def __str__(self) -> str:
        shape, padding = self.alignment.shape, self.alignment.padding
        return (
            f"microbatches of {numbered(shape.rows, 'row')} of {shape.row_len} tokens, chunks of "
            f"{shape.chunk_len} ({padding:.0%} padding)"
        )


def run_costs(
    tasks: Sequence[PreparedTask],
    config: BackboneConfig,
    dtype: jnp.dtype,
    remat: str = "auto",
    memory: int | None = None,
    replica: Replica = ONE_DEVICE,
    slots: int | None = None,
    replicas: int = 1,
    device: PlannedDevice | None = None,
    schedule: str = AUTO_SCHEDULE,
) -> RunCosts:
    """The predicted costs of training tasks together on a device, or on several equal devices.

    Args:
      tasks: the tasks of the training run, at least one.
      remat: remat policy, as in `EngineOptions`.
      memory: bytes that the engine may use, as in `EngineOptions`; None means all of the device.
      slots: number of slots of the pool; None means one slot per task.
      replicas: number of replicas that train different samples.
      device: the kind of the devices; None means this machine's.
      schedule: the order of a pipeline's passes, as in `RunOptions`.

    Raises:
      ProfileError: `device.profile` cannot be read, or belongs to another backbone.
    """
    pool = merge_pool_specs([task.pool for task in tasks])
    # The engine makes room for the default optimizer, which has the most moments.
    pool = pool._replace(
        slots=slots or pool.slots,
        modules=tuple(sorted(pool.modules or ())),
        optimizer=PoolSpec(1, 1).optimizer,
    )
    costs = pool_costs(pool, config, dtype, remat, memory, replica, device, schedule)
    model = dataclasses.replace(costs.replica.memory, replicas=replicas)
    return costs._replace(replica=dataclasses.replace(costs.replica, memory=model))


def costs_of_run(
    tasks: Sequence[PreparedTask],
    config: BackboneConfig,
    options: RunOptions,
    replica: Replica,
    slots: int | None = None,
    replicas: int = 1,
    device: PlannedDevice | None = None,
) -> RunCosts:
    return run_costs(
        tasks,
        config,
        backbone_dtype(options.dtype),
        options.remat,
        options.memory,
        replica,
        slots,
        replicas,
        device,
        options.schedule,
    )


def pool_costs(
    pool: PoolSpec,
    config: BackboneConfig,
    dtype: jnp.dtype,
    remat: str = "auto",
    memory: int | None = None,
    replica: Replica = ONE_DEVICE,
    device: PlannedDevice | None = None,
    schedule: str = AUTO_SCHEDULE,
) -> RunCosts:
    """Like `run_costs`, for any tasks that fit into a pool."""
    size = size_of(config, dtype)
    if device is None:
        kind, memory = jax.local_devices()[0].device_kind, memory or device_memory()
    else:
        kind = device.kind
    if device and device.profile:
        models = measured_models(device.profile, size, memory, replica)
    else:
        # Without a profile of the device, this returns estimates for an H200, which suffice to rank
        # shape classes.
        models = device_models(size, memory, replica, kind, jnp.dtype(dtype).name, PROFILES)
    in_flight = ()
    if schedule != AUTO_SCHEDULE:
        # Imported here because training without a pipeline does not use the pipeline planner.
        from jaxmux.planner.pipeline.schedules import microbatches_in_flight

        in_flight = microbatches_in_flight(schedule, replica.pp, replica.parts)
    return RunCosts(
        ReplicaCosts(
            models.times,
            models.memory,
            pool,
            replica,
            planned_remat(remat),
            schedule,
            in_flight,
        ),
        models.source,
        MIN_CHUNK_LEN if kind == "cpu" else models.least_chunk_len,
    )


def choose_run_shape(
    tasks: Sequence[PreparedTask],
    costs: RunCosts,
    request: ShapeRequest,
    longest: int | None = None,
    shares: int = 1,
    pairs: bool = True,
) -> Choice:
    """Chooses the shape class in which the tasks' rounds are predicted to take the least time, and
    logs the choice.

    Args:
      tasks: the tasks of the training run, at least one.
      costs: the costs of these tasks on this device, from `run_costs`.
      longest: ignore samples with more tokens; None means that none are ignored.
      shares: number of parts into which a global batch is divided among replicas.
      pairs: whether rows should hold whole pairs of answers (`plans_pairs`). If there is no memory
        for such rows, they need not.

    Raises:
      PlanningError: a sample is longer than `request.row_len`, or a length in `request` is not a
        power of two.
    """
    are_paired = [pairs and plans_pairs(task, request) for task in tasks]
    lengths = [length for task in tasks for length in task.lengths]
    lengths += [task.longest_pair for task in compress(tasks, are_paired)]
    lengths = at_most(longest, lengths)
    shards = costs.replica.replica.shards * shares
    batches = [
        task.pair_lengths if is_paired else task.batch_lengths
        for task, is_paired in zip(tasks, are_paired, strict=True)
    ]
    rounds = sample_rounds([PartOfBatches(of_task, shards, longest) for of_task in batches])
    if longest is not None:
        rounds = [a_round for a_round in rounds if any(a_round.values())] or [{0: lengths}]
    seconds, prescribed = costs.replica.microbatch, request.row_len and request.chunk_len
    if any(are_paired) and not (prescribed and request.max_sequences):
        # A pair, which is packed as one sequence, consists of two.
        alignment = choose_shape(
            rounds, request, lambda shape, tokens: seconds(_with_pairs(shape), tokens), lengths
        )
        alignment = alignment._replace(shape=_with_pairs(alignment.shape))
    else:
        alignment = choose_shape(rounds, request, seconds, lengths)
    if any(are_paired) and math.isinf(alignment.seconds):
        return choose_run_shape(tasks, costs, request, longest, shares, pairs=False)
    choice = Choice(alignment, str(costs.source), len(rounds))
    sequences = numbered(alignment.shape.max_sequences, "sequence")
    _log.info("%s, %s a row at most, the fastest by costs %s", choice, sequences, choice.source)
    return choice


# Longer pairs are trained in one pass only if rows are long for other reasons.
_LONGEST_PAIR = 4096


def plans_pairs(task: PreparedTask, request: ShapeRequest) -> bool:
    """Whether a task's pairs should fit into the rows of the shape class, so that it trains in one
    pass."""
    row_len = request.row_len
    one_sequence = row_len and request.chunk_len and request.max_sequences == 1
    longest = task.longest_pair
    return longest is not None and longest <= (row_len or _LONGEST_PAIR) and not one_sequence


def _with_pairs(shape: ShapeClass) -> ShapeClass:
    return dataclasses.replace(shape, max_sequences=2 * shape.max_sequences)


def shrinking_of(
    tasks: Sequence[PreparedTask],
    costs: ReplicaCosts,
    shape: ShapeClass,
    first: EngineSize,
    places: int,
) -> Shrinking:
    """Rules for making the engine of a training run smaller.

    Args:
      tasks: the tasks of the training run, at least one.
      costs: the costs of these tasks on the only replica.
      shape: the shape class with which the run begins.
      first: the size with which the engine begins.
      places: number of tasks that train at the same time.
    """
    by_name = {task.task.name: task for task in tasks}

    @cache
    def shape_of(names: tuple[str, ...]) -> PricedShape:
        batches = [by_name[name].packed_lengths(shape) for name in names]
        rounds = sample_rounds(
            [PartOfBatches(of_task, costs.replica.shards) for of_task in batches]
        )
        return with_fewer_rows(rounds, shape, costs.microbatch, costs.replica.pp)

    return Shrinking(first, places, shape_of, {name: task.steps for name, task in by_name.items()})


def smaller_text(left: int, tasks: int, shape: ShapeClass) -> str:
    """The message that microbatches get smaller: `left` of `tasks` tasks still train, from now on
    in the shape class `shape`."""
    return (
        f"{left} of {numbered(tasks, 'task')} left: microbatches of {numbered(shape.rows, 'row')} "
        f"of {shape.row_len} tokens"
    )


def best_shape(
    tasks: Sequence[PreparedTask],
    backbone: Backbone,
    tokens_per_microbatch: int = 8192,
    remat: str = "auto",
    memory: int | None = None,
) -> ShapeClass:
    """Chooses the shape of microbatches for users of `Engine`: the value of `EngineOptions.shape`.

    It is the shape with which the tasks are predicted to train fastest on this device.
    `fine_tune` makes the same choice itself if `row_len` and `chunk_len` of its options are None.

    Args:
      tasks: the tasks that the engine will train, from `prepare_task`, at least one.
      backbone: the frozen backbone.
      tokens_per_microbatch: most tokens of a microbatch, rounded up to whole rows and chunks first.
      remat: remat policy, as in `EngineOptions`.
      memory: bytes that the engine may use, as in `EngineOptions`; None for all of the device. If
        no shape fits, the result has the shortest rows that hold the longest sample, and one sample
        in each row.

    Returns:
      The shape: number of rows of a microbatch, row_len (tokens of a row), chunk_len (tokens of a
      chunk, which belongs to one task) and the most samples in a row.

    Raises:
      PlanningError: there are no tasks, or `tokens_per_microbatch` is not positive.
    """
    if not tasks:
        raise PlanningError("no tasks to choose a shape class for")
    costs = run_costs(tasks, backbone.config, backbone.compute_dtype, remat, memory)
    request = ShapeRequest(tokens_per_microbatch, least_chunk_len=costs.least_chunk_len)
    return choose_run_shape(tasks, costs, request).alignment.shape
