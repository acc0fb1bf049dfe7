"""What a task has used, for bills and quotas."""

import dataclasses
from collections.abc import Mapping

from jaxmux.engine import TaskUpdate


@dataclasses.dataclass
class Meter:
    """What a task has used so far.

    The sums over all tasks are the totals: every update counts once, and the time of a round is
    divided among its tasks.

    Attributes:
      effective_tokens: tokens of the task's samples that the model has read, without padding.
      computed_tokens: tokens of the chunks that held them, with padding.
      recomputed_tokens: tokens that were computed once more because training was started again from
        an earlier moment; they do not count as computed a second time.
      trained_tokens: target tokens (tokens that count in the loss) of the updates that were
        applied.
      device_seconds: the task's part of the time of its rounds, in proportion to its computed
        tokens.
    """

    effective_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    trained_tokens: int = 0
    device_seconds: float = 0.0

    def add(self, update: TaskUpdate, again: bool = False) -> None:
        """Counts an update.

        Args:
          update: the update.
          again: whether it was computed before, by a process that ended before it was saved.
        """
        self.recomputed_tokens += update.computed_tokens if again else 0
        self.effective_tokens += update.tokens
        self.computed_tokens += update.computed_tokens
        self.trained_tokens += 0 if update.skipped else update.target_tokens


def shares_of(computed: Mapping[str, int]) -> dict[str, float]:
    """By name of the task, its part of all tokens that were computed.

    Args:
      computed: by name of the task, the number of tokens.
    """
    total = sum(computed.values())
    return {name: tokens / max(total, 1) for name, tokens in computed.items()}
