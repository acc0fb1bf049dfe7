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


class PartOfBatches(Sequence[list[int]]):
    """By step, the stream lengths of the samples of a task's global batch that one of several
    devices trains. A global batch is read only when its lengths are requested.

    Attributes:
      batches: the lengths of the task's whole global batches.
      parts: number of parts into which a global batch is divided. The first one stands for all.
      longest: most tokens of the samples that count; None for all samples.
    """

    def __init__(self, batches: Batches, parts: int = 1, longest: int | None = None):
        self.batches, self.parts, self.longest = batches, parts, longest

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, step: int) -> list[int]:
        return at_most(self.longest, self.batches[step][:: self.parts])


def at_most(longest: int | None, lengths: Sequence[int]) -> list[int]:
    """The lengths of at most `longest` tokens; all of them if it is None."""
    return [length for length in lengths if longest is None or length <= longest]


def sample_rounds(tasks: Sequence[Batches]) -> list[RoundLengths]:
    """Picks at most 16 rounds of a training run, at even distances from the first to the last.

    A round is one global batch of every task. Pass the result to `choose_shape`, which needs a few
    representative rounds. The picked rounds together hold at most about 2048 samples. If the first
    round has more than 1024 samples, every global batch is cut to the same fraction of its samples,
    so that a round keeps about 1024.

    Args:
      tasks: the stream lengths in tokens of the samples of every task: `tasks[slot][step][sample]`.
        The slot is the task's place in the pool of adapters, a step is one global batch, and step i
        belongs to round i. A stream length is a sample's number of tokens without the last one,
        which is only predicted. There is at least one task, and every task has at least one step.
        Only step 0 and the steps of the picked rounds are read, so `tasks[slot]` may be a lazy
        sequence that computes a step when it is indexed.

    Returns:
      One mapping for each picked round, from slot to the stream lengths of that round's samples. A
      task whose steps have ended before a round is absent from the mapping of that round.
    """
    part, rounds = sampled_part(tasks), max(map(len, tasks))
    count = min(rounds, _MOST_ROUNDS, int(_MOST_SAMPLES / (part * _first_samples(tasks))))
    return [
        {
            slot: _part(batches[step], part)
            for slot, batches in enumerate(tasks)
            if step < len(batches)
        }
        for step in np.linspace(0, rounds - 1, count).astype(int).tolist()
    ]


def sampled_part(tasks: Sequence[Batches]) -> float:
    """Returns the fraction of every global batch that `sample_rounds` keeps, by which the time of
    its rounds is to be divided.

    Args:
      tasks: as for `sample_rounds`.
    """
    return min(1.0, _MOST_OF_A_ROUND / _first_samples(tasks))


def _first_samples(tasks: Sequence[Batches]) -> int:
    # The first round may be empty, for example if only samples of some lengths count.
    return max(1, sum(len(batches[0]) for batches in tasks))


def _part(lengths: Sequence[int], part: float) -> list[int]:
    return list(lengths[: math.ceil(part * len(lengths))])
