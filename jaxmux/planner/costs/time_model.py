"""The time of layers, microbatches and rounds: MuxTune's cost model (3.3).

A layer takes t_o(n) for its base operators over all n tokens of a microbatch, time for attention by
the length of its rows, and time for the fused adapters of the tasks. With a frozen backbone the
forward and the backward pass are nearly alike; they are kept apart because attention and
recomputation are not.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..errors import PlanningError
from ..packing.shape_class import ShapeClass
from .adapter_times import AdapterLoad, AdapterTimes
from .attention_times import AttentionTimes
from .curve import Curve
from .device_profile import BackboneSize, ProfileError
from .pool_spec import PoolSpec

# The remat policy of all layers, or of each.
Remat = str | Sequence[str]


class Passes(NamedTuple):
    """Seconds of a forward and of a backward pass."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Seconds of both passes."""
        return self.forward + self.backward


@dataclasses.dataclass(frozen=True)
class TimeModel:
    """A fitted cost model; `time_fit.fit_time_model` makes one. All times in seconds.

    Attributes:
      backbone: the measured backbone.
      base: Σ_o t_o(n), forward and backward of a frozen layer over n tokens, in rows of one
        sequence and `row_len` tokens.
      row_len: tokens of the rows with which `base` was measured.
      attention: forward and backward of a layer's attention.
      attention_forward: its forward pass alone.
      adapters: the fused adapters of a layer.
      empty_share: time in `base` of a token of an empty chunk, divided by that of another token:
        matrix products skip it, everything else does not.
      forward_share: part of a layer's time that is its forward pass, without the extra attention
        of longer rows.
      recompute: by remat policy, the time of recomputation as a part of `base`, relative to "dots".
      head: last norm, head and loss, over tokens.
      update: by optimizer kind, the update of all slots, over the parameters of the pool.
      round_overhead: mean overhead of a round: measured time minus the predicted times of its
        microbatches and update.
      collectives: by (collective, axis, devices), over the bytes that each device puts in.
    """

    backbone: BackboneSize
    base: Curve
    row_len: int
    attention: AttentionTimes
    attention_forward: AttentionTimes
    adapters: AdapterTimes
    empty_share: float
    forward_share: float
    recompute: Mapping[str, float]
    head: Curve
    update: Mapping[str, Curve]
    round_overhead: float
    collectives: Mapping[tuple[str, str, int], Curve]

    def predict(
        self, shape: ShapeClass, tasks: int, rank: int, microbatches: int = 1, remat: Remat = "dots"
    ) -> float:
        """Seconds of a round of `tasks` tasks of one rank that fill every microbatch in equal
        parts."""
        full = (shape.tokens / tasks,) * tasks
        return self.round(shape, [full] * microbatches, PoolSpec(tasks, rank), remat)

    def round(
        self,
        shape: ShapeClass,
        microbatches: Sequence[Sequence[float]],
        pool: PoolSpec,
        remat: Remat = "dots",
    ) -> float:
        """Seconds of a round on one device: Σ microbatches (layers + head) + update + overhead.

        Args:
          microbatches: for each microbatch, the tokens of every task's chunks in it; the remaining
            chunks of the shape class are empty.
        """
        if pool.optimizer not in self.update:
            raise ProfileError(f"the profile measures no update of {pool.optimizer!r}")
        seconds = sum(self.microbatch(shape, tokens, pool, remat) for tokens in microbatches)
        update = self.update[pool.optimizer](pool.parameters(self.backbone))
        return seconds + update + self.round_overhead

    def microbatch(
        self, shape: ShapeClass, tokens: Sequence[float], pool: PoolSpec, remat: Remat = "dots"
    ) -> float:
        """Forward and backward seconds of one microbatch.

        Args:
          tokens: tokens of every task's chunks in it.
        """
        policies = (remat,) * self.backbone.layers if isinstance(remat, str) else remat
        if len(policies) != self.backbone.layers:
            raise PlanningError(
                f"remat: {len(policies)} policies for {self.backbone.layers} layers"
            )
        return self.head(shape.tokens) + sum(
            count * self.layer(shape, tokens, pool, policy, total=shape.tokens).total
            for policy, count in Counter(policies).items()
        )

    def layer(
        self,
        shape: ShapeClass,
        tokens: Sequence[float],
        pool: PoolSpec,
        remat: str = "dots",
        tp: int = 1,
        total: float | None = None,
    ) -> Passes:
        """One decoder layer: base operators over `tp` devices and fused adapters (MuxTune Eq. 3).

        Args:
          shape: only its row length, chunk length and sequences per row are read.
          tokens: n_k, tokens of each task's chunks.
          total: tokens of the microbatch, empty chunks included; None for Σ_k n_k.

        Raises:
          ProfileError: the remat policy was not measured.
        """
        if remat not in self.recompute:
            known = ", ".join(self.recompute)
            raise ProfileError(
                f"the profile measures no remat policy {remat!r}; known: {known}; "
                "python -m jaxmux.profile completes it"
            )
        owned = sum(tokens)
        total = owned if total is None else total
        load = AdapterLoad(tokens, pool.slots, pool.rank, shape.chunk_len, pool.dropout)
        base = self.base(owned + self.empty_share * (total - owned)) / tp
        both = base + pool.share(self.backbone) * self.adapters.seconds(load)
        forward = self.forward_share * both + self._rows(self.attention_forward, shape) * total / tp
        both += self._rows(self.attention, shape) * total / tp
        return Passes(forward, both - forward + self.recompute[remat] * base)

    def _rows(self, times: AttentionTimes, shape: ShapeClass) -> float:
        """Seconds per token that attention takes longer in these rows than in those of `base`."""
        return times(shape.row_len, shape.max_sequences) - times(self.row_len, max_sequences=1)

    def collective(
        self, collective: str, devices: int, payload_bytes: float, axis: str = "inner"
    ) -> float:
        """Seconds of a collective among `devices` devices that each put in `payload_bytes`.

        Raises:
          ProfileError: it was not measured.
        """
        if devices == 1:
            return 0.0
        key = (collective, axis, devices)
        if key not in self.collectives:
            known = ", ".join(f"{c} over {n} ({a})" for c, a, n in self.collectives) or "none"
            raise ProfileError(
                f"the profile measures no {collective} over {devices} devices ({axis} axis); "
                f"measured: {known}"
            )
        return self.collectives[key](payload_bytes)
