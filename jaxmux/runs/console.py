"""Reports of a training run: a live table on a terminal, plain lines elsewhere."""

import io
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TextIO

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table

from jaxmux.engine import Engine, PreparedTask, TaskEvaluation, TaskUpdate
from jaxmux.errors import without_task
from jaxmux.models import BackboneConfig
from jaxmux.planner.numbers import numbered, size_text
from jaxmux.sweeps import Sweep

from .metrics import read_metrics
from .run_directory import RunDirectory
from .start_timeline import Span
from .summary import Summary
from .sweep_results import best_of, sweep_table
from .task_warnings import after_training, before_training

# Lines that are printed for each task where there is no terminal.
_PLAIN_LINES = 10
# Characters of a terminal that the table needs beside the names of the tasks.
_WIDTH_OF_NUMBERS = 56


class RunConsole:
    """Prints the progress and the results of a training run: a live table on a terminal, else
    lines."""

    def __init__(
        self,
        console: Console | None = None,
        log_every: int | None = None,
        verbose: bool = False,
    ):
        """Creates the console; nothing is printed yet.

        Args:
          console: the rich console to print to; None for standard output.
          log_every: where there is no terminal, number of a task's steps from one printed line to
            the next; None prints about ten lines for each task.
          verbose: whether to print where the time before the first results went.
        """
        self.console = console or Console(file=_PatientOutput(sys.stdout), highlight=False)
        self._log_every, self._verbose = log_every, verbose
        self._live: Live | None = None
        self._latest: dict[str, TaskUpdate] = {}
        # The time of the first results; tokens and steps are counted from there.
        self._started: float | None = None
        self._tokens: dict[str, int] = {}
        self._first_steps: dict[str, int] = {}
        # Names of the tasks that are known to have stopped early.
        self._stopped: set[str] = set()

    @classmethod
    def silent(cls) -> "RunConsole":
        """A console that prints nothing, for processes beside the one that prints."""
        return cls(Console(quiet=True))

    def say(self, text: str) -> None:
        # Lines in a log are not wrapped.
        """Prints one line of text as it is."""
        self.console.print(text, markup=False, soft_wrap=True)

    def announce(self, tasks: Sequence[PreparedTask], config: BackboneConfig) -> None:
        """Prints the number of samples of each task, and what is suspicious about it.

        Args:
          tasks: the tasks of the training run.
          config: configuration of the backbone.
        """
        for prepared in tasks:
            found, name = prepared.samples, prepared.task.name
            notes = [numbered(len(found.samples), "sample"), numbered(prepared.steps, "step")]
            notes.append(f"longest {numbered(prepared.longest_tokens, 'token')}")
            if found.truncated:
                notes.append(f"{found.truncated} truncated to {prepared.task.max_length}")
            if found.dropped:
                notes.append(f"{found.dropped} dropped (over-long, or no targets left)")
            if prepared.eval_samples:
                notes.append(f"{len(prepared.eval_samples)} held out")
            if date := found.rendering.date:
                notes.append(f"its chat template writes the date, which stays {date} in this run")
            self.say(f"task {name}: {', '.join(notes)}")
            for warning in before_training(prepared, config):
                self.say(warning)

    def announce_restart(self, directory: RunDirectory) -> None:
        """Prints what a restart deletes: the tasks of the earlier training run, with the steps that
        they trained. Prints nothing if there was no earlier training run.

        Args:
          directory: the run directory, before `RunDirectory.begin`.
        """
        if not directory.replaced:
            return
        steps = dict.fromkeys(directory.replaced, 0)
        if directory.metrics.exists():
            steps |= {line["task"]: line["task_step"] for line in read_metrics(directory.metrics)}
        tasks = ", ".join(f"{name} ({numbered(steps[name], 'step')})" for name in steps)
        self.say(f"{directory.path}: restart deletes the earlier training of {tasks}")

    def start(self, engine: Engine) -> None:
        """On a terminal, begins to show the live table.

        Args:
          engine: the engine with its tasks, at the position from which training continues.
        """
        self._stopped = {name for name in engine.names if engine.progress(name).stopped_early}
        if self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=4, transient=True)
            self._live.start()

    def show_start(self, spans: Sequence[Span]) -> None:
        """Prints where the time before the first results went, if the console is verbose.

        Args:
          spans: the parts of the start, in the order of their beginnings.
        """
        if not self._verbose:
            return
        caption = "seconds; work in another thread goes on beside that of the main thread"
        table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
        for column in ("from", "seconds", "what", "thread"):
            table.add_column(column, justify="right" if column in ("from", "seconds") else "left")
        for span in spans:
            table.add_row(f"{span.begin:.1f}", f"{span.seconds:.1f}", span.what, span.thread)
        self.console.print(table, markup=False)

    def show(
        self,
        engine: Engine,
        updates: Sequence[TaskUpdate],
        evaluations: Sequence[TaskEvaluation] = (),
    ) -> None:
        """Shows new updates: in the live table, or as about ten lines for each task; and held-out
        losses that were measured during training.

        Args:
          engine: the engine.
          updates: the updates of a round.
          evaluations: the held-out losses that have arrived with them.
        """
        if updates and self._started is None:
            # The time before the first results is mostly compilation.
            self._started = time.monotonic()
            self._first_steps = {name: engine.progress(name).step for name in engine.names}
            self._tokens = {update.task: -update.tokens for update in updates}
        for update in updates:
            self._latest[update.task] = update
            self._tokens[update.task] = self._tokens.get(update.task, 0) + update.tokens
            if self._live is None:
                self._plain_line(engine, update)
            if update.skipped:
                step = update.task_step
                self.say(
                    f"task {update.task}: step {step} skipped, loss, gradient or update not finite"
                )
        for done in evaluations:
            task = engine.prepared(done.task).task
            if done.task_step and task.eval_every:
                best = ", the lowest so far" if done.best else ""
                steps = f"{done.task_step}/{engine.prepared(done.task).steps}"
                self.say(f"{done.task} step {steps} held-out loss {done.loss:.4f}{best}")
        for name in engine.names:
            early = engine.progress(name).stopped_early
            if early and name not in self._stopped:
                self._stopped.add(name)
                self.say(f"task {name}: stopped early, {early}")
        if self._live is not None and updates:
            self._live.update(self._table(engine))

    def stop(self) -> None:
        """Removes the live table."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def summarise(
        self,
        summary: Summary,
        directory: RunDirectory,
        config: BackboneConfig,
        sweeps: Sequence[Sweep] = (),
    ) -> None:
        """Prints the final tables, the adapter folders, the errors of failed tasks, and what is
        suspicious about the results. Of a sweep, only the best adapter is listed.

        Args:
          summary: the results of the training run.
          directory: the run directory, to which the adapters were exported.
          config: configuration of the backbone.
          sweeps: the sweeps whose configurations are among the tasks.
        """
        swept = {name for tasks in summary.sweeps.values() for name in tasks}
        table = Table(box=box.SIMPLE_HEAD)
        for column in ("task", "status", "steps", "train loss", "held-out loss"):
            table.add_column(column, justify="left" if column in ("task", "status") else "right")
        for name, task in summary.tasks.items():
            if name in swept:
                continue
            train = _before_after(task["train_loss_first"], task["train_loss_last"])
            held_out = _before_after(task["eval_loss_first"], task["eval_loss"])
            table.add_row(name, task["status"], str(task["steps"]), train, held_out)
        if table.row_count:
            self.console.print(table)
        for sweep in sweeps:
            self.say(
                f"\nsweep {sweep.name}, the best of {len(sweep.tasks())} configurations first:"
            )
            # A value such as the expression [qv]_proj is no markup of rich.
            self.console.print(sweep_table(sweep, summary), markup=False)
        self.say(
            f"{summary.tokens_per_second:,.0f} tokens/s "
            f"({summary.effective_tokens_per_second:,.0f} without padding, "
            f"{summary.padding_fraction:.0%} padding), {summary.wall_seconds:.0f} s"
        )
        if summary.round_seconds and summary.predicted_round_seconds:
            self.say(
                f"{summary.round_seconds:.3g} s a round "
                f"(predicted: {summary.predicted_round_seconds:.3g} s)"
            )
        if summary.peak_memory_bytes is not None:
            predicted = summary.predicted_memory_bytes
            note = f" (predicted: {size_text(predicted)})" if predicted else ""
            self.say(f"peak memory {size_text(summary.peak_memory_bytes)}{note}")
        if sweeps:
            self.say(f"sweeps: {directory.sweep_results}, {directory.sweep_plot}")
        best = {best_of(sweep, summary) for sweep in sweeps}
        for name, task in summary.tasks.items():
            if task["status"] == "succeeded" and (name in best or name not in swept):
                self.say(f"adapter {name}: {directory.adapter(name)}")
        for name, task in summary.tasks.items():
            if task["status"] == "failed":
                self.say(f"FAILED task {name}: {without_task(task['error'], name)}")
            for warning in after_training(name, task, config):
                self.say(warning)

    def samples(self, task: str, prompt: str, before: str, after: str) -> None:
        """Prints a prompt with its completions before and after training.

        Args:
          task: name of the task.
          prompt: the prompt.
          before: completion of the bare backbone.
          after: completion with the trained adapter.
        """
        self.say(f"\n{task}: {prompt}\n  before: {before.strip()}\n  after:  {after.strip()}")

    def _plain_line(self, engine: Engine, update: TaskUpdate) -> None:
        steps = engine.prepared(update.task).steps
        every = self._log_every or max(1, steps // _PLAIN_LINES)
        if update.task_step % every == 0 or update.task_step in (1, steps):
            parts = [f"{update.task} step {update.task_step}/{steps} loss {update.loss:.4f}"]
            parts.append(f"lr {update.lr:.2e}")
            if rate := self._rate(update.task):
                parts.append(f"{rate} tokens/s without padding")
            if eta := self._eta(engine, update.task):
                parts.append(f"ETA {eta}")
            self.say(" ".join(parts))

    def _table(self, engine: Engine) -> Table:
        caption = "tokens/s: of a task's samples, without padding, since the start"
        table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
        for column in ("task", "step", "loss", "lr", "tokens/s", "ETA"):
            table.add_column(column, justify="left" if column == "task" else "right")
        for name, update in self._latest.items():
            progress = f"{update.task_step}/{engine.prepared(name).steps}"
            status = engine.progress(name).status
            eta = self._eta(engine, name) if status == "running" else status
            loss, lr = f"{update.loss:.4f}", f"{update.lr:.2e}"
            table.add_row(self._cut(name), progress, loss, lr, self._rate(name), eta)
        return table

    def _cut(self, name: str) -> str:
        """A name that leaves room for the numbers. Its end is kept, because the names of a sweep's
        configurations begin alike."""
        room = max(12, self.console.width - _WIDTH_OF_NUMBERS)
        return name if len(name) <= room else f"…{name[1 - room :]}"

    def _rate(self, task: str) -> str:
        """Tokens of the task, without padding, per second since the first results; empty as long
        as it is unknown."""
        tokens = self._tokens[task]
        return f"{tokens / (time.monotonic() - self._started):,.0f}" if tokens > 0 else ""

    def _eta(self, engine: Engine, name: str) -> str:
        """Hours, minutes and seconds until the task ends; empty as long as they are unknown."""
        done = engine.progress(name).step - self._first_steps[name]
        left = engine.prepared(name).steps - engine.progress(name).step
        if not left:
            return "0:00:00"
        if not done:
            return ""
        seconds = math.ceil(left * (time.monotonic() - self._started) / done)
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


class _PatientOutput(io.TextIOBase):
    """A text stream that stays silent once its reader is gone (`… | head`), so that training goes
    on."""

    def __init__(self, stream: TextIO):
        self._stream: TextIO | None = stream

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def write(self, text: str) -> int:
        self._try(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(lambda stream: stream.flush())

    def _try(self, use: Callable[[TextIO], object]) -> None:
        if self._stream is None:
            return
        try:
            use(self._stream)
        except OSError:
            self._stream = None
            with suppress(OSError):
                gone = "the reader of the output is gone; training goes on in silence"
                print(gone, file=sys.stderr)
            # Python flushes standard output once more when it exits.
            sys.stdout = open(os.devnull, "w")


def _before_after(before: float | None, after: float | None) -> str:
    if after is None:
        return "–"
    return f"{after:.4f}" if before is None else f"{before:.4f} → {after:.4f}"
