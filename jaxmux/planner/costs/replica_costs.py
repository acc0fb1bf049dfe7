"""The time and the memory that microbatches take on the devices of a replica."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..devices import Replica
from ..errors import PlanningError
from ..packing.shape_class import ShapeClass
from .device_profile import ProfileError
from .layer_policies import split_stages
from .memory_model import USABLE, MemoryModel
from .pool_spec import PoolSpec
from .time_model import Remat, TimeModel

AUTO = "auto"


class _Residuals(NamedTuple):
    """What a stage keeps for backward passes that are still to come.

    Attributes:
      depth: most microbatches in flight.
      policies: remat policy of every layer.
    """

    depth: int
    policies: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ReplicaCosts:
    """The costs of a run on one replica. Times in seconds, sizes in bytes of one device.

    A microbatch's time depends on its shape class and on how many of its chunks are empty, and on
    nothing else in it: attention is priced by the length of its rows. Layers are divided over the
    stages as evenly as possible, the head in equal parts. The all-reduces of tensor parallelism,
    two in each pass of a layer, are not hidden.

    With `remat="auto"` a stage has room for `in_flight` microbatches, and layers recompute as
    little as that leaves memory for. The stage has room for more microbatches where they cost no
    recomputation, and for fewer only where `in_flight` of them do not fit although layers recompute
    all that they can.

    Attributes:
      times: time model of the backbone and the device.
      memory: memory model of the same.
      pool: the pool of all tasks together.
      replica: the devices.
      remat: remat policy of all layers, or "auto" for those that the engine picks.
      in_flight: microbatches to make room for; None for one per stage, as in 1F1B.
    """

    times: TimeModel
    memory: MemoryModel
    pool: PoolSpec
    replica: Replica
    remat: str = AUTO
    in_flight: int | None = None

    @property
    def most_in_flight(self) -> int:
        """Most microbatches that a stage can make use of at the same time."""
        return 2 * self.replica.pp - 1

    def depth(self, shape: ShapeClass) -> int:
        """Most microbatches in flight on a stage that fit into memory under `policies`, at most
        `most_in_flight`; 0 where not even one fits."""
        return self._residuals(shape).depth

    def require(self, shape: ShapeClass, more_stages: bool = True) -> None:
        """Checks that one microbatch fits.

        Args:
          more_stages: whether the message may propose more pipeline stages.

        Raises:
          PlanningError: it does not fit; the message names the smallest changes that would make it
            fit.
        """
        if self._fits(shape, 1):
            return
        self.memory.require(shape, self.pool, self.replica, more_stages)
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
        """Forward and backward seconds of a microbatch on each stage, float64 [S] each, with the
        stage's part of the head.

        Args:
          owned: tokens of the chunks that are not empty; None for all.
        """
        policies, tp = self.policies(shape), self.replica.tp
        layer = {policy: self._layer(shape, owned, policy) for policy in set(policies)}
        layers = [
            sum((layer[policy] for policy in stage), np.zeros(2))
            for stage in split_stages(policies, self.replica.stage_layers(len(policies)))
        ]
        # The head's gradient is computed with the loss: each pass gets half of its time.
        head = self.times.head(shape.tokens) / self.replica.pp / tp / 2
        forward, backward = np.transpose(layers) + head
        return forward, backward

    def microbatch(self, shape: ShapeClass, owned: float | None = None) -> float:
        """Forward and backward seconds on the slowest stage; infinite where it does not fit.

        Arguments as of `stages`.
        """
        return float(sum(self.stages(shape, owned)).max()) if self.depth(shape) else np.inf

    def permute(self, shape: ShapeClass) -> float:
        """Seconds of the messages between neighbouring stages at the end of a tick."""
        return self.times.collective("ppermute", self.replica.pp, self._stream_bytes(shape))

    def update(self) -> float:
        """Seconds of a round besides its microbatches: every task's update and the overhead.

        Raises:
          ProfileError: the profile measures no update of the pool's optimizer.
        """
        if self.pool.optimizer not in self.times.update:
            raise ProfileError(f"the profile measures no update of {self.pool.optimizer!r}")
        own = self.pool.parameters(self.times.backbone) / self.replica.devices
        return self.times.update[self.pool.optimizer](own) + self.times.round_overhead

    def peak(self, shape: ShapeClass, remat: Remat, in_flight: int) -> float:
        """Peak memory in bytes of a device with `in_flight` microbatches in flight."""
        return self.memory.peak(shape, self.pool, remat, self.replica, in_flight)

    @functools.cached_property
    def _residuals(self) -> Callable[[ShapeClass], _Residuals]:
        # Planning asks for the same few shapes again and again.
        return functools.cache(self._choose_residuals)

    def _choose_residuals(self, shape: ShapeClass) -> _Residuals:
        """The least recomputation with the wanted number of microbatches in flight, or with as many
        as fit, and how many fit without more recomputation."""
        deepest = next((k for k in range(self.most_in_flight, 0, -1) if self._fits(shape, k)), 0)
        needed = min(self.in_flight or self.replica.pp, deepest)
        policies = self._fill(shape, needed)
        alike = [k for k in range(needed, deepest + 1) if self._fill(shape, k) == policies]
        return _Residuals(alike[-1], policies)

    def _fill(self, shape: ShapeClass, in_flight: int) -> tuple[str, ...]:
        if self.remat != AUTO:
            return (self.remat,) * self.times.backbone.layers
        return self.memory.policies(shape, self.pool, self.replica, max(1, in_flight))

    def _layer(self, shape: ShapeClass, owned: float | None, policy: str) -> np.ndarray:
        """Forward and backward seconds of a layer with their all-reduces: float64 [2]."""
        tp, tokens = self.replica.tp, shape.tokens if owned is None else owned
        passes = self.times.layer(shape, (tokens,), self.pool, policy, tp, total=shape.tokens)
        return np.array(passes) + 2 * self.times.collective("psum", tp, self._stream_bytes(shape))

    def _fits(self, shape: ShapeClass, in_flight: int) -> bool:
        if self.remat == AUTO:
            return self.memory.fits(shape, self.pool, self.replica, in_flight)
        return self.peak(shape, self.remat, in_flight) <= USABLE * self.memory.memory

    def _stream_bytes(self, shape: ShapeClass) -> int:
        backbone = self.times.backbone
        return shape.tokens * backbone.hidden_size * backbone.stream_bytes
