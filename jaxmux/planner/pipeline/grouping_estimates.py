"""Estimates the time of groupings quickly, to choose those that are worth simulating."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..packing.shape_class import ShapeClass
from .bubble_lemma import lemma_distance
from .groupings import CutRound, Grouping, chunks_of
from .schedules import TickRule, one_f_one_b_depth

# Tick rules whose estimate exceeds the least one by more than this fraction are left out.
_NOTABLY_SLOWER = 0.03
# Sums of fractions of microbatches are whole numbers up to this rounding error.
_ROUNDING = 1e-9


class Estimate(NamedTuple):
    """The estimated time of a grouping.

    Attributes:
      seconds: time of the rounds.
      grouping: the grouping.
      rule: the tick rule that the estimate assumes.
    """

    seconds: float
    grouping: Grouping
    rule: TickRule


def most_promising(
    groupings: Sequence[Grouping],
    rounds: Sequence[CutRound],
    shape: ShapeClass,
    forward: Sequence[float],
    backward: Sequence[float],
    permute: float = 0.0,
    depth: int | None = None,
) -> list[Estimate]:
    """Returns, for every tick rule, the 2S groupings of the least estimates.

    An estimate takes the bubble lemma into account, but not how well spans fill microbatches, so
    few groupings take less time than estimated. Groupings with equal estimates are chosen such that
    each number of groups gets its turn. Tick rules whose least estimate is more than 3% above
    another rule's are left out.

    Args:
      groupings: the groupings to choose from.
      rounds: global batches of every task.
      shape: shape class of the microbatches.
      forward, backward: seconds of a mean microbatch on each of S stages.
      permute: seconds of the messages at the end of a tick.
      depth: most microbatches in flight on the first stage; None for no limit.
    """
    stages = len(forward)
    chunks = [{slot: chunks_of(batch) for slot, batch in batches.items()} for batches in rounds]
    ranked = []
    for rule, seconds in _seconds_per_microbatch(forward, backward, permute).items():
        # A pipeline with fewer buffers than it has use for is empty for the rest of the time.
        wanted = one_f_one_b_depth(stages, rule)[0]
        seconds *= max(1.0, wanted / (depth or wanted))
        distance = lemma_distance(stages, rule)
        alike: Counter[tuple[int, int]] = Counter()
        keys = []
        for i, grouping in enumerate(groupings):
            groups = grouping.groups
            turns = [
                [sum(own.get(slot, 0) for slot in group) / shape.chunks for group in groups]
                for own in chunks
            ]
            length = _stream_length(turns, distance)
            keys.append((length, alike[length, len(groups)], i))
            alike[length, len(groups)] += 1
        ranked.append(
            [
                Estimate((length + stages - 1) * seconds, groupings[i], rule)
                for length, _, i in sorted(keys)[: 2 * stages]
            ]
        )
    least = min(estimates[0].seconds for estimates in ranked)
    limit = (1 + _NOTABLY_SLOWER) * least
    return [e for estimates in ranked if estimates[0].seconds <= limit for e in estimates]


def _seconds_per_microbatch(
    forward: Sequence[float], backward: Sequence[float], permute: float
) -> dict[TickRule, float]:
    """By tick rule, the seconds that a full pipeline takes for one more microbatch."""
    stages = range(len(forward))
    # With single ticks, every second stage runs forward while those between run backward.
    alternate = [max((forward, backward)[(s + t) % 2][s] for s in stages) for t in (0, 1)]
    return {
        "single": sum(alternate) + 2 * permute,
        "paired": max(f + b for f, b in zip(forward, backward, strict=True)) + permute,
        "alternating": max(forward) + max(backward) + 2 * permute,
    }


def _stream_length(rounds: Sequence[Sequence[float]], distance: int) -> int:
    """Microbatches of the stream, including the no-ops that the bubble lemma needs.

    Args:
      rounds: for each round and group, how many microbatches its turn fills.
      distance: least distance of two turns of a group (see `lemma_distance`).
    """
    end = 0.0
    last: dict[int, int] = {}
    for turns in rounds:
        for group, microbatches in enumerate(turns):
            if microbatches:
                begin = max(end, last[group] + distance) if group in last else end
                end = begin + microbatches
                last[group] = int(np.ceil(end - _ROUNDING)) - 1
    return int(np.ceil(end - _ROUNDING))
