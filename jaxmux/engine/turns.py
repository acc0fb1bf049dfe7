"""The turn of each task in a round: its global batch, or as much of it as a round may train."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxmux.data import Sample

from .prepared_task import PreparedTask


class Turn(NamedTuple):
    """What a round trains of a task.

    Attributes:
      step: index of the task's global batch, from 0.
      batch: the samples of the global batch.
      samples: indices of the samples of the batch that are trained.
      last: whether the global batch is complete with them.
    """

    step: int
    batch: Sequence[Sample]
    samples: range
    last: bool


class Turns:
    """The turns of tasks in one round after another.

    A task whose global batch has more than a given number of tokens trains it in several turns, and
    is updated after the last one. The others need not wait for it, because they are updated in
    every round. How a batch is divided depends on nothing but its samples and that number.
    """

    def __init__(
        self,
        tasks: Mapping[int, PreparedTask],
        steps: Mapping[int, int],
        most_tokens: int | None = None,
        accumulated: Mapping[int, Sequence[int]] | None = None,
        least_tokens: int = 1,
    ):
        """Begins before the first round.

        Args:
          tasks: by slot, the tasks.
          steps: by slot, index of the task's next global batch, from 0.
          most_tokens: most tokens of a turn, without padding; a longer sample is a turn of its own.
            None lets every turn be a global batch.
          accumulated: by slot, indices of samples of the next global batch that have been trained.
            The turns that have trained nothing else are over.
          least_tokens: tokens as which a shorter sample counts, see `ShapeClass.least_tokens`.
        """
        self._tasks = tasks
        self._steps = dict(steps)
        self._most_tokens, self._least_tokens = most_tokens, least_tokens
        # By slot, the turns of the current global batch that are left.
        self._left = {
            slot: _not_over(self._divide(slot), accumulated.get(slot, ()) if accumulated else ())
            for slot in steps
            if self._is_live(slot)
        }

    def next(self) -> dict[int, Turn]:
        """By slot, the turns of the next round; empty if every task has trained its last step."""
        turns = {}
        for slot in self._tasks:
            if not self._is_live(slot):
                continue
            left = self._left.get(slot) or self._divide(slot)
            turns[slot], self._left[slot] = left[0], left[1:]
            self._steps[slot] += turns[slot].last
        return turns

    def _is_live(self, slot: int) -> bool:
        return self._steps[slot] < self._tasks[slot].steps

    def _divide(self, slot: int) -> list[Turn]:
        """The turns of the current global batch of a task."""
        step = self._steps[slot]
        batch = self._tasks[slot].batches[step]
        lengths = [max(sample.stream_length, self._least_tokens) for sample in batch]
        ranges = divide(lengths, self._most_tokens)
        return [Turn(step, batch, own, own.stop == len(batch)) for own in ranges]


def divide(lengths: Sequence[int], most_tokens: int | None) -> list[range]:
    """Divides a global batch into turns.

    Args:
      lengths: the tokens as which each sample counts.
      most_tokens: most tokens of a turn; a longer sample is a turn of its own. None for one turn.

    Returns:
      For each turn, the indices of its samples.
    """
    turns, begin = [], 0
    while begin < len(lengths):
        turns.append(turn_from(begin, lengths, most_tokens))
        begin = turns[-1].stop
    return turns


def turn_from(begin: int, lengths: Sequence[int], most_tokens: int | None) -> range:
    """The turn that begins with a sample, as `divide` has it.

    Args:
      begin: index of the sample.
      lengths, most_tokens: as for `divide`.
    """
    if most_tokens is None:
        return range(begin, len(lengths))
    tokens, end = int(lengths[begin]), begin + 1
    while end < len(lengths) and tokens + int(lengths[end]) <= most_tokens:
        tokens += int(lengths[end])
        end += 1
    return range(begin, end)


def _not_over(turns: list[Turn], accumulated: Sequence[int]) -> list[Turn]:
    """The turns of a global batch without the first ones of which all samples have been trained.
    The last turn stays, because the update follows it."""
    trained = set(accumulated)
    over = 0
    while over < len(turns) - 1 and trained.issuperset(turns[over].samples):
        over += 1
    return turns[over:]
