"""The devices of a training run, and the shape classes of its microbatches."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmux.engine import EngineOptions, EngineSize, PreparedTask
from jaxmux.engine.devices.programs import bytes_of
from jaxmux.engine.queued_engine import Shrinking
from jaxmux.engine.tasks.prepared_task import mesh_sizes, size_of
from jaxmux.models import (
    Backbone,
    BackboneConfig,
    backbone_dtype,
    device_memory,
    free_memory,
    load_backbone,
)
from jaxmux.models.modules import abstract_weights
from jaxmux.planner import PlanningError
from jaxmux.planner.costs.admission import Admission
from jaxmux.planner.devices import AUTO_SCHEDULE, ONE_DEVICE, Deployment, Replica
from jaxmux.planner.numbers import numbered, size_text
from jaxmux.planner.packing import ShapeClass, require_longest_rows
from jaxmux.sharding import (
    PlacedBackbone,
    consecutive_parts,
    load_placed_backbone,
    stage_meshes,
)

from .console import RunConsole
from .mesh_choice import ReplicaFit, choose_mesh, fewer_devices, fit_longest, fit_replica
from .run_directory import RecordedShapes
from .run_options import AUTO_MESH, RunOptions
from .run_shape import PlannedDevice, costs_of_run, shrinking_of

if TYPE_CHECKING:
    from jaxmux.planner.replicas import SequenceCosts
from functools import partial

# Seconds between two lines that report how much of the backbone is loaded.
_SECONDS_A_LINE = 5.0


class RunLayout(NamedTuple):
    """The devices of a training run and its microbatches.

    Attributes:
      shapes: for each replica, the shape class of its microbatches.
      admissions: predict whether tasks fit into memory, one for each kind of replica, that of the
        first replica first; empty if the device's memory is unknown.
      costs: times of the replicas; None if there is only one.
      round_seconds: predicted mean seconds of a round (one global batch of every task); None if
        nothing was measured on such a device, or if a run continues. With several replicas, the
        exchange of gradients is not included.
      places: number of tasks that train at the same time; None means all.
    """

    deployment: Deployment
    shapes: tuple[ShapeClass, ...]
    admissions: tuple[Admission, ...]
    costs: "SequenceCosts | None"
    round_seconds: float | None
    places: int | None = None

    @property
    def shape(self) -> ShapeClass:
        """The shape class with the longest rows."""
        return max(self.shapes, key=lambda shape: shape.row_len)

    def shrinking(
        self,
        tasks: Sequence[PreparedTask],
        config: BackboneConfig,
        options: RunOptions,
        device: PlannedDevice | None = None,
    ) -> Shrinking | None:
        """Rules for making the engine smaller when tasks end; None if the engine keeps its size. It
        keeps its size if it has several replicas. On a CPU, it also does so if microbatches of
        fewer rows would change the bits of some task's results. `device` is as for
        `choose_layout`."""
        on_cpu = (device.kind if device else jax.local_devices()[0].device_kind) == "cpu"
        any_rows = all(task.kind.same_in_any_rows for task in tasks)
        if len(self.deployment.replicas) > 1 or (on_cpu and not any_rows):
            return None
        (replica,), places = self.deployment.replicas, self.places or len(tasks)
        costs = costs_of_run(tasks, config, options, replica, self.places, device=device)
        first = EngineSize(max(places, options.reserved(config).slots), self.shape.rows)
        return shrinking_of(tasks, costs.replica, self.shape, first, places)

    def added_to(self, recorded: RecordedShapes | None) -> RecordedShapes:
        """The shape classes that a training run records: those in `recorded`, if any, and those of
        this layout."""
        recorded = recorded or RecordedShapes(self.shape, {})
        if len(self.shapes) == 1:
            return recorded
        several = {str(self.deployment): self.shapes}
        return recorded._replace(several=recorded.several | several)


def refuse_mesh(deployment: Deployment, config: BackboneConfig) -> None:
    """Raises PlanningError if the backbone cannot be divided among the devices or if they do not
    exist. The message names the nearest possible layout."""
    for replica in deployment.counts:
        replica.require(config.num_layers, mesh_sizes(config))
    if deployment.devices <= (available := len(jax.devices())):
        _refuse_idle_processes(deployment)
        return
    if len(deployment.replicas) == 1:
        fitting = fewer_devices(deployment.replicas[0], available, config)
    else:
        fitting = Deployment((ONE_DEVICE,) * available)
    raise PlanningError(
        f"mesh {deployment}: {numbered(deployment.devices, 'device')}, but there "
        f"{'is' if available == 1 else 'are'} {available}; it would fit with {fitting}"
    )


def _refuse_idle_processes(deployment: Deployment) -> None:
    """Raises PlanningError if a process has none of the mesh's devices, which are the first
    ones."""
    busy = {device.process_index for device in jax.devices()[: deployment.devices]}
    if idle := set(range(jax.process_count())) - busy:
        raise PlanningError(
            f"mesh {deployment}: {numbered(deployment.devices, 'device')}, of which process "
            f"{min(idle)} has none; take a mesh of all {len(jax.devices())} devices, or fewer "
            "processes"
        )


def choose_layout(
    tasks: Sequence[PreparedTask],
    config: BackboneConfig,
    options: RunOptions,
    recorded: RecordedShapes | None,
    console: RunConsole,
    places: int | None = None,
    failed: Sequence[Deployment] = (),
    device: PlannedDevice | None = None,
) -> RunLayout:
    """Chooses the devices, if `options.mesh` is "auto", and the shape classes of the microbatches.

    Args:
      recorded: the shape classes with which the training run began, which are kept; None for a new
        run.
      console: prints the choice.
      places: number of tasks that train at the same time; None means all.
      failed: layouts that "auto" leaves out because a device ran out of memory on them.
      device: the kind of the devices; None means those of this machine, which "auto" needs. Another
        kind needs `options.dtype` and `options.memory_gib`.

    Raises:
      PlanningError: the tasks do not fit into memory.
    """
    if options.mesh == AUTO_MESH:
        choice = choose_mesh(tasks, config, options, len(jax.devices()), places, failed)
        console.say(str(choice))
        deployment = choice.deployment
    else:
        deployment = options.deployment
    for replica in deployment.counts:
        if replica != ONE_DEVICE:
            layers = size_of(config, backbone_dtype(options.dtype)).stage_layers(replica)
            layers = ", ".join(map(str, layers))
            shards = numbered(replica.shards, "data shard")
            named = options.schedule != AUTO_SCHEDULE
            schedule = f", schedule {options.schedule}" if named else ""
            console.say(f"mesh {replica}: stages of {layers} layers, {shards}{schedule}")
    several = len(deployment.replicas) > 1
    kept = (recorded and recorded.of(deployment)) or [None] * len(deployment.replicas)
    kept = dict(zip(deployment.replicas, kept, strict=True))
    known = bool(options.memory or (device is None and device_memory()))
    fits: dict[Replica, ReplicaFit] = {}
    for replica in deployment.counts:
        shares = round(deployment.devices / replica.devices)
        if several and known and kept[replica] is None:
            fit = fit_longest(tasks, config, options, replica, shares, places, device)
        else:
            shape = kept[replica]
            fit = fit_replica(
                tasks,
                config,
                options,
                replica,
                shape,
                shares=shares,
                slots=places,
                device=device,
            )
        if fit.choice:
            place = f"mesh {replica}: " if several else ""
            console.say(f"{place}{fit.choice}")
        if known:
            fit.require(tasks[:places])
        if replica != ONE_DEVICE:
            console.say(f"mesh {replica}: {_device_bytes(fit, known)}")
        fits[replica] = fit
    shapes = tuple(fits[replica].shape for replica in deployment.replicas)
    first = fits[deployment.replicas[0]]
    admissions = tuple(fit.admission for fit in fits.values()) if known else ()
    seconds = _round_seconds(tasks, deployment, fits) if first.source.kind == "measured" else None
    costs = _dispatch_costs(fits) if several else None
    layout = RunLayout(deployment, shapes, admissions, costs, seconds, places)
    longest = {task.task.name: task.longest for task in tasks}
    require_longest_rows(deployment, layout.shape.row_len, longest)
    return layout


def _round_seconds(
    tasks: Sequence[PreparedTask], deployment: Deployment, fits: Mapping[Replica, ReplicaFit]
) -> float | None:
    """Predicted mean seconds of a round; None if a shape class was prescribed."""
    if len(deployment.replicas) == 1:
        return fits[deployment.replicas[0]].round_seconds()
    if any(fit.choice is None for fit in fits.values()):
        return None
    # Imported here because only runs with several replicas use the deployment planner.
    from jaxmux.planner.replicas import predicted_round_seconds

    batches = [task.batch_lengths for task in tasks]
    costs = {replica: (fit.costs, fit.shape) for replica, fit in fits.items()}
    return predicted_round_seconds(batches, deployment, costs)


def _device_bytes(fit: ReplicaFit, known: bool) -> str:
    """Contents of the fullest device's memory, for messages. `known` means that the size of the
    device's memory is known."""
    costs, shape = fit.costs, fit.shape
    held = size_text(costs.memory.resident(costs.pool, costs.replica))
    text = f"{held} a device for weights and tasks"
    if not known:
        return text
    peak = costs.peak(shape, costs.policies(shape), fit.in_flight)
    return f"{text}, peak {size_text(peak)} (predicted)"


