"""Reports of a training run: a live table on a terminal, plain lines elsewhere."""

import io
import math
import os
import re
import shlex
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jaxmux.engine import Engine, PreparedTask, TaskEvaluation, TaskUpdate
from jaxmux.errors import without_task
from jaxmux.models import BackboneConfig
from jaxmux.objectives import ACCURACY, LOSS, Comparison
from jaxmux.peft import kind_of, trained_on
from jaxmux.planner.numbers import numbered, size_text
from jaxmux.printable import STOPPED_EARLY, Name, shown_state
from jaxmux.sweeps import Sweep
from jaxmux.tasks import Task

from .metrics import read_metrics
from .run_directory import RunDirectory
from .summary import Summary, last_loss
from .sweep_results import best_of, sweep_table
from .task_warnings import after_training, before_training

# Number of lines printed for each task if there is no terminal.
_PLAIN_LINES = 10
# Lines of a terminal that a live table leaves free for its heading, its footer and messages above
# it.
_OTHER_LINES = 8
# Maximum number of adapters that are listed one by one.
_LISTED = 8
# States of tasks, in the order in which they are counted below a live table.
_STATES = ("running", "queued", "succeeded", STOPPED_EARLY, "failed")
_RATES = "tokens/s: of a task's samples, without padding, since its first step"
# Least width of the column of task names, in characters.
_SHORTEST_NAME = 12


# Events that JAX reports for each program, with the words shown for them.
_OF_PROGRAMS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
    "/jax/compilation_cache/cache_retrieval_time_sec": "read from the cache of programs",
}
# Programs that take less than this number of seconds are added up under "other programs".
_LEAST_SECONDS = 0.1


class StartSpan(NamedTuple):
    """A period of a training run's start: `what` was done, for example "read the data", from
    `begin` (seconds since the process began), for how many seconds, and in which thread. Several
    threads may work at the same time."""

    what: str
    begin: float
    seconds: float
    thread: str


class StartTimeline:
    """A context manager that records how a training run spends the time before its first results.
    It also records how long JAX traces, lowers and compiles each program."""

    def __init__(self):
        """Starts the record. The time since the process began counts as importing modules."""
        self._spans: list[StartSpan] = []
        # Total seconds of short work on programs, by kind of work.
        self._short: dict[str, float] = {}
        self._began = _process_start()
        self._add("start Python, import modules", self._began, time.time())

    def __enter__(self) -> "StartTimeline":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: Any) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    @contextmanager
    def span(self, what: str) -> Iterator[None]:
        """Records the time spent within the context, under the description `what`."""
        begin = time.time()
        try:
            yield
        finally:
            self._add(what, begin, time.time())

    @property
    def spans(self) -> list[StartSpan]:
        spans = sorted(self._spans, key=lambda span: span.begin)
        return spans + [
            StartSpan(f"{kind} other programs", spans[-1].begin, seconds, "")
            for kind, seconds in self._short.items()
        ]

    def _add(self, what: str, begin: float, end: float) -> None:
        thread = threading.current_thread().name
        self._spans.append(StartSpan(what, begin - self._began, end - begin, thread))

    def _listen(self, event: str, seconds: float, **facts: Any) -> None:
        kind = _OF_PROGRAMS.get(event)
        if kind is None:
            return
        if seconds < _LEAST_SECONDS:
            self._short[kind] = self._short.get(kind, 0.0) + seconds
            return
        name = facts.get("fun_name", "")
        self._add(f"{kind} {name}".strip(), time.time() - seconds, time.time())


def _process_start() -> float:
    """Start of this process in seconds since 1970; the present time if the system does not tell
    it."""
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        since_boot = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
    except (OSError, AttributeError):
        return time.time()


