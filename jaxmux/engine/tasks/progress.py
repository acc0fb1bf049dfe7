"""The progress of a task: plain numbers, kept on the host and in checkpoints."""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxmux.objectives import LOSS, Bound, Comparison
from jaxmux.planner.numbers import numbered
from jaxmux.tasks import Task


@dataclasses.dataclass
class TaskProgress:
    """The position of a task in its training, and its results so far. `Engine.progress` returns it.

    A *step* of a task is one global batch (the samples of one optimizer update). A step either
    applies its update or skips it. Losses are values of the task's objective, for `SFT` in nats per
    target token (token that counts in the loss), and None before they are known.

    Attributes:
      step: number of global batches consumed, which is also the index of the next one.
      updates: number of optimizer updates applied, which is the position in the learning-rate
        schedule. Skipped updates do not count.
      skipped: number of updates skipped so far because a loss, gradient or new parameter was not
        finite.
      bad_streak: number of consecutive updates skipped up to now; 0 after an applied update.
      tokens, target_tokens: numbers trained so far, without padding.
      train_loss_first, train_loss_last: losses of the first and the last applied update.
      eval_loss_first: loss of the held-out data before training; None without held-out data or if
        the loss is not finite.
      eval_loss: loss of the held-out data at the last measurement after a step; once training has
        ended, the loss of the resulting adapter. None as for `eval_loss_first`.
      eval_metrics: the other metrics of that measurement by name, without those that are not
        finite.
      eval_step: number of steps after which `eval_loss` was measured.
      eval_target_tokens: number of target tokens in the held-out data.
      best_step: number of steps after which `Task.best_metric` was best, of the measurements after
        a step.
      best_loss, best_metrics: as `eval_loss` and `eval_metrics`, measured after `best_step`.
      evaluations_since_best: number of measurements since then.
      bound_passed: how the last measurement passes `Task.stop_when`, in words; None if it does not.
      seconds: seconds for which the task has been trained.
      status: "running", "succeeded" (all steps are trained and the held-out loss is measured, or
        the task has stopped early) or "failed".
      error: reason for the status "failed"; otherwise None.
      stopped_early: why the task has succeeded before its last step; None if it has not.
      rung_values: values of `Task.best_metric` at the rungs of successive halving that the task
        has reached; None if the value or the loss is not finite.
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
    eval_metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    eval_step: int | None = None
    eval_target_tokens: int = 0
    best_loss: float | None = None
    best_metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    best_step: int | None = None
    evaluations_since_best: int = 0
    bound_passed: str | None = None
    # Not compared, because equal tasks take different times.
    seconds: float = dataclasses.field(default=0.0, compare=False)
    status: str = "running"
    error: str | None = None
    stopped_early: str | None = None
    rung_values: list[float | None] = dataclasses.field(default_factory=list)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "TaskProgress":
        """The progress in a JSON object that `to_json` of this or of an earlier version made."""
        # Earlier versions compared losses only.
        names = {"rung_losses": "rung_values"}
        return cls(**{names.get(name, name): value for name, value in fields.items()})

    def to_json(self) -> dict[str, Any]:
        """The fields by name, as a checkpoint stores them."""
        return {**vars(self), "rung_values": list(self.rung_values)}


class TaskUpdate(NamedTuple):
    """The result of one global batch (the samples of one optimizer update) of one task.

    `Engine.train_round` and `Engine.drain` return it; `fine_tune` writes it as a line of
    metrics.jsonl. A target token is a token that counts in the loss.

    Attributes:
      round: number, from 0, of the round that held this batch, or its last turn. A round is a turn
        of every task that still trains. In metrics.jsonl and in events it is called "step".
      task: name of the task.
      task_step: number of global batches that the task has consumed, this one included; 1 for the
        first.
      loss: value of the task's objective for the batch, before the update; for `SFT` the mean cross
        entropy over its target tokens in nats.
      lr: learning rate of the update.
      grad_norm: L2 norm of the task's gradient over all its parameters, before clipping.
      target_tokens: number of target tokens in the batch.
      tokens: number of tokens in the batch that the model reads, without padding.
      computed_tokens: number of tokens in the chunks that hold the batch, with padding.
      skipped: True if the update was not applied because the loss, the gradient or a new parameter
        was not finite.
      metrics: further numbers of the objective (`Graded.metrics`); none for `SFT`.
    """

    round: int
    task: str
    task_step: int
    loss: float
    lr: float
    grad_norm: float
    target_tokens: int
    tokens: int
    computed_tokens: int
    skipped: bool
    metrics: Mapping[str, float] = MappingProxyType({})


class TaskEvaluation(NamedTuple):
    """The loss of a task's held-out data with the adapter after some steps.
    `Engine.take_evaluations` returns it.

    Attributes:
      round: number of rounds that had been dispatched.
      task_step: number of global batches that the task had consumed; 0 before training.
      loss: value of the task's objective, for `SFT` the mean cross entropy in nats per target
        token; NaN if the forward pass was not finite.
      target_tokens: number of target tokens in the held-out data.
      best: True if `Task.best_metric` is better than it was after all earlier steps.
      metrics: as in `TaskUpdate`.
    """

    round: int
    task: str
    task_step: int
    loss: float
    target_tokens: int
    best: bool
    metrics: Mapping[str, float] = MappingProxyType({})


def as_line(result: TaskUpdate | TaskEvaluation) -> dict[str, Any]:
    """The fields of a result by their names in metrics.jsonl, held_out.jsonl and events. Without
    metrics there is no such field."""
    fields = result._asdict()
    metrics = dict(fields.pop("metrics"))
    return {"step": fields.pop("round"), **fields} | ({"metrics": metrics} if metrics else {})


def record_evaluation(progress: TaskProgress, done: TaskEvaluation, task: Task) -> None:
    """Enters a measurement of held-out data into its task's progress, and decides whether the task
    stops early or has failed."""
    loss = done.loss if math.isfinite(done.loss) else None
    metrics = {name: value for name, value in done.metrics.items() if math.isfinite(value)}
    progress.eval_target_tokens = done.target_tokens
    if done.task_step == 0:
        progress.eval_loss_first = loss
        return
    progress.eval_loss, progress.eval_metrics = loss, metrics
    if done.best:
        progress.best_loss, progress.best_metrics = loss, metrics
        progress.best_step = done.task_step
        progress.evaluations_since_best = 0
    elif done.task_step != progress.eval_step:
        # An extended task may be measured again at its former last step.
        progress.evaluations_since_best += 1
    progress.eval_step = done.task_step
    progress.bound_passed = _how_passed(task.stop_when, done)
    _stop_if_due(progress, task)
    if progress.status == "succeeded":
        _take_result(progress, task.keep_best)


def stop_early(progress: TaskProgress, reason: str, keep_best: bool) -> None:
    """Lets a running task succeed before its last step, for the given reason. It fails if its last
    loss of held-out data is not finite and it has no better adapter. `progress` is changed."""
    progress.status, progress.stopped_early = "succeeded", reason
    _take_result(progress, keep_best)


def _take_result(progress: TaskProgress, keep_best: bool) -> None:
    if keep_best and progress.best_loss is not None:
        progress.eval_loss, progress.eval_metrics = progress.best_loss, progress.best_metrics
    elif progress.eval_loss is None:
        progress.status, progress.error = "failed", "loss of the held-out data is not finite"


def train_on(progress: TaskProgress, task: Task) -> None:
    """Continues a task that has succeeded with its last step, because it has more steps now. If its
    patience or its time ended with that step, or a bound was passed, it has stopped early instead.
    `progress` is changed."""
    if progress.status == "succeeded" and progress.stopped_early is None:
        if task.max_seconds is not None and progress.seconds >= task.max_seconds:
            stop_in_time(progress)
            return
        progress.status = "running"
        _stop_if_due(progress, task)


def stop_in_time(progress: TaskProgress) -> None:
    """Notes that a task has succeeded before its last step because of its time limit."""
    progress.stopped_early = f"trained for {progress.seconds:.0f} s"


def _stop_if_due(progress: TaskProgress, task: Task) -> None:
    reason = progress.bound_passed or _how_patience_ended(progress, task)
    if progress.status == "running" and reason:
        progress.status, progress.stopped_early = "succeeded", reason


def _how_passed(bound: str | None, done: TaskEvaluation) -> str | None:
    if bound is None:
        return None
    metric = Bound.of(bound).metric
    value = Comparison(metric).value(done.loss, done.metrics)
    if not Bound.of(bound).is_passed(value):
        return None
    label = Comparison(metric).label
    return f"{label} {value:.4g} after step {done.task_step}, and stop_when is {bound!r}"


def _how_patience_ended(progress: TaskProgress, task: Task) -> str | None:
    if task.patience is None or progress.evaluations_since_best < task.patience:
        return None
    compared = Comparison(task.best_metric)
    the = "the " * (compared.metric == LOSS)
    return (
        f"{numbered(progress.evaluations_since_best, 'measurement')} of {the}{compared.label} "
        f"without a {compared.better} one than after step {progress.best_step or 0}"
    )


def record_update(progress: TaskProgress, done: TaskUpdate, steps: int, max_bad_steps: int) -> None:
    """Enters the result of a global batch into the progress of a task with `steps` steps. The task
    has failed after `max_bad_steps` consecutive skipped updates."""
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
