"""How far a task has come: plain numbers, kept on the host and in checkpoints."""

import dataclasses
import math
from typing import Any, NamedTuple


@dataclasses.dataclass
class TaskProgress:
    """How far a task has come.

    Attributes:
      step: global batches consumed; it determines the task's position in its data.
      updates: optimizer updates applied, the position in the learning-rate schedule. Skipped
        updates do not count.
      skipped: updates skipped so far because a loss or gradient was not finite.
      bad_streak: updates skipped in a row, up to now.
      tokens, target_tokens: tokens trained so far, and those among them that were targets.
      train_loss_first, train_loss_last: nats per target token of the first and the last update.
      eval_loss_first, eval_loss: nats per target token of the held-out data, before and after
        training.
      eval_target_tokens: target tokens of the held-out data.
      status: "running", "succeeded" or "failed".
      error: why the task has failed.
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
      step: index of the round.
      task: name of the task.
      task_step: global batches that the task has consumed, this one included.
      loss: mean cross entropy over the batch's target tokens in nats, before the update.
      lr: learning rate of the update.
      grad_norm: global norm of the gradient before clipping.
      target_tokens: tokens of the batch that are predicted.
      tokens: tokens of the batch, without padding.
      skipped: True if the update was not applied because a loss or gradient was not finite.
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


def record_update(progress: TaskProgress, done: TaskUpdate, steps: int, max_bad_steps: int) -> None:
    """Enters a finished global batch into the progress of its task, and decides whether the task
    has succeeded or failed.

    Args:
      steps: number of global batches that the task trains.
      max_bad_steps: consecutive skipped updates after which the task has failed.
    """
    progress.step = done.task_step
    progress.tokens += done.tokens
    progress.target_tokens += done.target_tokens
    if done.skipped:
        progress.skipped += 1
        progress.bad_streak += 1
    else:
        progress.updates += 1
        progress.bad_streak = 0
        progress.train_loss_last = done.loss
        if progress.train_loss_first is None:
            progress.train_loss_first = done.loss
    last = progress.step == steps
    if progress.bad_streak >= max_bad_steps or (last and not progress.updates):
        progress.status = "failed"
        progress.error = (
            "loss, gradient or update not finite in "
            f"{progress.bad_streak} consecutive updates, the last at step {progress.step}"
        )
    elif last and not math.isfinite(done.loss):
        progress.status, progress.error = "failed", "loss not finite at the last step"
    elif last:
        progress.status = "succeeded"
