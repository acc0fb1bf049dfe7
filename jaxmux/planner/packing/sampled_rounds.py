"""Picks a few rounds of a training run, from the first to the last.

Training and planning choose the shape class and the plan by these rounds. Of a large round they
hold only a part.
"""

import math
from collections.abc import Sequence

import numpy as np

from .microbatches import RoundLengths

# Limits on the number of rounds, on the samples of all of them and on the samples of one. Within
# them, choosing a shape class takes two or three seconds. A part of a large round is enough,
# because the room left in its last microbatch hardly counts.
_MOST_ROUNDS, _MOST_SAMPLES, _MOST_OF_A_ROUND = 16, 2048, 1024

# For each step of one task, the stream lengths in tokens of the samples of its global batch.
Batches = Sequence[Sequence[int]]


def sample_rounds(tasks: Sequence[Batches]) -> list[RoundLengths]:
    """Picks at most 16 rounds of a training run, at even distances from the first to the last.

    `choose_shape` takes the result. The rounds together hold at most about 2048 samples. If the
    first round has more than 1024 samples, each task's global batches are cut to the same fraction,
    so that a round keeps about 1024.

    Args:
      tasks: for each task, in the order of the slots, the stream lengths in tokens (a sample's
        tokens without the last one) of its samples: `tasks[slot][step][sample]`. Every task has at
        least one step (global batch), and step i of every task belongs to round i. Only step 0 and
        the steps of the picked rounds are read, so the outer sequence of a task may compute them
        when it is indexed.

    Returns:
      One mapping for each picked round, from slot to stream lengths. A task that has no step left
      in a round is absent from that round's mapping.
    """
    sizes = [len(batches[0]) for batches in tasks]
    part = min(1.0, _MOST_OF_A_ROUND / sum(sizes))
    rounds = max(map(len, tasks))
    count = min(rounds, _MOST_ROUNDS, int(_MOST_SAMPLES / (part * sum(sizes))))
    return [
        {
            slot: _part(batches[step], part)
            for slot, batches in enumerate(tasks)
            if step < len(batches)
        }
        for step in np.linspace(0, rounds - 1, count).astype(int).tolist()
    ]


def _part(lengths: Sequence[int], part: float) -> list[int]:
    return list(lengths[: math.ceil(part * len(lengths))])
