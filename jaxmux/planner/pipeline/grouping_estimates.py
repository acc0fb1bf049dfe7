"""Estimates the length of groupings' streams quickly, to choose those that are worth simulating."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ..packing.shape_class import ShapeClass
from .groupings import CutRound, Grouping, chunks_of

# Sums of fractions of microbatches are whole numbers up to this rounding error.
_ROUNDING = 1e-9


def most_promising(
    groupings: Sequence[Grouping], rounds: Sequence[CutRound], shape: ShapeClass, stages: int
) -> list[Grouping]:
    """Returns the 2S groupings whose streams are estimated to be the shortest.

    An estimate takes the bubble lemma into account, but not how well spans fill microbatches, so
    few groupings take less time than estimated. Groupings with equal estimates are chosen such that
    each number of groups gets its turn.

    Args:
      groupings: the groupings to choose from.
      rounds: global batches of every task.
      shape: shape class of the microbatches.
      stages: S, number of stages.
    """
    chunks = [{slot: chunks_of(batch) for slot, batch in batches.items()} for batches in rounds]
    alike: Counter[tuple[int, int]] = Counter()
    keys = []
    for i, grouping in enumerate(groupings):
        groups = grouping.groups
        turns = [
            [sum(own.get(slot, 0) for slot in group) / shape.chunks for group in groups]
            for own in chunks
        ]
        length = stream_length(turns, stages)
        keys.append((length, alike[length, len(groups)], i))
        alike[length, len(groups)] += 1
    return [groupings[i] for _, _, i in sorted(keys)[: 2 * stages]]


def stream_length(rounds: Sequence[Sequence[float]], distance: int) -> int:
    """Returns the microbatches of a stream, including the no-ops that the bubble lemma needs.

    Args:
      rounds: for each round and group, how many microbatches its turn fills.
      distance: least distance of two turns of a group, in microbatches: the number of stages.
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
