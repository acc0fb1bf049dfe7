"""What microbatches take, in time and memory, on the devices of a mesh."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .memory_model import USABLE, MemoryModel, Placement
from .mesh import Mesh
from .pool import Pool
from .profile import ProfileError
from .remat_choice import split_stages
from .shape_class import PlanningError, ShapeClass
from .time_model import Pipeline, Remat, TimeModel

AUTO = "auto"


class _Residuals(NamedTuple):
    """How many microbatches a stage keeps values of, and which.

    Attributes:
      depth: most microbatches in flight.
      policies: remat policy of every layer.
    """

    depth: int
    policies: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class MeshCosts:
    """The costs of a run on a mesh. Times in seconds, sizes in bytes of one device.

    What a microbatch takes depends on how many of its chunks are empty and on nothing else that is
    in it: attention is priced by the length of its rows. Layers are divided over the stages as
    evenly as they can be, the head in equal parts; the all-reduces of tensor parallelism, two for
    each pass of a layer, are not hidden.

    Under "auto" a stage has room for `in_flight` microbatches, and layers recompute as little as
    that leaves memory for. It has room for more where that costs no recomputation, and for fewer
    only where so many do not fit though layers recompute all that they can.

    Attributes:
      times, memory: of the backbone and the device.
      pool: what all tasks together need.
      mesh: the devices.
      remat: rematerialisation policy of all layers, or "auto" for what the engine picks.
      in_flight: None for S, as many as 1F1B has.
    """

    times: TimeModel
    memory: MemoryModel
    pool: Pool
    mesh: Mesh
    remat: str = AUTO
    in_flight: int | None = None

    @property
    def most_in_flight(self) -> int:
        """Microbatches that a stage can make use of at once."""
        return 2 * self.mesh.pp - 1

    def depth(self, shape: ShapeClass) -> int:
        """Most microbatches in flight on a stage that fit into memory under `policies`, as far as a
        pipeline makes use of them; 0 where not even one fits."""
        return self._residuals(shape).depth

    def require(self, shape: ShapeClass, mesh_may_grow: bool = True) -> None:
        """Checks that one microbatch fits.

        Args:
          mesh_may_grow: whether more pipeline stages are among the changes that are named.

        Raises:
          PlanningError: it does not; the message names the smallest changes that would make it.
        """
        if self._fits(shape, 1):
            return
        self.memory.require(shape, self.pool, self._placement(1), mesh_may_grow)
        needed = self.peak(shape, self.remat, 1)
        raise PlanningError(
            f"remat={self.remat!r} needs {needed / 2**30:.1f} GiB, usable are "
            f"{USABLE * self.memory.memory / 2**30:.1f} GiB; it would fit with remat='auto'"
        )

    def policies(self, shape: ShapeClass) -> tuple[str, ...]:
        """The remat policy of every layer, with `depth` microbatches in flight."""
        return self._residuals(shape).policies

    def stages(
        self, shape: ShapeClass, owned: float | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward of a microbatch, float64 [S] each, with its part of the head.

        Args:
          owned: tokens of the chunks that are not empty; None for all.
        """
        policies, pipeline = self.policies(shape), Pipeline(self.mesh.pp, self.mesh.tp)
        layer = {policy: self._layer(shape, owned, policy) for policy in set(policies)}
        layers = [
            sum((layer[policy] for policy in stage), np.zeros(2))
            for stage in split_stages(policies, pipeline.layers(len(policies)))
        ]
        head = np.array(pipeline.head_shares()) * self.times.head(shape.tokens) / pipeline.tp / 2
        forward, backward = np.transpose(layers) + head
        return forward, backward

    def microbatch(self, shape: ShapeClass, owned: float | None = None) -> float:
        """Forward and backward on the slowest stage, see `stages`; infinite where it does not
        fit."""
        return float(sum(self.stages(shape, owned)).max()) if self.depth(shape) else np.inf

    def permute(self, shape: ShapeClass) -> float:
        """The messages at the end of a tick."""
        return self.times.collective("ppermute", self.mesh.pp, self._stream_bytes(shape))

    def update(self) -> float:
        """What a round takes besides its microbatches: the update of every task, overheads.

        Raises:
          ProfileError: the profile measures no update of the pool's optimizer.
        """
        if self.pool.optimizer not in self.times.update:
            raise ProfileError(f"the profile measures no update of {self.pool.optimizer!r}")
        own = self.pool.parameters(self.times.backbone) / self.mesh.devices
        return self.times.update[self.pool.optimizer](own) + self.times.round_overhead

    def peak(self, shape: ShapeClass, remat: Remat, in_flight: int) -> float:
        """Peak memory of a device with so many microbatches in flight."""
        return self.memory.peak(shape, self.pool, remat, self._placement(in_flight))

    @functools.cached_property
    def _residuals(self) -> Callable[[ShapeClass], _Residuals]:
        # Planning asks for the same few shapes again and again.
        return functools.cache(self._choose_residuals)

    def _choose_residuals(self, shape: ShapeClass) -> _Residuals:
        """The least recomputation with the microbatches in flight that are asked for, or with as
        many as fit, and how many more fit without any more of it."""
        deepest = next((k for k in range(self.most_in_flight, 0, -1) if self._fits(shape, k)), 0)
        needed = min(self.in_flight or self.mesh.pp, deepest)
        policies = self._fill(shape, needed)
        alike = [k for k in range(needed, deepest + 1) if self._fill(shape, k) == policies]
        return _Residuals(alike[-1], policies)

    def _fill(self, shape: ShapeClass, in_flight: int) -> tuple[str, ...]:
        if self.remat != AUTO:
            return (self.remat,) * self.times.backbone.layers
        return self.memory.policies(shape, self.pool, self._placement(max(1, in_flight)))

    def _layer(self, shape: ShapeClass, owned: float | None, policy: str) -> np.ndarray:
        """Forward and backward of a layer and their all-reduces: float64 [2]."""
        tp, tokens = self.mesh.tp, shape.tokens if owned is None else owned
        passes = self.times.layer(shape, (tokens,), self.pool, policy, tp, total=shape.tokens)
        return np.array(passes) + 2 * self.times.collective("psum", tp, self._stream_bytes(shape))

    def _fits(self, shape: ShapeClass, in_flight: int) -> bool:
        if self.remat == AUTO:
            return self.memory.fits(shape, self.pool, self._placement(in_flight))
        return self.peak(shape, self.remat, in_flight) <= USABLE * self.memory.memory

    def _placement(self, in_flight: int) -> Placement:
        return Placement(self.mesh.pp, self.mesh.tp, in_flight)

    def _stream_bytes(self, shape: ShapeClass) -> int:
        backbone = self.times.backbone
        return shape.tokens * backbone.hidden_size * backbone.stream_bytes