class RunConsole:
    """Prints the progress and the results of a training run, as a live table on a terminal and as
    lines elsewhere."""

    def __init__(
        self,
        console: Console | None = None,
        log_every: int | None = None,
        verbose: bool = False,
    ):
        """Prints to `console`; None means standard output. Without a terminal, prints a line every
        `log_every` steps of a task; None means about ten lines for each task. `verbose` also prints
        how the time before the first results was spent."""
        self.console = console or Console(file=_PatientOutput(sys.stdout), highlight=False)
        self._log_every, self._verbose = log_every, verbose
        self._live: Live | None = None
        self._latest: dict[str, TaskUpdate] = {}
        # By task, the time and the step of its first results. Rates are measured from then on,
        # because the time before is mostly compilation.
        self._first: dict[str, tuple[float, int]] = {}
        self._tokens: dict[str, int] = {}
        # Tasks for which a skipped update has been reported.
        self._warned: set[str] = set()
        # Tasks whose early stop has been reported.
        self._stopped: set[str] = set()

    @classmethod
    def silent(cls) -> "RunConsole":
        """A console that prints nothing, for all processes but the first."""
        return cls(Console(quiet=True))

    def say(self, text: str) -> None:
        """Prints one line of text as it is: markup is not interpreted and lines are not wrapped."""
        self.console.print(text, markup=False, soft_wrap=True)

    def announce(self, tasks: Sequence[PreparedTask], config: BackboneConfig) -> None:
        """Prints the number of samples or pairs of each task, and warnings about suspicious
        tasks."""
        for prepared in tasks:
            samples, name = prepared.samples, prepared.task.name
            objective = prepared.task.objective
            notes = [
                numbered(objective.count(samples.samples), objective.unit),
                numbered(prepared.steps, "step"),
            ]
            notes.append(f"longest {numbered(prepared.longest_tokens, 'token')}")
            if samples.truncated:
                of_pairs = " answers" * (objective.unit == "pair")
                notes.append(
                    f"{samples.truncated}{of_pairs} truncated to {prepared.task.max_length}"
                )
            if samples.dropped:
                notes.append(f"{samples.dropped} dropped (over-long, or no targets left)")
            if prepared.eval_samples:
                notes.append(f"{objective.count(prepared.eval_samples)} held out")
            if date := samples.rendering.date:
                notes.append(f"its chat template writes the date, which stays {date} in this run")
            self.say(f"task {name}: {', '.join(notes)}")
            for warning in before_training(prepared, config):
                self.say(f"task {name}: warning: {warning}")

    def announce_restart(self, directory: RunDirectory) -> None:
        """Prints the tasks of the earlier training run that a restart deletes, with the steps that
        they were trained; nothing if there was no earlier run. Call it before
        `RunDirectory.begin`."""
        if not directory.replaced:
            return
        steps = dict.fromkeys(directory.replaced, 0)
        if directory.metrics.exists():
            steps |= {line["task"]: line["task_step"] for line in read_metrics(directory.metrics)}
        tasks = ", ".join(f"{name} ({numbered(steps[name], 'step')})" for name in steps)
        self.say(f"{directory.path}: restart deletes the earlier training of {tasks}")

    def start(self, engine: Engine) -> None:
        """Shows the live table from now on, if there is a terminal. The engine must be at the
        position from which training continues."""
        self._stopped = {name for name in engine.names if engine.progress(name).stopped_early}
        if self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=4, transient=True)
            self._live.start()

    def show_start(self, spans: Sequence[StartSpan]) -> None:
        """If the console is verbose, prints how the time before the first results was spent."""
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
        """Shows the updates of a round, in the live table or as about ten lines for each task, and
        the held-out losses that arrived with them."""
        for update in updates:
            name = update.task
            if name in self._first:
                self._tokens[name] += update.tokens
            else:
                self._first[name], self._tokens[name] = (time.monotonic(), update.task_step), 0
            self._latest[name] = update
            if self._live is None:
                self._plain_line(engine, update)
            if update.skipped and name not in self._warned:
                self._warned.add(name)
                self.say(
                    f"task {name}: warning: the update of step {update.task_step} is skipped, "
                    "because its loss, gradient or update is not finite; the loss of skipped "
                    "updates is shown as nan"
                )
        for done in evaluations:
            task = engine.prepared(done.task).task
            if done.task_step and task.eval_every:
                steps = f"{done.task_step}/{engine.prepared(done.task).steps}"
                compared, accuracy = Comparison(task.best_metric), done.metrics.get(ACCURACY)
                parts = [f"held-out loss {done.loss:.4f}"]
                if accuracy is not None and compared.metric != ACCURACY:
                    parts.append(f"{accuracy:.0%} of pairs right")
                if compared.metric != LOSS:
                    parts.append(f"{compared.metric} {done.metrics[compared.metric]:.4f}")
                if done.best:
                    parts.append(f"the {compared.best} so far")
                self.say(f"{done.task} step {steps} {', '.join(parts)}")
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
        """Prints the final tables, the adapter folders, the errors of failed tasks, and warnings
        about suspicious results. Of a sweep, only the best adapter is listed."""
        swept = {name for tasks in summary.sweeps.values() for name in tasks}
        table = Table(box=box.SIMPLE_HEAD)
        for column in ("task", "status", "steps", "train loss", "held-out loss"):
            is_text = column in ("task", "status")
            table.add_column(column, justify="left" if is_text else "right", no_wrap=not is_text)
        for name, task in summary.tasks.items():
            if name in swept:
                continue
            train = _before_after(task["train_loss_first"], last_loss(task))
            held_out = _before_after(task["eval_loss_first"], task["eval_loss"])
            table.add_row(Name(name), Name(task["status"]), str(task["steps"]), train, held_out)
        if table.row_count:
            self.console.print(table)
        for sweep in sweeps:
            self.say(
                f"\nsweep {sweep.name}, the best of {len(sweep.tasks())} configurations first:"
            )
            # Without markup, because rich would interpret a value such as [qv]_proj as markup.
            self.console.print(sweep_table(sweep, summary), markup=False)
        self.say(
            f"{summary.tokens_per_second:,.0f} tokens/s "
            f"({summary.effective_tokens_per_second:,.0f} without padding, "
            f"{summary.padding_fraction:.0%} padding), trained for {summary.wall_seconds:.0f} s"
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
        listed = [
            name
            for name, task in summary.tasks.items()
            if task["status"] != "failed" and (name in best or name not in swept)
        ]
        if len(listed) > _LISTED:
            self.say(f"{len(listed)} adapters: {directory.adapter('TASK')}")
        else:
            for name in listed:
                self.say(f"adapter {name}: {directory.adapter(name)}")
        for name, task in summary.tasks.items():
            if task["status"] == "failed":
                self.say(f"FAILED task {name}: {without_task(task['error'], name)}")
            for warning in after_training(task, config):
                self.say(f"task {name}: warning: {warning}")

    def suggest(
        self,
        summary: Summary,
        directory: RunDirectory,
        tasks: Sequence[Task],
        sweeps: Sequence[Sweep] = (),
    ) -> None:
        """Prints shell commands that use the results. `tasks` includes the configurations of
        `sweeps`."""
        self.say("\nnext:")
        for command in _next_commands(summary, directory, tasks, sweeps):
            self.say(f"  {command}")

    def samples(self, task: str, prompt: str, before: str, after: str) -> None:
        """Prints a prompt with the completions of the bare backbone (`before`) and of the backbone
        with the trained adapter (`after`)."""
        self.say(f"\n{task}: {prompt}\n  before: {before.strip()}\n  after:  {after.strip()}")

    def _plain_line(self, engine: Engine, update: TaskUpdate) -> None:
        steps = engine.prepared(update.task).steps
        every = self._log_every or max(1, steps // _PLAIN_LINES)
        if update.task_step % every == 0 or update.task_step in (1, steps):
            parts = [f"{update.task} step {update.task_step}/{steps} loss {_loss(update)}"]
            parts.append(f"lr {update.lr:.2e}")
            if skipped := engine.progress(update.task).skipped:
                parts.append(f"{skipped} skipped")
            if rate := self._rate(update.task):
                parts.append(f"{rate} tokens/s without padding")
            if eta := self._eta(engine, update.task):
                parts.append(f"ETA {eta}")
            self.say(" ".join(parts))

    def _table(self, engine: Engine) -> Group:
        progress = {name: engine.progress(name) for name in engine.names}
        states = {
            name: shown_state(task.status, task.stopped_early) for name, task in progress.items()
        }
        queued = progress.keys() - engine.begun
        told = ("queued" if name in queued else states[name] for name in states)
        skips = any(task.skipped for task in progress.values())
        rows = []
        # If there is no room for all tasks, those that train are shown.
        for name in sorted(self._latest, key=lambda name: states[name] != "running"):
            update = self._latest[name]
            rows.append(
                (
                    name,
                    f"{update.task_step}/{engine.prepared(name).steps}",
                    _loss(update),
                    *((str(progress[name].skipped),) if skips else ()),
                    f"{update.lr:.2e}",
                    self._rate(name),
                    self._eta(engine, name) if states[name] == "running" else states[name],
                )
            )
        headings = (
            "task",
            "step",
            "loss",
            *(("skipped",) if skips else ()),
            "lr",
            "tokens/s",
            "ETA",
        )
        footer = f"{counted(told, _STATES)}\n{_RATES}"
        return live_table(self.console, headings, rows, footer)

    def _rate(self, task: str) -> str:
        """Tokens of the task per second since its first results, without padding; empty if there
        are no later results yet."""
        tokens, (started, _) = self._tokens[task], self._first[task]
        return f"{tokens / (time.monotonic() - started):,.0f}" if tokens > 0 else ""

    def _eta(self, engine: Engine, name: str) -> str:
        """Time until the task ends, as h:mm:ss; empty if no step has been timed yet."""
        started, first = self._first[name]
        done = self._latest[name].task_step - first
        left = engine.prepared(name).steps - self._latest[name].task_step
        if not left:
            return "0:00:00"
        if not done:
            return ""
        return hours(left * (time.monotonic() - started) / done)


class _PatientOutput(io.TextIOBase):
    """A text stream that ignores further output when its reader has gone (`… | head`), so that
    training continues."""

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


def _next_commands(
    summary: Summary, directory: RunDirectory, tasks: Sequence[Task], sweeps: Sequence[Sweep]
) -> Iterator[str]:
    """Yields commands that show a training run, evaluate its adapters, generate with them, and
    merge an adapter."""
    run_dir = f"--run_dir={shlex.quote(str(directory.path))}"
    if find_spec("starlette") and find_spec("uvicorn"):
        yield f"jaxmux ui {shlex.quote(str(directory.path))}"
    worse = {name for names in summary.sweeps.values() for name in names}
    worse -= {best_of(sweep, summary) for sweep in sweeps}
    ended = [task for task in tasks if summary.tasks[task.name]["status"] != "failed"]
    chosen = [task for task in ended if task.name not in worse]
    if not chosen:
        return
    measured = [task.name for task in chosen if task.eval_data or task.validation_fraction]
    if measured:
        which = measured if len(measured) < len(ended) else ()
        yield " ".join(["jaxmux eval", run_dir, *(f"--task={name}" for name in which)])
    if prompt := next((task.sample_prompt for task in chosen if task.sample_prompt), None):
        yield f"jaxmux generate {run_dir} --prompt={shlex.quote(prompt)}"
    elif trained_on(directory.adapter(chosen[0].name)) == "chats":
        yield f"jaxmux generate {run_dir} --template --prompt=Hello"
    else:
        yield f"jaxmux generate {run_dir} --prompt=Hello"
    if mergeable := [task.name for task in chosen if kind_of(task.adapter).merged]:
        out = shlex.quote(f"{directory.path}-merged")
        yield f"jaxmux export {run_dir} --task={mergeable[0]} --merge --out={out}"


def live_table(
    console: Console,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    footer: str,
    texts: int = 1,
) -> Group:
    """A table of tasks that fits the terminal in width and height, with a footer below it. The
    first column has the names of the tasks. The first `texts` columns hold text, the others
    numbers. Rows for which there is no room are only counted."""
    room = max(1, console.height - _OTHER_LINES)
    shown = rows if len(rows) <= room else rows[: max(1, room - 1)]
    widths = [max(map(len, column)) for column in zip(headings, *shown, strict=True)]
    # Three spaces separate two columns, and each edge takes two more.
    longest = max(_SHORTEST_NAME, console.width - sum(widths[1:]) - 3 * len(widths) - 1)
    table = Table(box=box.SIMPLE_HEAD)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i < texts else "right", no_wrap=True)
    for name, (_, *others) in zip(_shortened([r[0] for r in shown], longest), shown, strict=True):
        table.add_row(name, *others)
    if len(shown) < len(rows):
        more = f"… {len(rows) - len(shown)} more"
        table.add_row(more, *[""] * (len(headings) - 1))
    # rich would wrap a caption to the width of the table, so the footer is a separate text.
    below = Text(footer, style="table.caption")
    return Group(table, below) if rows else Group(below)


def _shortened(names: Sequence[str], longest: int) -> list[str]:
    """Shortens names to `longest` characters such that they still differ, if possible. First leaves
    out their middles; if names become equal, leaves out words that all names share instead, as in
    "…16…0.002…all-linear"."""
    cut = [_cut(name, longest) for name in names]
    if len({*cut}) == len({*names}):
        return cut
    common = set.intersection(*({*re.split("[-_]", name)} for name in names))
    told = (re.sub("[^-_]+", lambda word: "…" if word[0] in common else word[0], n) for n in names)
    return [_cut(re.sub("[-_]?(?:…[-_]?)+", "…", text), longest) for text in told]


def _cut(name: str, longest: int) -> str:
    """Shortens a name by leaving out its middle: names of tenants differ at the beginning, names of
    a sweep's configurations at the end."""
    if len(name) <= longest:
        return name
    begin = (longest - 1) // 3
    return f"{name[:begin]}…{name[begin + 1 - longest :]}"


def counted(states: Iterable[str], order: Sequence[str]) -> str:
    """Counts of tasks by state, in the given order of states, for example "3 running, 12 queued";
    "no tasks" if there are none."""
    counts = Counter(states)
    return ", ".join(f"{counts[state]} {state}" for state in order if counts[state]) or "no tasks"


def hours(seconds: float) -> str:
    """Seconds as h:mm:ss, rounded up, for example "1:02:03"."""
    seconds = math.ceil(seconds)
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _loss(update: TaskUpdate) -> str:
    """The loss of an update as text. For a skipped update, whose gradient is not finite, it is
    "nan": a finite loss would hide that something is wrong with the task."""
    return "nan" if update.skipped else f"{update.loss:.4f}"


def _before_after(before: float | None, after: float | None) -> str:
    if after is None:
        return "–"
    return f"{after:.4f}" if before is None else f"{before:.4f} → {after:.4f}"
