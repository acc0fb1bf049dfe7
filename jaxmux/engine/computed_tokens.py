"""What the devices have computed of each task, as far as its results have arrived."""

from collections import Counter
from typing import NamedTuple

from .rounds import RoundPlan
from .slot import Slot


class ComputedTurn(NamedTuple):
    """What a round has computed of a task's global batch. All tokens are those of chunks, with
    padding.

    Attributes:
      task: name of the task.
      step: index of the global batch, from 0.
      before: number of tokens of the global batch that had been computed before, since it was begun
        last. A global batch begins again if its gradients are lost.
      tokens: number of tokens that the round has computed of it.
    """

    task: str
    step: int
    before: int
    tokens: int


class Computed(NamedTuple):
    """What has been computed of all tasks.

    Attributes:
      turns: what rounds have computed of training samples.
      held_out: by name of the task, number of tokens of chunks with held-out samples.
      measured: the same of the measurements that have been completed, whose first turns may have
        been computed before. Those that were begun and are begun again do not count.
    """

    turns: list[ComputedTurn]
    held_out: dict[str, int]
    measured: dict[str, int]

    @property
    def by_task(self) -> dict[str, int]:
        """By name, number of tokens of each task, held-out ones included."""
        tokens = Counter(self.held_out)
        for turn in self.turns:
            tokens[turn.task] += turn.tokens
        return dict(tokens)


class ComputedTokens:
    """Counts every turn when its results have arrived, and a turn that was begun and not completed
    when it is known what has been computed of it. Whether its task is still trained makes no
    difference."""

    def __init__(self):
        """Starts without tokens."""
        self._turns: list[ComputedTurn] = []
        self._held_out: Counter[str] = Counter()
        self._measured: Counter[str] = Counter()

    def count(self, number: int, slot: Slot, plan: RoundPlan) -> None:
        """Counts the turn of a task in a round, but for the parts of it that have been counted.

        Args:
          number: number of its slot in the round.
          slot: the task.
          plan: the round.
        """
        self._add(slot, plan.steps[number], plan.computed_tokens[number] - slot.part_of_turn)
        slot.part_of_turn = 0

    def count_part(self, slot: Slot, step: int, tokens: int) -> None:
        """Counts a part of a turn, the rest of which will be planned anew.

        Args:
          slot: the task.
          step: index of the global batch.
          tokens: number of tokens of the part.
        """
        self._add(slot, step, tokens)
        slot.part_of_turn += tokens

    def count_in_vain(self, slot: Slot, step: int, tokens: int) -> None:
        """Counts what a round has computed of a task that has left. If the task comes back, the
        turn is computed again.

        Args:
          slot: the task.
          step: index of the global batch.
          tokens: number of tokens.
        """
        if tokens:
            self._turns.append(ComputedTurn(slot.name, step, slot.computed[step], tokens))

    def count_held_out(self, slot: Slot, tokens: int) -> None:
        """Counts a turn of a measurement of the held-out loss.

        Args:
          slot: the task.
          tokens: number of tokens.
        """
        self._held_out[slot.name] += tokens

    def count_measured(self, slot: Slot, tokens: int) -> None:
        """Counts a measurement whose turns have all been counted.

        Args:
          slot: the task.
          tokens: number of tokens of all turns.
        """
        self._measured[slot.name] += tokens

    def take(self) -> Computed:
        """What has been counted since the last call."""
        taken = Computed(self._turns, dict(self._held_out), dict(self._measured))
        self._turns, self._held_out, self._measured = [], Counter(), Counter()
        return taken

    def _add(self, slot: Slot, step: int, tokens: int) -> None:
        self.count_in_vain(slot, step, tokens)
        slot.computed[step] += tokens
