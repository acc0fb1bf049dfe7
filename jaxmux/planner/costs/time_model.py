"""Predicts the time of layers, microbatches and rounds by MuxTune's cost model (3.3).

The time of a layer has four parts: t_o(n) for the base operators over all n tokens of a microbatch;
attention, which depends on the length of the rows; the tasks' fused LoRA adapters; and adapters of
other kinds. Forward and backward passes are predicted separately, because their attention differs
and only the backward pass recomputes values.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import scipy

from ..errors import PlanningError
from ..packing.rows import ShapeClass
from . import h200
from .device_profile import BackboneSize, ProfileError
from .h200 import DECODED_PER_SECOND, FLOAT8_SAVING, linear_seconds
from .pool_spec import PoolSpec

_MOST_FITS = 10


class AdapterLoad(NamedTuple):
    """The work of one layer's fused adapters for one microbatch. `tokens` holds n_k, the number of
    tokens of each task k."""

    tokens: Sequence[float]
    slots: int
    rank: int
    chunk_len: int
    dropout: bool


class AdapterTimes(NamedTuple):
    """Non-negative coefficients of the adapters' time in seconds, forward and backward together.
    The adapters of a task with n tokens keep the whole device busy for u_a(n) · t_a(n) = per_task +
    per_token · n + … seconds. If they run alone, they take t_a(n), which is `floor` seconds longer,
    because launching and ending small kernels leaves the device mostly idle."""

    floor: float = 0.0
    per_task: float = 0.0
    per_token: float = 0.0
    per_token_rank: float = 0.0
    per_task_rank: float = 0.0
    per_chunk_rank: float = 0.0
    per_dropped_token: float = 0.0
    per_slot_rank: float = 0.0

    def seconds(self, load: AdapterLoad) -> float:
        """Returns max(Σ_k u_a · t_a(n_k), max_k t_a(n_k)) seconds, plus the time to prepare the
        factors of all slots for the kernels."""
        if not load.tokens or not load.rank:
            return 0.0
        rank, dropped = load.rank, self.per_dropped_token * load.dropout
        of_token = self.per_token + rank * (
            self.per_token_rank + self.per_chunk_rank / load.chunk_len
        )
        of_task = self.per_task + rank * self.per_task_rank
        busy = of_task * len(load.tokens) + (of_token + dropped) * sum(load.tokens)
        longest = self.floor + of_task + (of_token + dropped) * max(load.tokens)
        return self.per_slot_rank * load.slots * rank + max(busy, longest)


def fit_adapter_times(
    loads: Sequence[AdapterLoad], seconds: Sequence[float], weights: Sequence[float]
) -> AdapterTimes:
    """Fits the coefficients to measured seconds by non-negative least squares. For a load of
    several tasks, the coefficients determine which term of the maximum in `AdapterTimes.seconds` is
    larger. The fit is therefore repeated until this choice no longer changes for any load."""
    weights = np.asarray(weights, float)[:, None]
    target = np.asarray(seconds, float) * weights[:, 0]
    bound_by_one = np.array([len(load.tokens) == 1 for load in loads])
    times = AdapterTimes()
    for _ in range(_MOST_FITS):
        rows = [_features(*pair) for pair in zip(loads, bound_by_one, strict=True)]
        features = weights * np.array(rows)
        size = np.linalg.norm(features, axis=0)
        size[size == 0] = 1
        times = AdapterTimes(*map(float, scipy.optimize.nnls(features / size, target)[0] / size))
        sides = np.array([_is_bound_by_one(times, load) for load in loads])
        if (sides == bound_by_one).all():
            break
        bound_by_one = sides
    return times


def _features(load: AdapterLoad, bound_by_one: bool) -> list[float]:
    """The factors by which the coefficients are multiplied, in the order of the fields of
    `AdapterTimes`."""
    tasks, tokens = len(load.tokens), sum(load.tokens)
    if bound_by_one:
        tasks, tokens = 1, max(load.tokens)
    rank = load.rank
    return [
        float(bound_by_one),
        tasks,
        tokens,
        tokens * rank,
        tasks * rank,
        tokens * rank / load.chunk_len,
        tokens * load.dropout,
        load.slots * rank,
    ]


def _is_bound_by_one(times: AdapterTimes, load: AdapterLoad) -> bool:
    together = np.dot(_features(load, False), times)
    return len(load.tokens) == 1 or np.dot(_features(load, True), times) > together


# The backward pass of a kind takes as long as this number of forward passes: it computes the
# gradients of the stream and the gradients of the trained values.
BACKWARD = 2
# Bytes moved for each value of an adapter and each chunk: the chunk's float32 copy is written and
# read.
_OF_CHUNK = 2 * 4
# FLOPs of frozen linears that take as long on an H200 as reading or writing one byte.
_FLOPS_OF_BYTE = h200.FLOPS / h200.BYTES_PER_SECOND


def share_of_linears(pool: PoolSpec, backbone: BackboneSize, chunk_len: int) -> float:
    """Returns a ratio: the forward time of all adapter kinds but LoRA in a layer, over the time of
    both passes of its frozen linears. Every kind is computed for all chunks, also for those of
    tasks with another kind. FLOPs run at the rate of the linears; a byte counts as `_FLOPS_OF_BYTE`
    FLOPs."""
    flops = 0.0
    for kind in pool.others:
        work = kind.work
        moved = backbone.stream_bytes * work.moved
        moved += _OF_CHUNK * (kind.trained + kind.frozen) / chunk_len
        flops += (work.flops + _FLOPS_OF_BYTE * moved) / backbone.layers
    # Two FLOPs for each weight in the forward pass, and two in the backward pass, which computes
    # only the gradients of the inputs.
    return flops / (4 * sum(k * n for k, n in backbone.linears.values()))


class Curve(NamedTuple):
    """A piecewise linear function through points with ascending x. Beyond the points, the slopes of
    the outermost segments continue. A single point gives a line through the origin."""

    x: np.ndarray
    y: np.ndarray

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]], rising: bool = True) -> "Curve":
        """Returns the curve through measurements (x, y). Measurements at the same x are averaged.
        With `rising`, measured values that fall are replaced by the nearest non-falling values
        (least squares): more work never takes less time, so a fall is noise."""
        points = sorted(points)
        if not points:
            raise PlanningError("a curve needs at least one point")
        x, index = np.unique([float(x) for x, _ in points], return_inverse=True)
        y = np.bincount(index, [y for _, y in points]) / np.bincount(index)
        falls = (np.diff(y) < 0).any()
        return cls(x, scipy.optimize.isotonic_regression(y).x if rising and falls else y)

    def __call__(self, x: float) -> float:
        if len(self.x) == 1:
            return max(0.0, float(self.y[0] * x / self.x[0]))
        right = min(max(int(np.searchsorted(self.x, x)), 1), len(self.x) - 1)
        x0, x1, y0, y1 = *self.x[right - 1 : right + 1], *self.y[right - 1 : right + 1]
        return max(0.0, float(y0 + (x - x0) * (y1 - y0) / (x1 - x0)))


class AttentionTimes(NamedTuple):
    """Seconds of attention per token, as functions of the row length in tokens. `single` is for
    rows of one sequence, `packed` for rows that may hold several. For the latter, `sequence` is
    added for each sequence that a row may hold, present or absent, because kernels launch thread
    blocks for all. A curve is None if it was not measured; `sequence` is also None if it is
    zero."""

    single: Curve | None
    packed: Curve | None
    sequence: Curve | None

    def __call__(self, row_len: int, max_sequences: int) -> float:
        if max_sequences == 1:
            return _known(self.single, "one sequence")(row_len)
        packed = _known(self.packed, "several sequences")(row_len)
        return packed + max_sequences * (self.sequence(row_len) if self.sequence else 0.0)


def fit_attention_times(points: Iterable[tuple[int, int, float]]) -> AttentionTimes:
    """Fits attention times to points (row length, most sequences per row, seconds per token). The
    time per sequence needs points with the same row length and different numbers of sequences. If
    sequences cost nothing at one measured row length but something at the next longer one, cuDNN
    has switched kernels in between; the fit assumes that it does so at twice the shorter length."""
    single: list[tuple[float, float]] = []
    by_row_len: dict[int, list[tuple[int, float]]] = {}
    for row_len, max_sequences, seconds in points:
        if max_sequences == 1:
            single.append((row_len, seconds))
        else:
            by_row_len.setdefault(row_len, []).append((max_sequences, seconds))
    slopes = [
        (row_len, max(0.0, float(np.polyfit(*zip(*pairs, strict=True), 1)[0])))
        for row_len, pairs in by_row_len.items()
        if len({max_sequences for max_sequences, _ in pairs}) > 1
    ]
    jumps = [(2 * r0, s1) for (r0, s0), (_, s1) in pairwise(sorted(slopes)) if s0 < s1 / 10]
    slopes += [(row_len, seconds) for row_len, seconds in jumps if row_len not in by_row_len]
    sequence = Curve.through(slopes, rising=False) if slopes else None
    packed = [
        (row_len, seconds - max_sequences * (sequence(row_len) if sequence else 0.0))
        for row_len, pairs in by_row_len.items()
        for max_sequences, seconds in pairs
    ]
    curves = (Curve.through(pairs, rising=False) if pairs else None for pairs in (single, packed))
    return AttentionTimes(*curves, sequence)


def _known(curve: Curve | None, rows: str) -> Curve:
    if curve is None:
        raise ProfileError(f"the profile measures no attention over rows of {rows}")
    return curve


# One remat policy for all layers, or a sequence with one policy for each layer.
Remat = str | Sequence[str]


class Passes(NamedTuple):
    """The seconds of a forward pass and of its backward pass, which includes recomputation."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclasses.dataclass(frozen=True)
