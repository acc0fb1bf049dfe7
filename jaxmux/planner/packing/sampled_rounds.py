"""A sample of a run's rounds, from the first to the last, by which both training and plans choose.

Of large rounds the sample holds only a part.
"""

import math
from collections.abc import Sequence

import numpy as np

from .microbatches import RoundLengths

# Limits on the number of rounds, on the samples of all of them and on the samples of one. Within
# them, choosing a shape class takes two or three seconds. A part of a large round is enough,
# because the room left in its last microbatch hardly counts.
_MOST_ROUNDS, _MOST_SAMPLES, _MOST_OF_A_ROUND = 16, 2048, 1024

# By step, the stream lengths in tokens of the samples of one task's global batch.
Batches = Sequence[Sequence[int]]


def sample_rounds(tasks: Sequence[Batches]) -> list[RoundLengths]:
    """Some rounds of a run at even distances, each with the tasks that are live in it.

    Args:
      tasks: by slot, all global batches of a task, at least one; only a few of them are read.
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
