"""Fits the time model and the memory model to a profile."""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from .device_profile import (
    AttentionPoint,
    CollectivePoint,
    HeadPoint,
    LayerPoint,
    Profile,
    ProfileError,
    RoundPoint,
    UpdatePoint,
    shape_of,
)
from .memory_model import MemoryModel, OnlineFit, working_features
from .pool_spec import PoolSpec
from .time_model import (
    AdapterLoad,
    AdapterTimes,
    AttentionTimes,
    Curve,
    Passes,
    TimeModel,
    fit_adapter_times,
    fit_attention_times,
)

# Weight of a profiled peak in the online fit. An observed round has weight 1: it tells more than a
# profiled program, which has only a few layers.
_PROFILE_WEIGHT = 0.01


def fit_memory_model(profile: Profile, memory: int | None = None) -> MemoryModel:
    """Returns the memory model of the profiled backbone and device. `memory` is as in
    `measured_models`."""
    memory = memory or profile.memory_bytes
    if not memory:
        raise ProfileError(
            f"the profile of {profile.device} does not hold the device's memory (memory_bytes is "
            "null); set fine_tune.memory_gib"
        )
    model = MemoryModel(
        profile.backbone, memory, OnlineFit.of_features(3), _shortest_packed_rows(profile)
    )
    heads = {
        point.tokens: peak
        for point, _, peak in profile.measurements
        if isinstance(point, HeadPoint) and peak
    }
    working = model.working
    for point, _, peak in profile.measurements:
        if not isinstance(point, LayerPoint) or not (point.rank and point.backward and peak):
            continue
        beyond = peak - point.layers * model.kept(point.tokens, point.rank, point.remat)
        # The measured peak includes decoded weights, but `resident` already counts them.
        beyond -= profile.backbone.decoded_bytes
        needed = max(beyond, heads.get(point.tokens, 0), 0)
        features = working_features(point.tokens, point.row_len)
        working = working.observe(features, needed, _PROFILE_WEIGHT)
    if not working.observations:
        raise ProfileError("the profile measures no peak_bytes of an adapted layer")
    return dataclasses.replace(model, working=working)


def _shortest_packed_rows(profile: Profile) -> float:
    """Row length from which attention takes memory for every sequence that a row may hold. It is
    the shortest measured length at which attention did, or twice the longest shorter length at
    which it did not, if that is less. Infinite if attention never did."""
    peaks = {p: peak for p, _, peak in profile.measurements if isinstance(p, AttentionPoint)}
    taken: dict[int, bool] = {}
    for point, peak in peaks.items():
        one = peaks.get(dataclasses.replace(point, max_sequences=1))
        expected = profile.backbone.packed.needed_by(point.tokens, point.max_sequences)
        if point.backward and expected and peak and one:
            taken[point.row_len] = peak - one > expected / 2
    if not any(taken.values()):
        return math.inf
    shortest = min(row_len for row_len, took in taken.items() if took)
    without = [row_len for row_len in taken if row_len < shortest]
    return min(shortest, 2 * max(without)) if without else shortest


def fit_time_model(profile: Profile) -> TimeModel:
    """Returns the time model of the profiled backbone and device. Raises ProfileError if a
    measurement is missing."""
    layers = dict(profile.of(LayerPoint))
    trained = [p for p in layers if p.backward and p.remat == "dots" and not p.padding]
    frozen = [point for point in trained if not point.rank]
    if not frozen or len(frozen) == len(trained):
        raise ProfileError(
            "the profile measures no layer with remat 'dots' that is "
            + ("adapted (rank > 0)" if frozen else "frozen (rank 0)")
        )
    if len(row_lens := {point.row_len for point in frozen}) > 1:
        raise ProfileError(f"the profile measures frozen layers over rows of {sorted(row_lens)}")
    base = Curve.through((point.tokens, layers[point]) for point in frozen)
    updates = profile.of(UpdatePoint)
    unadapted = TimeModel(
        backbone=profile.backbone,
        base=base,
        row_len=frozen[0].row_len,
        attention=_attention(profile, backward=True),
        attention_forward=_attention(profile, backward=False),
        adapters=AdapterTimes(),
        empty_share=1.0,
        forward_share=_forward_share(layers),
        recompute=_recompute(layers, base),
        head=Curve.through((point.tokens, seconds) for point, seconds in profile.of(HeadPoint)),
        update={
            kind: Curve.through((p.parameters, s) for p, s in updates if p.optimizer == kind)
            for kind in {point.optimizer for point, _ in updates}
        },
        round_overhead=0.0,
        collectives=_collectives(profile),
        base_format=profile.backbone.backbone_format,
    )
    adapted = [point for point in trained if point.rank]
    loads = [
        AdapterLoad((p.tokens / p.tasks,) * p.tasks, p.slots, p.rank, p.chunk_len, p.dropout)
        for p in adapted
    ]
    beyond = [layers[p] - layer_passes(unadapted, p).total for p in adapted]
    adapters = fit_adapter_times(loads, beyond, [1 / layers[p] for p in adapted])
    model = dataclasses.replace(unadapted, adapters=adapters)
    model = dataclasses.replace(model, empty_share=_empty_share(layers, model))
    return dataclasses.replace(model, round_overhead=_round_overhead(profile, model))