class TimeModel:
    """Predicts the seconds of a layer, a microbatch or a round of a backbone on one kind of device.

    The argument `tokens` of a method holds, for each task, the number of tokens in its chunks in a
    microbatch, padding within these chunks included. All other chunks are empty. Methods raise
    ProfileError if the profile lacks what they need: a remat policy, attention over such rows, an
    update by such an optimizer, or a collective.

    Attributes:
      base: Σ_o t_o(n): forward and backward seconds of all operators of a frozen layer, as a
        function of n tokens in rows of `row_len` tokens with one sequence each.
      attention: forward and backward seconds per token of one layer's attention.
      attention_forward: forward seconds per token of one layer's attention.
      empty_share: in `base`, the time of a token in an empty chunk over the time of a token in
        another chunk. Matrix products skip empty chunks; other operators do not.
      forward_share: the forward pass's fraction of the time of base operators and adapters.
      recompute: for each remat policy, the time of recomputation minus that of "dots", as a
        fraction of `base`; negative for a policy that recomputes less than "dots".
      head: seconds of the last norm, the output head and the loss, by tokens of a microbatch.
      update: for each kind of optimizer, seconds of the update, by parameters of the pool.
      round_overhead: mean overhead of a round in seconds: measured time minus the predicted times
        of its microbatches and update.
      collectives: for each (collective, axis, devices) of a `CollectivePoint`, seconds by the bytes
        that each device contributes.
      base_format: storage format of the weights with which `base` was measured.
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
    base_format: str | None = None

    def predict(
        self, shape: ShapeClass, tasks: int, rank: int, microbatches: int = 1, remat: Remat = "dots"
    ) -> float:
        """Returns the seconds of a round on one device in which all tasks have the same rank and
        equal parts of every microbatch, without empty chunks."""
        full = (shape.tokens / tasks,) * tasks
        return self.round(shape, [full] * microbatches, PoolSpec(tasks, rank), remat)

    def round(
        self,
        shape: ShapeClass,
        microbatches: Sequence[Sequence[float]],
        pool: PoolSpec,
        remat: Remat = "dots",
    ) -> float:
        update = self.pool_update(pool)
        seconds = sum(self.microbatch(shape, tokens, pool, remat) for tokens in microbatches)
        return seconds + update + self.round_overhead

    def pool_update(self, pool: PoolSpec, devices: int = 1) -> float:
        """Returns the seconds in which `devices` devices update all slots; each updates an equal
        part."""
        if pool.optimizer not in self.update:
            raise ProfileError(f"the profile measures no update of {pool.optimizer!r}")
        return self.update[pool.optimizer](pool.parameters(self.backbone) / devices)

    def microbatch(
        self, shape: ShapeClass, tokens: Sequence[float], pool: PoolSpec, remat: Remat = "dots"
    ) -> float:
        """Returns the seconds of a microbatch's two passes through all layers and the head, on one
        device."""
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
        """Returns the forward and the backward seconds of one decoder layer for one microbatch
        (MuxTune Eq. 3), without the all-reduces among the `tp` devices that share the base
        operators. The microbatch has `total` tokens, empty chunks included; None means Σ_k n_k."""
        if remat not in self.recompute:
            known = ", ".join(self.recompute)
            raise ProfileError(
                f"the profile measures no remat policy {remat!r}; known: {known}; "
                "`jaxmux profile` completes it"
            )
        owned = sum(tokens)
        total = owned if total is None else total
        load = AdapterLoad(tokens, pool.slots, pool.rank, shape.chunk_len, pool.dropout)
        base = self._base(owned + self.empty_share * (total - owned)) / tp
        both = base + pool.share(self.backbone) * self.adapters.seconds(load)
        forward = self.forward_share * both
        rest = Passes(forward, both - forward + self.recompute[remat] * base)
        within = self._attention(self.row_len, max_sequences=1)
        instead = self._attention(shape.row_len, shape.max_sequences)
        # `base` already includes attention over rows of `row_len` tokens, so only the difference is
        # added. In a noisy profile, or for a microbatch of empty chunks, the difference could make
        # the sum negative.
        passes = Passes(
            *(
                max(0.0, seconds - old * total / tp) + new * total / tp
                for seconds, old, new in zip(rest, within, instead, strict=True)
            )
        )
        # Tensor-parallel devices compute most adapter kinds on the whole stream.
        kinds = share_of_linears(pool, self.backbone, shape.chunk_len) * self.base(total)
        decoding = Passes(*(seconds / tp for seconds in self._decoding(remat)))
        return Passes(
            passes.forward + kinds + decoding.forward,
            passes.backward + BACKWARD * kinds + decoding.backward,
        )

    def _base(self, tokens: float) -> float:
        """Seconds of all base operators in the backbone's storage format, without decoding."""
        base = self.base(tokens)
        if self._predicted_format != "float8":
            return base
        weights = sum(k * n for k, n in self.backbone.linears.values())
        # On a device that is faster than an H200, all operators together may take less time than
        # the linears take on an H200.
        return base - FLOAT8_SAVING * min(base, 2 * linear_seconds(tokens, weights))

    @property
    def _predicted_format(self) -> str | None:
        """The storage format of the weights, if `base` was measured in another format; otherwise
        None."""
        stored = self.backbone.backbone_format
        return None if stored == self.base_format else stored

    def _decoding(self, remat: str) -> Passes:
        """Seconds in which one layer's weights are decoded, at an H200's rates; 0 if `base`
        includes this."""
        rate = DECODED_PER_SECOND.get(self._predicted_format)
        if rate is None:
            return Passes(0.0, 0.0)
        sizes = {module: k * n for module, (k, n) in self.backbone.linears.items()}
        again = {
            "full": sum(sizes.values()),
            "lean": sum(sizes.get(f"mlp.{name}_proj", 0) for name in ("gate", "up")),
        }
        once = sum(sizes.values()) / rate
        return Passes(once, once + again.get(remat, 0) / rate)

    def _attention(self, row_len: int, max_sequences: int) -> Passes:
        both, forward = (
            times(row_len, max_sequences) for times in (self.attention, self.attention_forward)
        )
        return Passes(forward, max(0.0, both - forward))

    def collective(
        self, collective: str, devices: int, payload_bytes: float, axis: str = "inner"
    ) -> float:
        """Returns the seconds of a collective (see `CollectivePoint`); 0 for one device."""
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
