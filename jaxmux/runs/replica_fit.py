"""Whether the tasks of a training run fit on a replica, and in which shape class."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxmux.engine import PreparedTask
from jaxmux.engine.batch_lengths import BatchLengths
from jaxmux.models import BackboneConfig, backbone_dtype
from jaxmux.planner.costs import CostSource, PoolSpec, ReplicaCosts, merge_pool_specs
from jaxmux.planner.costs.admission import Admission
from jaxmux.planner.devices import Replica
from jaxmux.planner.numbers import power_of_two
from jaxmux.planner.packing import (
    MIN_CHUNK_LEN,
    PartOfBatches,
    ShapeClass,
    longest_that_fits,
    sample_rounds,
    sampled_part,
)

from .run_options import RunOptions
from .run_shape import Choice, PlannedDevice, choose_run_shape, run_costs


class ReplicaFit(NamedTuple):
    """The microbatches of tasks on a replica, with their costs.

    Attributes:
      costs: predicted seconds and bytes on the replica.
      source: origin of the costs.
      shape: shape class of the microbatches.
      choice: how the shape class was chosen; None if it was given.
      admission: predicts whether tasks fit into memory.
      lengths: by task and step, the lengths of the samples that a data shard of the replica trains.
    """

    costs: ReplicaCosts
    source: CostSource
    shape: ShapeClass
    choice: Choice | None
    admission: Admission
    lengths: Sequence[PartOfBatches]

    def round_seconds(self) -> float | None:
        """The predicted seconds of a round (one global batch of every task), on average: its
        microbatches, the time in which stages of a pipeline have nothing to do, and the updates.
        None if the shape class was given."""
        if self.choice is None:
            return None
        stages, seconds = self.costs.replica.pp, self.choice.alignment.seconds
        if stages > 1:
            # Training on one device does not need the planner of pipelines.
            from jaxmux.planner.pipeline import grouping_of_tasks, plan_with

            grouping = grouping_of_tasks(self.lengths, self.shape, stages)
            rounds = [batches for batches in sample_rounds(self.lengths) if any(batches.values())]
            seconds = plan_with(grouping, rounds, self.shape, self.costs).simulation.makespan
        return seconds / self.choice.rounds / sampled_part(self.lengths) + self.costs.update()

    def require(self, tasks: Sequence[PreparedTask]) -> None:
        """Raises PlanningError if the tasks do not fit into the replica's memory."""
        self.admission.require({task.task.name: task.pool for task in tasks})
        self.costs.require_full_pipeline(self.shape)


def fit_replica(
    tasks: Sequence[PreparedTask],
    config: BackboneConfig,
    options: RunOptions,
    replica: Replica,
    shape: ShapeClass | None = None,
    longest: int | None = None,
    shares: int = 1,
    slots: int | None = None,
    device: PlannedDevice | None = None,
) -> ReplicaFit:
    """Chooses the shape class of a replica's microbatches.

    Args:
      tasks: the tasks of the training run.
      config: configuration of the backbone.
      options: settings of the training run.
      replica: the devices.
      shape: the shape class, if it is known already; None chooses it.
      longest: most tokens of the samples that the replica trains; None for all samples.
      shares: number of parts into which a global batch is divided among replicas.
      slots: number of tasks that train at the same time; None for all of them.
      device: as for `run_costs`.

    Raises:
      PlanningError: a sample is longer than `options.row_len`, or a given length is not a power of
        two.
    """
    dtype = backbone_dtype(options.dtype)
    costs = run_costs(
        tasks, config, dtype, options.remat, options.memory, replica, slots, shares, device
    )
    choice = None
    if shape is None:
        request = options.shape_request(costs.least_chunk_len)
        choice = choose_run_shape(tasks, costs, request, longest, shares)
        shape = choice.alignment.shape
    asked, reserved = options.tokens_per_microbatch, options.reserved(config)
    if slots is not None:
        reserved = pool_with_places(tasks, reserved, slots)
    admission = Admission(costs.replica, shape, asked, reserved, more_stages=False)
    parts = replica.shards * shares
    lengths = [
        PartOfBatches(BatchLengths(task.batches, task.steps), parts, longest) for task in tasks
    ]
    return ReplicaFit(costs.replica, costs.source, shape, choice, admission, lengths)


def pool_with_places(tasks: Sequence[PreparedTask], reserved: PoolSpec, slots: int) -> PoolSpec:
    """A pool in which each of these tasks can take any place.

    Args:
      tasks: the tasks.
      reserved: the smallest pool.
      slots: number of tasks that have a place at the same time.
    """
    pool = merge_pool_specs([task.pool for task in tasks], reserved)
    return pool._replace(slots=max(slots, reserved.slots))


def fit_longest(
    tasks: Sequence[PreparedTask],
    config: BackboneConfig,
    options: RunOptions,
    replica: Replica,
    shares: int,
    slots: int | None = None,
    device: PlannedDevice | None = None,
) -> ReplicaFit:
    """Chooses the shape class of a replica beside others, which may train the samples for which it
    has no memory.

    Args:
      tasks: the tasks of the training run.
      config: configuration of the backbone.
      options: settings of the training run.
      replica: the devices.
      shares: number of parts into which a global batch is divided among replicas.
      slots: number of tasks that train at the same time; None for all of them.
      device: as for `run_costs`.

    Raises:
      PlanningError: the replica has no memory for any sample of the tasks.
    """
    lengths = [length for task in tasks for length in task.lengths]
    longest = power_of_two(max(lengths))
    dtype = backbone_dtype(options.dtype)
    costs = run_costs(
        tasks, config, dtype, options.remat, options.memory, replica, slots, shares, device
    )
    # A row of this length alone tells most lengths apart, without a choice of the shape class.
    while (
        longest > MIN_CHUNK_LEN and not options.row_len and not _holds_row(costs.replica, longest)
    ):
        longest //= 2
    longest = max(longest, power_of_two(min(lengths)))

    def choose(longest: int) -> ReplicaFit:
        return fit_replica(
            tasks,
            config,
            options,
            replica,
            longest=longest,
            shares=shares,
            slots=slots,
            device=device,
        )

    def require(fit: ReplicaFit) -> None:
        fit.require(tasks[:slots])

    fixed = options.row_len is not None
    return longest_that_fits(lengths, longest, choose, require, fixed)


def _holds_row(costs: ReplicaCosts, row_len: int) -> bool:
    """Whether memory suffices for microbatches of a single row."""
    row = ShapeClass(rows=1, row_len=row_len, chunk_len=MIN_CHUNK_LEN, max_sequences=1)
    return costs.depth(row) >= costs.replica.pp