def _dispatch_costs(fits: Mapping[Replica, ReplicaFit]) -> "SequenceCosts":
    # Imported here because a single replica needs neither dispatch nor its solvers.
    from jaxmux.planner.replicas import ShapeCosts

    return ShapeCosts({replica: (fit.costs, fit.shape) for replica, fit in fits.items()})


def engine_options(
    options: RunOptions, config: BackboneConfig, shape: ShapeClass, **others: Any
) -> EngineOptions:
    """The options of the engine of a training run or a server, with the further fields `others`.
    Raises PlanningError if `options.reserved_targets` matches no linear of the backbone."""
    return EngineOptions(
        shape,
        options.reserved(config),
        options.remat,
        options.memory,
        options.attention,
        options.grouped_lora,
        schedule=options.schedule,
        max_bad_steps=options.max_bad_steps,
        **others,
    )


def load_on(
    deployment: Deployment,
    folder: str,
    dtype: jnp.dtype,
    config: BackboneConfig,
    cache: str | None,
    say: Callable[[str], None],
) -> Backbone | list[PlacedBackbone]:
    """Loads a backbone onto the default device, or onto each replica's devices. `cache` and errors
    are as for `load_backbone`; raises OSError if the cache cannot be written. Every few seconds,
    `say` prints a line with the progress."""
    form = config.backbone_format
    progress = _LoadingLines(bytes_of(abstract_weights(config, dtype)), say)
    if deployment.devices == 1:
        return load_backbone(folder, dtype, form, cache, progress)
    devices, loaded = iter(jax.devices()), []
    for replica in deployment.replicas:
        parts = consecutive_parts(size_of(config, dtype).part_layers(replica))
        homes = stage_meshes(replica, [next(devices) for _ in range(replica.devices)], config)
        homes = list(homes) * replica.parts
        loaded.append(load_placed_backbone(folder, dtype, parts, homes, form, cache, progress))
    return loaded


