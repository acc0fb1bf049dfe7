"""Learning-rate schedules."""

import math
from typing import Annotated, Literal

from pydantic import Field

from .field_checks import EXACT, Natural, checked_dataclass

SCHEDULES = ("constant", "linear", "cosine")


@checked_dataclass
class Schedule:
    """How a task's learning rate changes over its optimizer updates, as in Hugging Face's Trainer.

    Each task (fine-tuning job) sets the schedule in its optimizer. The peak of the learning rate is
    the optimizer's `learning_rate`.

    Attributes:
      kind: the learning rate after the warm-up. "constant" stays at the peak. "linear" falls in a
        straight line, and "cosine" along half a cosine wave, from the peak to 0 at the end of
        training.
      warmup_steps: number of the task's updates over which the learning rate rises linearly from 0
        to the peak.
      warmup_ratio: length of the warm-up as a fraction, in [0, 1], of the updates that the task
        plans; rounded up to whole updates. It is used only if `warmup_steps` is 0. If both are 0,
        there is no warm-up.

    Raises:
      ValueError: a value is outside its range.
    """

    kind: Literal[*SCHEDULES] = "constant"
    warmup_steps: Natural = 0
    warmup_ratio: Annotated[float, Field(ge=0, le=1), EXACT] = 0.0

    def _error(self, message: str) -> ValueError:
        return ValueError(f"schedule: {message}")

    def factor(self, update: int, total: int) -> float:
        """Returns the learning rate of one update, divided by the peak: a number in [0, 1].

        Args:
          update: number of updates that the task has applied before this one.
          total: number of updates that the task plans, one for each of its global batches.
        """
        warmup = self.warmup_steps or math.ceil(self.warmup_ratio * total)
        if update < warmup:
            return update / warmup
        progress = min(1.0, (update - warmup) / max(1, total - warmup))
        if self.kind == "linear":
            return 1 - progress
        return 0.5 * (1 + math.cos(math.pi * progress)) if self.kind == "cosine" else 1.0
