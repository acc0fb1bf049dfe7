"""What a task has used, for bills and quotas."""

import dataclasses
from collections.abc import Mapping

from jaxmux.engine import ComputedTurn, TaskUpdate


@dataclasses.dataclass
class Meter:
    """What a task, or all tasks together, have used so far. The sums over all tasks are the totals.

    Attributes:
      effective_tokens: tokens of the samples of the task's updates, without padding, and without
        the virtual tokens of a trained prompt, which belong to the adapter and not to the data.
      computed_tokens: tokens of the chunks with training samples that have been computed, with
        padding and virtual tokens. It makes no difference whether an update followed.
      recomputed_tokens: tokens of this kind that were computed once more, because training was
        started again from an earlier moment, because a device ran out of memory, or because the
        task left a round, or on some meshes a global batch, that had begun. They do not count as
        computed a second time.
      trained_tokens: target tokens (tokens that count in the loss) of the updates that were
        applied.
      held_out_tokens: tokens of the chunks with held-out samples, with padding, of the
        measurements that have been completed.
      device_seconds: the task's part of the time of its rounds, in proportion to all tokens that
        were computed in them, held-out ones included.
    """

    effective_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    trained_tokens: int = 0
    held_out_tokens: int = 0
    device_seconds: float = 0.0

    def add_turn(self, turn: ComputedTurn, counted: int, again: bool) -> None:
        """Counts what has been computed of a global batch.

        Args:
          turn: what has been computed.
          counted: number of tokens of the global batch that have been counted so far. If it has
            begun again since, they do not count a second time.
          again: whether the global batch was computed before, by a process that ended before it was
            saved.
        """
        new = min(turn.tokens, max(0, turn.before + turn.tokens - counted))
        self.computed_tokens += new
        self.recomputed_tokens += turn.tokens if again else turn.tokens - new

    def add_update(self, update: TaskUpdate) -> None:
        """Counts an update, whose turns are counted by themselves.

        Args:
          update: the update.
        """
        self.effective_tokens += update.tokens
        self.trained_tokens += 0 if update.skipped else update.target_tokens

    def replace(self, old: "Meter", new: "Meter") -> None:
        """Counts one meter in place of another in a total.

        Args:
          old: the meter that was counted.
          new: the meter that counts from now on.
        """
        for field in dataclasses.fields(self):
            name = field.name
            change = getattr(new, name) - getattr(old, name)
            setattr(self, name, getattr(self, name) + change)

    def copy(self) -> "Meter":
        """Returns a copy, which does not change with this meter."""
        return dataclasses.replace(self)


def shares_of(computed: Mapping[str, int]) -> dict[str, float]:
    """By name of the task, its part of all tokens that were computed.

    Args:
      computed: by name of the task, the number of tokens.
    """
    total = sum(computed.values())
    return {name: tokens / max(total, 1) for name, tokens in computed.items()}
