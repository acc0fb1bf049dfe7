"""Chooses the mesh of a training run: the one that has memory for the tasks and is predicted to
train fastest. The candidates are all layouts of the devices, and replicas that may differ (LobRA
4)."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jaxmux.engine import PreparedTask
from jaxmux.engine.tasks.prepared_task import mesh_sizes
from jaxmux.models import BackboneConfig
from jaxmux.planner import PlanningError
from jaxmux.planner.costs import CostSource, PoolSpec, ReplicaCosts, merge_pool_specs
from jaxmux.planner.costs.admission import Admission
from jaxmux.planner.costs.memory_model import USABLE
from jaxmux.planner.devices import AUTO_SCHEDULE, Deployment, Replica
from jaxmux.planner.numbers import numbered, power_of_two, size_text
from jaxmux.planner.packing import (
    MIN_CHUNK_LEN,
    PartOfBatches,
    ShapeClass,
    longest_that_fits,
    sample_rounds,
    sampled_part,
)

from .run_options import RunOptions
from .run_shape import Choice, PlannedDevice, choose_run_shape, costs_of_run, plans_pairs

if TYPE_CHECKING:
    from jaxmux.planner.pipeline.pipeline_plan import PipelinePlan


class ReplicaFit(NamedTuple):
    """The microbatches of tasks on a replica, with their costs.

    Attributes:
      choice: the search for the shape class; None if the caller prescribed the shape class.
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
        """Predicted mean seconds of a round (one global batch of every task), with idle stages of a
        pipeline and the updates. None if the shape class was prescribed."""
        if self.choice is None:
            return None
        seconds = self.choice.alignment.seconds
        if self.costs.replica.pp > 1:
            seconds = self._pipeline().simulation.makespan
        return seconds / self.choice.rounds / sampled_part(self.lengths) + self.costs.update()

    @property
    def in_flight(self) -> float:
        """Most microbatches in flight on a stage: `ReplicaCosts.full_depth`, or with GPipe the
        number of microbatches in the longest of the sampled rounds."""
        if self.costs.schedule != "gpipe":
            return self.costs.full_depth
        return max(Counter(self._pipeline().rounds).values())

    def _pipeline(self) -> "PipelinePlan":
        """The pipeline plan of a sample of the rounds."""
        # Imported here because training on one device does not need the pipeline planner.
        from jaxmux.planner.pipeline import grouping_of_tasks, plan_with

        costs, shape = self.costs, self.shape
        grouping = grouping_of_tasks(self.lengths, shape, costs.replica.pp, schedule=costs.schedule)
        rounds = [batches for batches in sample_rounds(self.lengths) if any(batches.values())]
        return plan_with(grouping, rounds, shape, costs)

    def require(self, tasks: Sequence[PreparedTask]) -> None:
        """Raises PlanningError if the tasks do not fit into the replica's memory."""
        self.admission.require({task.task.name: task.pool for task in tasks})
        self.costs.require_full_pipeline(self.shape)
        if self.costs.schedule == "gpipe":
            self._require_whole_rounds()

    def _require_whole_rounds(self) -> None:
        costs, shape, in_flight = self.costs, self.shape, int(self.in_flight)
        if costs.remat == "auto":
            raise PlanningError(
                "schedule='gpipe' keeps the values of all microbatches of a round, for which "
                "remat='auto' cannot make room; name a remat policy, such as remat='full'"
            )
        needed, usable = costs.peak(shape, costs.remat, in_flight), USABLE * costs.memory.memory
        if needed > usable:
            raise PlanningError(
                f"schedule='gpipe' keeps the values of all {in_flight} microbatches of a round, "
                f"which needs {size_text(needed)} a device, usable are {size_text(usable)}; try "
                "schedule='auto'"
            )


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
    """Chooses the shape class of a replica's microbatches. Raises PlanningError if a sample is
    longer than `options.row_len`, or a prescribed length is not a power of two.

    Args:
      shape: a prescribed shape class; None means that it is chosen.
      longest: tokens of the longest sample that the replica trains; None means all samples.
      shares: number of parts into which a global batch is divided among replicas.
      slots: number of tasks that train at the same time; None means all.
      device: as for `run_costs`.
    """
    costs = costs_of_run(tasks, config, options, replica, slots, shares, device)
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
    lengths = [PartOfBatches(task.packed_lengths(shape), parts, longest) for task in tasks]
    return ReplicaFit(costs.replica, costs.source, shape, choice, admission, lengths)


