"""Chooses the mesh of a training run: of all layouts of the devices, the one that is predicted to
train fastest."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxmux.engine import PreparedTask
from jaxmux.engine.backbone_size import mesh_sizes
from jaxmux.models import BackboneConfig
from jaxmux.planner import PlanningError
from jaxmux.planner.devices import Deployment, Replica
from jaxmux.planner.numbers import numbered

from .replica_fit import fit_replica
from .run_options import RunOptions

_log = logging.getLogger("jaxmux")
# Layouts that the message names besides the chosen one.
_SHOWN = 2
# Replicas are clearly faster if a round takes at most this part of a single one's.
_CLEARLY_FASTER = 0.95


class PricedMesh(NamedTuple):
    """A layout of the devices with its predicted time.

    Attributes:
      deployment: the layout, one replica or several.
      seconds: predicted seconds of a round (one global batch of every task), on average.
    """

    deployment: Deployment
    seconds: float


class MeshChoice(NamedTuple):
    """The layouts that fit, from the fastest.

    Attributes:
      meshes: the layouts, at least one.
    """

    meshes: tuple[PricedMesh, ...]

    @property
    def deployment(self) -> Deployment:
        """The fastest layout."""
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

    A layout's time is that of its microbatches in the shape class that is best for it, of an empty
    pipeline at the beginning and the end of every round, and of the updates. Several replicas are
    listed only if they are clearly faster than every single one, because the simulation by which
    they are compared leaves out how samples fill microbatches, and the exchange of gradients.

    Args:
      tasks: the tasks of the training run.
      config: configuration of the backbone.
      options: settings of the training run.
      devices: number of devices; all of them are used.
      places: number of tasks that train at the same time, with which unlike replicas are not
        considered; None for all of them.
      failed: layouts that are not considered, because a device ran out of memory.

    Raises:
      PlanningError: no layout fits. The message is that of the layout that needs least memory.
    """
    found, fits, refusal = [], [], None
    # Layouts that divide the weights most come first: theirs is the refusal that counts.
    for replica in sorted(possible_meshes(devices, config), key=lambda r: r.shards):
        if Deployment((replica,)) in failed:
            continue
        try:
            fit = fit_replica(tasks, config, options, replica, slots=places)
            fit.require(tasks[:places])
            found.append(PricedMesh(Deployment((replica,)), fit.round_seconds()))
            fits.append(fit)
        except PlanningError as e:
            _log.info("mesh %s: %s", replica, e)
            refusal = refusal or e
    if not found:
        every = numbered(devices, "device")
        raise PlanningError(
            f"mesh 'auto': no layout of {every} fits; {refusal or 'all ran out of memory'}"
        )
    singles = sorted(zip(fits, found, strict=True), key=lambda pair: pair[1].seconds)
    best = singles[0][1]
    # The simulation of replicas empties pipelines after every round, and training does not: beside
    # a pipeline, replicas would seem faster than they are.
    single, compared = next((own for own in singles if own[0].costs.replica.pp == 1), singles[0])
    if devices > 1 and places is None:
        # Other runs do without the solvers of deployments.
        from .unlike_replicas import choose_unlike

        unlike = choose_unlike(tasks, config, options, devices, single)
        if unlike and unlike[0] not in failed:
            several = PricedMesh(unlike[0], unlike[1] * compared.seconds)
            if several.seconds < _CLEARLY_FASTER * best.seconds:
                found.append(several)
    return MeshChoice(tuple(sorted(found, key=lambda mesh: mesh.seconds)))


def possible_meshes(devices: int, config: BackboneConfig) -> Iterator[Replica]:
    """Yields all layouts of the devices among which the backbone can be divided.

    Args:
      devices: number of devices of each layout.
      config: configuration of the backbone.
    """
    for sizes in _factorisations(devices, ("pp", "tp", "fsdp", "dp")):
        replica = Replica.uniform(**sizes)
        try:
            replica.require(config.num_layers, mesh_sizes(config))
        except PlanningError:
            continue
        yield replica


def fewer_devices(replica: Replica, devices: int, config: BackboneConfig) -> Replica:
    """The largest layout with no axis larger than a given layout has it.

    Args:
      replica: the given layout, with equal stages.
      devices: most devices of the result.
      config: configuration of the backbone, which can be divided among the result's devices.
    """
    wanted = replica.sizes
    smaller = (
        found
        for count in range(devices, 0, -1)
        for found in possible_meshes(count, config)
        if all(size <= wanted[axis] for axis, size in found.sizes.items())
    )
    return next(smaller)


def _factorisations(product: int, axes: Sequence[str]) -> Iterator[Mapping[str, int]]:
    """Yields all sizes of the axes with this product."""
    axis, *others = axes
    if not others:
        yield {axis: product}
        return
    for size in range(1, product + 1):
        if product % size == 0:
            for rest in _factorisations(product // size, others):
                yield {axis: size, **rest}