def layer_passes(model: TimeModel, point: LayerPoint) -> Passes:
    tokens = (point.tokens * (1 - point.padding) / point.tasks,) * point.tasks
    pool = PoolSpec(point.slots, point.rank, dropout=point.dropout)
    return model.layer(shape_of(point), tokens, pool, point.remat, total=point.tokens)


def _empty_share(layers: Mapping[LayerPoint, float], model: TimeModel) -> float:
    """Mean ratio of two times: the measured time that padding takes, and the predicted time of the
    same chunks if they belonged to tasks. 1 if the profile measures no padding."""
    free = dataclasses.replace(model, empty_share=0.0)
    shares = []
    for point, seconds in layers.items():
        if point.padding:
            least, most = (layer_passes(times, point).total for times in (free, model))
            # In a noisy profile, attention may hide the time that padding takes.
            if most > least:
                shares.append((seconds - least) / (most - least))
    return float(np.clip(np.mean(shares), 0, 1)) if shares else 1.0


def _forward_share(layers: Mapping[LayerPoint, float]) -> float:
    """Mean fraction of a layer's time that its forward pass takes; one half, as in MuxTune, if the
    profile measures no forward pass alone."""
    shares = [
        seconds / layers[both]
        for point, seconds in layers.items()
        if not point.backward and (both := dataclasses.replace(point, backward=True)) in layers
    ]
    return min(1.0, float(np.mean(shares))) if shares else 0.5


def _recompute(layers: Mapping[LayerPoint, float], base: Curve) -> dict[str, float]:
    """For each remat policy, the mean additional time of a layer compared with "dots", as a
    fraction of `base`; negative for policies that recompute less."""
    longer: dict[str, list[float]] = {"dots": [0.0]}
    for point, seconds in layers.items():
        dots = dataclasses.replace(point, remat="dots")
        if point.remat != "dots" and point.backward and dots in layers:
            part = (seconds - layers[dots]) / base(point.tokens)
            longer.setdefault(point.remat, []).append(part)
    return {policy: float(np.mean(parts)) for policy, parts in longer.items()}


def _attention(profile: Profile, backward: bool) -> AttentionTimes:
    return fit_attention_times(
        (point.row_len, point.max_sequences, seconds / point.tokens)
        for point, seconds in profile.of(AttentionPoint)
        if point.backward == backward
    )


def _round_overhead(profile: Profile, model: TimeModel) -> float:
    """Mean overhead of a round in seconds: measured time minus the predicted times of its
    microbatch and update."""
    beyond = []
    for point, seconds in profile.of(RoundPoint):
        size = dataclasses.replace(model.backbone, layers=point.layers)
        tokens = (point.tokens / point.tasks,) * point.tasks
        parts = dataclasses.replace(model, backbone=size).round(
            shape_of(point), [tokens], PoolSpec(point.slots, point.rank)
        )
        beyond.append(max(0.0, seconds - parts))
    return float(np.mean(beyond))


def _collectives(profile: Profile) -> dict[tuple[str, str, int], Curve]:
    curves: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for point, seconds, _ in profile.measurements:
        if isinstance(point, CollectivePoint):
            key = (point.collective, point.axis, point.devices)
            curves.setdefault(key, []).append((point.payload_bytes, seconds))
    # With all devices of the host there is only one choice of devices, so the profile has no outer
    # collective of its own; the inner one takes its place.
    for (collective, _, devices), pairs in list(curves.items()):
        curves.setdefault((collective, "outer", devices), pairs)
    return {key: Curve.through(pairs) for key, pairs in curves.items()}