def pool_with_places(tasks: Sequence[PreparedTask], reserved: PoolSpec, slots: int) -> PoolSpec:
    """A pool of at least the size `reserved` in which any `slots` of these tasks fit together."""
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
    """Chooses the shape class of a replica that trains beside other replicas. If its memory is too
    small for the longest samples, it leaves these to the others. The arguments are those of
    `fit_replica`. Raises PlanningError if the replica has no memory for any sample of the tasks."""
    lengths = [length for task in tasks for length in task.lengths]
    costs = costs_of_run(tasks, config, options, replica, slots, shares, device)
    request = options.shape_request(costs.least_chunk_len)
    lengths += [task.longest_pair for task in tasks if plans_pairs(task, request)]
    longest = power_of_two(max(lengths))
    # Testing a single row rules out most lengths without choosing a shape class.
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
    """Whether there is memory for microbatches of a single row of this length."""
    row = ShapeClass(rows=1, row_len=row_len, chunk_len=MIN_CHUNK_LEN, max_sequences=1)
    return costs.depth(row) >= costs.full_depth


def choose_unlike(
    tasks: Sequence[PreparedTask],
    config: BackboneConfig,
    options: RunOptions,
    devices: int,
    single: ReplicaFit,
) -> tuple[Deployment, float] | None:
    """Chooses several replicas by simulating a sample of rounds, and compares them with `single`,
    all devices as one replica in which all tasks fit.

    Returns:
      The replicas, in descending order of devices, and their predicted seconds of a round divided
      by those of `single`; None if some sample fits into no replica.
    """
    # Imported here because most runs have one replica.
    from jaxmux.planner.replicas import (
        ShapeCosts,
        candidate_replicas,
        choose_replicas,
        round_bins,
        simulate_rounds,
    )

    fits = {}
    for replica in candidate_replicas(devices):
        try:
            replica.require(config.num_layers, mesh_sizes(config))
            shares = devices // replica.devices
            fits[replica] = fit_longest(tasks, config, options, replica, shares)
        except PlanningError as e:
            _log.info("replica %s: %s", replica, e)
    costs = ShapeCosts({r: (f.costs, f.shape) for r, f in (fits | {_of(single): single}).items()})
    sampled = sample_rounds([task.batch_lengths for task in tasks])
    rounds = [[length for part in a_round.values() for length in part] for a_round in sampled]
    bins = [round_bins(lengths) for lengths in rounds]
    together = round_bins([length for lengths in rounds for length in lengths])
    try:
        plan = choose_replicas(devices, list(fits), together, bins, costs, len(rounds))
    except PlanningError as e:
        _log.info("replicas: %s", e)
        return None
    largest_first = sorted(plan.replicas.items(), key=lambda counted: -counted[0].devices)
    deployment = Deployment.of_counts(dict(largest_first))
    # Held-out samples must fit as well.
    longest = max(task.longest for task in tasks)
    if longest > max(fits[replica].shape.row_len for replica in plan.replicas):
        return None
    seconds = [
        simulate_rounds(replicas, devices, bins, costs)
        for replicas in (plan.replicas, {_of(single): 1})
    ]
    return deployment, seconds[0] / seconds[1]


def _of(fit: ReplicaFit) -> Replica:
    return fit.costs.replica


_log = logging.getLogger("jaxmux")
# The message names this number of layouts besides the chosen one.
_SHOWN = 2
# Several replicas are chosen only if their round takes at most this fraction of the time of the
# fastest single replica.
_CLEARLY_FASTER = 0.95


class PricedMesh(NamedTuple):
    """A layout of the devices, as one replica or several, with the predicted mean seconds of a
    round (one global batch of every task)."""

    deployment: Deployment
    seconds: float