class _LoadingLines:
    def __init__(self, total: int, say: Callable[[str], None]):
        self._total, self._say = total, say
        self._done, self._said_at = 0, time.monotonic()

    def __call__(self, count: int) -> None:
        self._done += count
        if time.monotonic() - self._said_at > _SECONDS_A_LINE:
            self._said_at = time.monotonic()
            done, total = size_text(self._done), size_text(self._total)
            self._say(f"loading the backbone: {done} of {total}")


def load_beside(folder: str, dtype: jnp.dtype, config: BackboneConfig) -> Backbone | None:
    """Loads a whole backbone onto the default device, beside the arrays that are there; None if the
    device has too little free memory."""
    needed, free = bytes_of(abstract_weights(config, dtype)), free_memory()
    if free is not None and needed > free:
        return None
    return load_backbone(folder, dtype, config.backbone_format)


def layout_with_places(
    tasks: Sequence[PreparedTask],
    config: BackboneConfig,
    options: RunOptions,
    recorded: RecordedShapes | None,
    console: RunConsole,
    may_wait: bool,
    failed: Sequence[Deployment] = (),
    device: PlannedDevice | None = None,
) -> RunLayout:
    """Chooses the devices and the shape classes of the microbatches like `choose_layout`. If not
    all tasks fit into memory, as many as fit train at the same time, and `RunLayout.places` is
    their number.

    Args:
      may_wait: whether tasks may wait for a slot if they do not fit at the same time. If not, the
        error names the number of tasks that fit.

    Raises:
      PlanningError: the tasks do not fit into memory; with `may_wait`, not even one of them does.
    """
    choose = partial(choose_layout, tasks, config, options, recorded, failed=failed, device=device)
    most = options.tasks_at_once if (options.tasks_at_once or len(tasks)) < len(tasks) else None
    try:
        layout = choose(console, most)
    except PlanningError as e:
        fewer = _most_that_fit(choose, most or len(tasks))
        if not fewer:
            raise
        if not may_wait:
            raise PlanningError(
                f"{e}; or, so that the others wait for a place, tasks_at_once={fewer}"
            ) from None
        layout = choose(console, fewer)
    if layout.places:
        console.say(
            f"{layout.places} of {len(tasks)} tasks train at the same time; the others wait for a "
            "place"
        )
    return layout


def _most_that_fit(choose: partial[RunLayout], too_many: int) -> int:
    """The largest number of slots below `too_many` for which there is memory; 0 if there is
    none."""
    fitting = 0
    while too_many - fitting > 1:
        tried = (fitting + too_many) // 2
        try:
            choose(RunConsole.silent(), tried)
            fitting = tried
        except PlanningError:
            too_many = tried
    return fitting
