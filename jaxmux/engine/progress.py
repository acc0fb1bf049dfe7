"""How far a task has come: plain numbers, kept on the host and in checkpoints."""

import dataclasses
from typing import Any, NamedTuple


@dataclasses.dataclass
class TaskProgress:
    """Attributes:
    step: global batches consumed; the task's whole data position.
    updates: optimizer updates applied, the position in the schedule; skipped updates do not count.
    skipped: updates skipped because of a non-finite loss or gradient, in all; `bad_streak` in a
      row.
    tokens, target_tokens: trained so far.
    status: "running", "succeeded" or "failed", then with `error`.
    """

    step: int = 0
    updates: int = 0
    skipped: int = 0
    bad_streak: int = 0
    tokens: int = 0
    target_tokens: int = 0
    train_loss_first: float | None = None
    train_loss_last: float | None = None
    eval_loss_first: float | None = None
    eval_loss: float | None = None
    eval_target_tokens: int = 0
    status: str = "running"
    error: str | None = None

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "TaskProgress":
        return cls(**fields)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class TaskUpdate(NamedTuple):
    """One finished global batch of one task: a line of metrics.jsonl.

    Attributes:
      step: the round.
      task_step: global batches the task has consumed, this one included.
      loss: mean cross entropy over the batch's target tokens, before the update.
      lr: learning rate of the update.
      grad_norm: before clipping.
      target_tokens, tokens: of the batch; tokens that the model computed for it, padding apart.
      skipped: True where a non-finite loss or gradient kept the update from being applied.
    """

    step: int
    task: str
    task_step: int
    loss: float
    lr: float
    grad_norm: float
    target_tokens: int
    tokens: int
    skipped: bool