class MeshChoice(NamedTuple):
    """The layouts that fit, fastest first; at least one."""

    meshes: tuple[PricedMesh, ...]

    @property
    def deployment(self) -> Deployment:
        return self.meshes[0].deployment

    def __str__(self) -> str:
        best, *others = (
            f"{mesh.deployment} ({mesh.seconds:.3g} s a round)" for mesh in self.meshes
        )
        text = f"mesh {best} is predicted to be the fastest"
        return text + (f", before {', '.join(others[:_SHOWN])}" if others else "")


def choose_mesh(
    tasks: Sequence[PreparedTask],
    config: BackboneConfig,
    options: RunOptions,
    devices: int,
    places: int | None = None,
    failed: Sequence[Deployment] = (),
) -> MeshChoice:
    """Prices all layouts of the devices in which the tasks fit into memory.

    The predicted time of a layout includes its microbatches in the layout's best shape class,
    filling and emptying the pipeline in every round, and the updates. Several replicas are listed
    only if they are clearly faster than every single replica, because the simulation that compares
    them ignores how samples fill microbatches, and the exchange of gradients.

    Args:
      options: settings of the training run. With a schedule other than "auto", only pipelines that
        can follow the schedule are considered.
      devices: number of devices; all are used.
      places: number of tasks that train at the same time; None means all. If a number is given,
        replicas that differ are not considered.
      failed: layouts to leave out because a device ran out of memory on them.

    Raises:
      PlanningError: no layout fits. The message is about the layout that needs least memory.
    """
    priced, fits, refusal = [], [], None
    # Layouts that divide the weights most come first, because the first error is reported.
    for replica in sorted(possible_meshes(devices, config), key=lambda r: r.shards):
        try:
            replica = replica.following(options.schedule)
            replica.require(config.num_layers, mesh_sizes(config))
            if Deployment((replica,)) in failed:
                continue
            fit = fit_replica(tasks, config, options, replica, slots=places)
            fit.require(tasks[:places])
            priced.append(PricedMesh(Deployment((replica,)), fit.round_seconds()))
            fits.append(fit)
        except PlanningError as e:
            _log.info("mesh %s: %s", replica, e)
            refusal = refusal or e
    if not priced:
        every = numbered(devices, "device")
        raise PlanningError(
            f"mesh 'auto': no layout of {every} fits; {refusal or 'all ran out of memory'}"
        )
    singles = sorted(zip(fits, priced, strict=True), key=lambda pair: pair[1].seconds)
    best = singles[0][1]
    # The simulation of replicas empties pipelines after every round, but training does not.
    # Replicas are therefore compared with a layout without a pipeline, if there is one.
    single, compared = next((pair for pair in singles if pair[0].costs.replica.pp == 1), singles[0])
    if devices > 1 and places is None and options.schedule == AUTO_SCHEDULE:
        unlike = choose_unlike(tasks, config, options, devices, single)
        if unlike and unlike[0] not in failed:
            several = PricedMesh(unlike[0], unlike[1] * compared.seconds)
            if several.seconds < _CLEARLY_FASTER * best.seconds:
                priced.append(several)
    return MeshChoice(tuple(sorted(priced, key=lambda mesh: mesh.seconds)))


def possible_meshes(devices: int, config: BackboneConfig) -> Iterator[Replica]:
    """Yields all layouts of this number of devices among which the backbone can be divided."""
    for sizes in _factorisations(devices, ("pp", "tp", "fsdp", "dp")):
        replica = Replica.uniform(**sizes)
        try:
            replica.require(config.num_layers, mesh_sizes(config))
        except PlanningError:
            continue
        yield replica


def fewer_devices(replica: Replica, devices: int, config: BackboneConfig) -> Replica:
    """The largest possible layout of the backbone on at most `devices` devices in which no axis is
    larger than in `replica`, whose stages are equal."""
    wanted = replica.sizes
    smaller = (
        layout
        for count in range(devices, 0, -1)
        for layout in possible_meshes(count, config)
        if all(size <= wanted[axis] for axis, size in layout.sizes.items())
    )
    return next(smaller)


def _factorisations(product: int, axes: Sequence[str]) -> Iterator[Mapping[str, int]]:
    """Yields all sizes of the axes whose product is `product`."""
    axis, *others = axes
    if not others:
        yield {axis: product}
        return
    for size in range(1, product + 1):
        if product % size == 0:
            for rest in _factorisations(product // size, others):
                yield {axis: size, **rest}
