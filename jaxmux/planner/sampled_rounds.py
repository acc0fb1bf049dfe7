"""Rounds that stand for a run: some of them, from the first to the last, and of large ones a part.

What is decided once for a run, training and plans decide by these rounds.
"""

import math
from collections.abc import Sequence

import numpy as np

from .alignment import Round

# So many rounds, and so many samples in all and in a round: to choose by them takes two or three
# seconds at most. Of larger rounds a part will do, for what is left in the last microbatch hardly
# counts.
_MOST_ROUNDS, _MOST_SAMPLES, _MOST_OF_A_ROUND = 16, 2048, 1024

# By step, the stream lengths in tokens of the samples of a task's global batch.
Batches = Sequence[Sequence[int]]


def sample_rounds(tasks: Sequence[Batches]) -> list[Round]:
    """Some rounds of a run at even distances, with the tasks that are live then.

    Args:
      tasks: by slot, all global batches of a task, at least one; few of them are asked for.
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
