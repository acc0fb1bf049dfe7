"""The memory model of a profiled device."""

import dataclasses
import math

from .device_profile import AttentionPoint, HeadPoint, LayerPoint, Profile, ProfileError
from .memory_model import MemoryModel, working_features
from .online_fit import OnlineFit

# Weight of a profiled peak in the online fit. An observed round has weight 1, because it is more
# informative than a program of a few layers.
_PROFILE_WEIGHT = 0.01


def fit_memory_model(profile: Profile, memory: int | None = None) -> MemoryModel:
    """Returns the memory model of the profiled backbone and device.

    Args:
      profile: the measurements; `read_profile` reads them from a file.
      memory: bytes of a device that may be used; None for the memory in the profile.

    Raises:
      ProfileError: the profile holds neither the device's memory nor is `memory` given, or it holds
        no peak of an adapted layer.
    """
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
        # The measured peak includes decoded weights, which `resident` counts.
        beyond -= profile.backbone.decoded_bytes
        needed = max(beyond, heads.get(point.tokens, 0), 0)
        features = working_features(point.tokens, point.row_len)
        working = working.observe(features, needed, _PROFILE_WEIGHT)
    if not working.observations:
        raise ProfileError("the profile measures no peak_bytes of an adapted layer")
    return dataclasses.replace(model, working=working)


def _shortest_packed_rows(profile: Profile) -> float:
    """Returns the length of the shortest rows in which attention takes memory for every sequence
    that a row may hold.

    The result is the smaller of two lengths: the shortest measured row length at which attention
    took this memory, and twice the longest measured row length below it. It is infinite if
    attention never took this memory.
    """
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
