"""The time and the memory of microbatches on the devices of a replica."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..devices import AUTO_SCHEDULE, Replica
from ..errors import PlanningError
from ..numbers import size_text
from ..packing.rows import ShapeClass
from .memory_model import USABLE, MemoryModel, split_stages
from .pool_spec import PoolSpec
from .time_model import Remat, TimeModel

AUTO = "auto"


class _Residuals(NamedTuple):
    """The remat policy of every layer, and the number of microbatches in flight that fit into
    memory with these policies."""

    depth: float
    policies: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ReplicaCosts:
    """The costs of training on one replica, for each pipeline stage: seconds, and bytes of one
    device.

    Attributes:
      remat: remat policy of all layers: "norms", "dots", "lean" or "full"; or "auto": the layers
        recompute as little as possible while `full_depth` microbatches still fit into memory.
      schedule: the order of the pipeline's passes, one of `planner.devices.SCHEDULES`.
      in_flight: for each stage, the most microbatches in flight with this schedule. Empty means
        1F1B, with S - s microbatches on stage s.
    """

    times: TimeModel
    memory: MemoryModel
    pool: PoolSpec
    replica: Replica
    remat: str = AUTO
    schedule: str = AUTO_SCHEDULE
    in_flight: tuple[float, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        # The cache of `_residuals` cannot be pickled; another process computes the policies again.
        return {name: value for name, value in vars(self).items() if name != "_residuals"}

    @property
    def full_depth(self) -> float:
        """The most microbatches in flight on a stage when the pipeline is full. In an interleaved
        pipeline, a microbatch in one part of a stage counts as a fraction. With GPipe, a whole
        round counts as one microbatch."""
        return max(self.in_flight, default=self.replica.pp)

    def depth(self, shape: ShapeClass) -> float:
        """Returns the number of microbatches in flight that fit into memory, at most
        `full_depth`."""
        return self._residuals(shape).depth

    def require(self, shape: ShapeClass, more_stages: bool = True) -> None:
        """Raises PlanningError if one microbatch does not fit into memory."""
        if self._fits(shape, 1):
            return
        self.memory.require(shape, self.pool, self.replica, more_stages)
        needed = self.peak(shape, self.remat, 1)
        raise PlanningError(
            f"remat={self.remat!r} needs {size_text(needed)}, usable are "
            f"{size_text(USABLE * self.memory.memory)}; it would fit with remat='auto'"
        )

    def require_full_pipeline(self, shape: ShapeClass) -> None:
        """Raises PlanningError if `full_depth` microbatches in flight do not fit into memory."""
        if (depth := self.depth(shape)) < self.full_depth:
            chosen = "" if self.schedule == AUTO_SCHEDULE else f" with schedule={self.schedule!r}"
            raise PlanningError(
                f"mesh {self.replica}: the first stage has memory for {depth:g} microbatches of "
                f"{shape.tokens} tokens in flight and needs it for {self.full_depth:g}{chosen}; "
                f"try tokens_per_microbatch={shape.tokens // 2}, or remat='auto'"
            )

    def policies(self, shape: ShapeClass) -> tuple[str, ...]:
        return self._residuals(shape).policies

    def stages(
        self, shape: ShapeClass, owned: float | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the forward seconds and the backward seconds of a microbatch on each stage,
        float64 [S] each, without messages between stages. `owned` is the number of tokens in chunks
        that belong to a task; None means all tokens."""
        policies, tp = self.policies(shape), self.replica.tp
        layer = {policy: self._layer(shape, owned, policy) for policy in set(policies)}
        layers = [
            sum((layer[policy] for policy in stage), np.zeros(2))
            for stage in split_stages(policies, self.times.backbone.stage_layers(self.replica))
        ]
        # The head's gradient is computed together with the loss; half of this time goes to each
        # pass.
        layers[-1] = layers[-1] + self.times.head(shape.tokens) / tp / 2
        forward, backward = np.transpose(layers)
        return forward, backward

    def microbatch(self, shape: ShapeClass, owned: float | None = None) -> float:
        """Returns the seconds of both passes of a microbatch on the slowest stage; infinite if the
        microbatch does not fit into memory. `packing.choose_shape` takes this method as
        `seconds`."""
        return float(sum(self.stages(shape, owned)).max()) if self.depth(shape) else np.inf

    def permute(self, shape: ShapeClass) -> float:
        """Returns the seconds in which a stage sends a microbatch's hidden states to the next
        stage."""
        return self.times.collective("ppermute", self.replica.pp, self._stream_bytes(shape))

    def update(self) -> float:
        """Returns the seconds of a round apart from its microbatches: summing the gradients of all
        data shards, the optimizer update of all tasks, and the fixed overhead of a round."""
        parts = self.replica.pp * self.replica.tp
        gradients = 4 * self.pool.parameters(self.times.backbone) / parts
        summed = self.times.collective("psum", self.replica.shards, gradients, "outer")
        return self.times.pool_update(self.pool, parts) + summed + self.times.round_overhead

    def peak(self, shape: ShapeClass, remat: Remat, in_flight: float) -> float:
        """Returns the peak memory of a round on the stage that needs the most. `remat` must not be
        "auto"."""
        return self.memory.peak(shape, self.pool, remat, self.replica, in_flight)

    def stage_peaks(self, shape: ShapeClass, remat: Remat) -> list[float]:
        in_flight = self.in_flight or range(self.replica.pp, 0, -1)
        return self.memory.stage_peaks(shape, self.pool, remat, self.replica, in_flight)

    @functools.cached_property
    def _residuals(self) -> Callable[[ShapeClass], _Residuals]:
        # Planning asks for the same few shapes many times.
        return functools.cache(self._choose_residuals)

    def _choose_residuals(self, shape: ShapeClass) -> _Residuals:
        """Chooses the policies with the least recomputation with which the most microbatches fit,
        up to `full_depth`."""
        fewer = range(math.ceil(self.full_depth) - 1, 0, -1)
        depth = next((k for k in (self.full_depth, *fewer) if self._fits(shape, k)), 0)
        return _Residuals(depth, self._fill(shape, depth))

    def _fill(self, shape: ShapeClass, in_flight: float) -> tuple[str, ...]:
        if self.remat != AUTO:
            return (self.remat,) * self.times.backbone.layers
        return self.memory.policies(shape, self.pool, self.replica, max(1, in_flight))

    def _layer(self, shape: ShapeClass, owned: float | None, policy: str) -> np.ndarray:
        """Forward and backward seconds of one layer with its collectives, float64 [2]."""
        tp, tokens = self.replica.tp, shape.tokens if owned is None else owned
        passes = self.times.layer(shape, (tokens,), self.pool, policy, tp, total=shape.tokens)
        # Each pass gathers the layer's weights once and sums two arrays over the tensor-parallel
        # devices: outputs in the forward pass, gradients of inputs in the backward pass.
        fsdp = self.replica.fsdp
        layer_bytes = self.times.backbone.layer_bytes / tp / fsdp
        gather = self.times.collective("all_gather", fsdp, layer_bytes, "outer")
        summed = 2 * self.times.collective("psum", tp, self._stream_bytes(shape))
        return np.array(passes) + gather + summed

    def _fits(self, shape: ShapeClass, in_flight: float) -> bool:
        if self.remat == AUTO:
            return self.memory.fits(shape, self.pool, self.replica, in_flight)
        return self.peak(shape, self.remat, in_flight) <= USABLE * self.memory.memory

    def _stream_bytes(self, shape: ShapeClass) -> int:
        backbone = self.times.backbone
        return shape.tokens * backbone.hidden_size * backbone.stream_bytes
