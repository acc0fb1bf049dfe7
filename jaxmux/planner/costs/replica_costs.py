"""The time and the memory that microbatches take on the devices of a replica."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..devices import AUTO_SCHEDULE, Replica
from ..errors import PlanningError
from ..numbers import size_text
from ..packing.shape_class import ShapeClass
from .memory_model import USABLE, MemoryModel, split_stages
from .pool_spec import PoolSpec
from .time_model import Remat, TimeModel

AUTO = "auto"


class _Residuals(NamedTuple):
    """The choice of values that a stage keeps for its backward passes.

    Attributes:
      depth: the most microbatches in flight that fit.
      policies: remat policy of every layer.
    """

    depth: float
    policies: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ReplicaCosts:
    """The costs of training on one replica: seconds and bytes for each pipeline stage.

    A replica is one copy of the backbone on one or more devices. `TimeModel` and `MemoryModel`
    predict layers and whole rounds; this class applies them to the stages of a replica. Times are
    in seconds, sizes in bytes of one device. Layers are divided over the stages as evenly as
    possible, and the time of the output head is divided equally. Each pass of a layer has two
    all-reduces among tensor-parallel devices, which no computation hides.

    Terms in the methods: a shape class is the shape of all microbatches: rows, tokens per row and
    per chunk, and sequences per row. A chunk is a series of tokens of one task; a chunk that no
    task owns is empty and takes less time. A microbatch is in flight on a stage from its forward
    pass to its backward pass; the stage keeps its values during this time.

    With `remat="auto"`, the layers recompute as little as possible such that `full_depth`
    microbatches fit into memory. `depth` is smaller only if so many do not fit even with the most
    recomputation.

    Attributes:
      times: time model of the backbone and the device, from `device_models`.
      memory: memory model of the same backbone and device, from `device_models`.
      pool: sizes of the pool, the stack of the adapters of all tasks.
      replica: the devices: pipeline stages and tensor-parallel devices of each stage.
      remat: remat policy of all layers, which tells the values that they keep for the backward
        pass: "norms", "dots", "lean" or "full", in the order of increasing recomputation. "auto"
        stands for the policies that the engine picks by the free memory.
      schedule: the order of the pipeline's passes, one of `planner.devices.SCHEDULES`.
      in_flight: for each stage, the most microbatches in flight with this schedule, from
        `schedules.microbatches_in_flight`; empty stands for 1F1B, with S - s on stage s.
    """

    times: TimeModel
    memory: MemoryModel
    pool: PoolSpec
    replica: Replica
    remat: str = AUTO
    schedule: str = AUTO_SCHEDULE
    in_flight: tuple[float, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        # Another process computes again what this one has computed before.
        return {name: value for name, value in vars(self).items() if name != "_residuals"}

    @property
    def full_depth(self) -> float:
        """The most microbatches in flight on a stage when the pipeline is full: with 1F1B as many
        as there are stages. In an interleaved pipeline a part of a stage counts as a fraction of a
        microbatch. Of GPipe, which keeps a whole round, one microbatch counts."""
        return max(self.in_flight, default=self.replica.pp)

    def depth(self, shape: ShapeClass) -> float:
        """Returns the most microbatches in flight on a stage that fit into memory under `policies`.

        The result is at most `full_depth`, and 0 if not even one microbatch fits.

        Args:
          shape: shape class of the microbatches.
        """
        return self._residuals(shape).depth

    def require(self, shape: ShapeClass, more_stages: bool = True) -> None:
        """Raises an error if not even one microbatch fits into memory.

        Args:
          shape: shape class of the microbatch.
          more_stages: whether the message may propose more pipeline stages.

        Raises:
          PlanningError: the microbatch does not fit. The message lists single changes with which it
            would fit, if there are any.
        """
        if self._fits(shape, 1):
            return
        self.memory.require(shape, self.pool, self.replica, more_stages)
        needed = self.peak(shape, self.remat, 1)
        raise PlanningError(
            f"remat={self.remat!r} needs {size_text(needed)}, usable are "
            f"{size_text(USABLE * self.memory.memory)}; it would fit with remat='auto'"
        )

    def require_full_pipeline(self, shape: ShapeClass) -> None:
        """Raises an error if fewer microbatches in flight fit into memory than `full_depth`.

        Training fills the pipeline, so it needs room for as many.

        Args:
          shape: shape class of the microbatches.

        Raises:
          PlanningError: they do not fit.
        """
        if (depth := self.depth(shape)) < self.full_depth:
            chosen = "" if self.schedule == AUTO_SCHEDULE else f" with schedule={self.schedule!r}"
            raise PlanningError(
                f"mesh {self.replica}: the first stage has memory for {depth:g} microbatches of "
                f"{shape.tokens} tokens in flight and needs it for {self.full_depth:g}{chosen}; "
                f"try tokens_per_microbatch={shape.tokens // 2}, or remat='auto'"
            )

    def policies(self, shape: ShapeClass) -> tuple[str, ...]:
        """Returns the remat policy of each layer of the backbone, with which `depth` microbatches
        fit.

        Args:
          shape: shape class of the microbatches.
        """
        return self._residuals(shape).policies

    def stages(
        self, shape: ShapeClass, owned: float | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the forward and the backward seconds of a microbatch on each of the S stages.

        The result is a pair (forward, backward) of arrays, float64 [S] each. The last stage's
        include the output head. Messages between stages are not included.

        Args:
          shape: shape class of the microbatch.
          owned: tokens of the chunks that belong to a task; None if all chunks do.
        """
        policies, tp = self.policies(shape), self.replica.tp
        layer = {policy: self._layer(shape, owned, policy) for policy in set(policies)}
        layers = [
            sum((layer[policy] for policy in stage), np.zeros(2))
            for stage in split_stages(policies, self.times.backbone.stage_layers(self.replica))
        ]
        # The head's gradient is computed with the loss: each pass gets half of its time.
        layers[-1] = layers[-1] + self.times.head(shape.tokens) / tp / 2
        forward, backward = np.transpose(layers)
        return forward, backward

    def microbatch(self, shape: ShapeClass, owned: float | None = None) -> float:
        """Returns the seconds of a microbatch's forward and backward pass together on the slowest
        stage.

        The result is infinite if the microbatch does not fit into memory. This method can be the
        argument `seconds` of `packing.choose_shape`.

        Args:
          shape: shape class of the microbatch.
          owned: tokens of the chunks that belong to a task; None if all chunks do.
        """
        return float(sum(self.stages(shape, owned)).max()) if self.depth(shape) else np.inf

    def permute(self, shape: ShapeClass) -> float:
        """Returns the seconds in which a stage sends a microbatch's hidden states to the next one.

        It is 0 for a single stage.

        Args:
          shape: shape class of the microbatch.
        """
        return self.times.collective("ppermute", self.replica.pp, self._stream_bytes(shape))

    def update(self) -> float:
        """Returns the seconds of a round besides its microbatches.

        A round is one global batch of every task. The seconds are those of the optimizer update of
        all tasks, with the sum of the gradients of all data shards, and of the fixed overhead of a
        round.

        Raises:
          ProfileError: the profile measures no update by the pool's optimizer.
        """
        parts = self.replica.pp * self.replica.tp
        gradients = 4 * self.pool.parameters(self.times.backbone) / parts
        summed = self.times.collective("psum", self.replica.shards, gradients, "outer")
        return self.times.pool_update(self.pool, parts) + summed + self.times.round_overhead

    def peak(self, shape: ShapeClass, remat: Remat, in_flight: float) -> float:
        """Returns the peak memory of a round, in bytes of one device of the stage that needs the
        most.

        Args:
          shape: shape class of the microbatches.
          remat: remat policy of all layers, or one policy for each layer; "auto" is not allowed
            here. The method `policies` returns the policies that "auto" picks.
          in_flight: number of microbatches in flight on a stage.

        Raises:
          ProfileError: the memory model does not know a remat policy.
        """
        return self.memory.peak(shape, self.pool, remat, self.replica, in_flight)

    def stage_peaks(self, shape: ShapeClass, remat: Remat) -> list[float]:
        """Returns the peak memory of a round on each stage, in bytes of one device.

        Args:
          shape: shape class of the microbatches.
          remat: remat policy of all layers, or one policy for each layer, as of `peak`.

        Raises:
          ProfileError: the memory model does not know a remat policy.
        """
        in_flight = self.in_flight or range(self.replica.pp, 0, -1)
        return self.memory.stage_peaks(shape, self.pool, remat, self.replica, in_flight)

    @functools.cached_property
    def _residuals(self) -> Callable[[ShapeClass], _Residuals]:
        # Planning asks for the same few shapes again and again.
        return functools.cache(self._choose_residuals)

    def _choose_residuals(self, shape: ShapeClass) -> _Residuals:
        """Chooses the least recomputation with which `full_depth` microbatches fit, or else with
        which most fit."""
        fewer = range(math.ceil(self.full_depth) - 1, 0, -1)
        depth = next((k for k in (self.full_depth, *fewer) if self._fits(shape, k)), 0)
        return _Residuals(depth, self._fill(shape, depth))

    def _fill(self, shape: ShapeClass, in_flight: float) -> tuple[str, ...]:
        if self.remat != AUTO:
            return (self.remat,) * self.times.backbone.layers
        return self.memory.policies(shape, self.pool, self.replica, max(1, in_flight))

    def _layer(self, shape: ShapeClass, owned: float | None, policy: str) -> np.ndarray:
        """Returns the forward and backward seconds of a layer and its all-reduces: float64 [2]."""
        tp, tokens = self.replica.tp, shape.tokens if owned is None else owned
        passes = self.times.layer(shape, (tokens,), self.pool, policy, tp, total=shape.tokens)
        # Each pass gathers the layer's weights, and sums two outputs or two gradients of inputs.
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
