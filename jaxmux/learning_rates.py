"""Learning-rate schedules."""

import dataclasses
import math

SCHEDULES = ("constant", "linear", "cosine")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Course of the learning rate over a task's updates, as in Hugging Face's Trainer.

    Attributes:
      kind: the course after the warm-up: "constant", or "linear" or "cosine", which fall to 0 at
        the task's last step.
      warmup_steps: number of updates over which the learning rate rises linearly from 0.
      warmup_ratio: the warm-up as a fraction of all steps; it is used if `warmup_steps` is 0.

    Raises:
      ValueError: a value is outside its range.
    """

    kind: str = "constant"
    warmup_steps: int = 0
    warmup_ratio: float = 0.0

    def __post_init__(self):
        if self.kind not in SCHEDULES:
            raise ValueError(f"unknown schedule {self.kind!r}; known: {', '.join(SCHEDULES)}")
        if self.warmup_steps < 0 or not 0 <= self.warmup_ratio <= 1:
            raise ValueError(
                f"warm-up of {self.warmup_steps} steps, ratio {self.warmup_ratio}: "
                "warmup_steps should not be negative and warmup_ratio lie in [0, 1]"
            )

    def factor(self, update: int, total: int) -> float:
        """The learning rate of an update, divided by the peak learning rate.

        Args:
          update: index of the update, from 0.
          total: number of steps of the task.
        """
        warmup = self.warmup_steps or math.ceil(self.warmup_ratio * total)
        if update < warmup:
            return update / warmup
        progress = min(1.0, (update - warmup) / max(1, total - warmup))
        if self.kind == "linear":
            return 1 - progress
        return 0.5 * (1 + math.cos(math.pi * progress)) if self.kind == "cosine" else 1.0
