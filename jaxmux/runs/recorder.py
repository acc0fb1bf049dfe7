"""Writes the output of a training run: metrics, checkpoints, adapters and the summary."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxmux.atomic_files import write_atomically
from jaxmux.engine import Engine, TaskUpdate, TrainedTask
from jaxmux.engine.rounds.results import CHECKPOINTS
from jaxmux.models import checkpoint_tensors, devices_bytes
from jaxmux.peft import export_adapter
from jaxmux.printable import shown_state
from jaxmux.sweeps import Sweep

from .checkpoints import Checkpoints, RunPosition, save_run
from .console import RunConsole, StartTimeline
from .metrics import MetricsWriter, has_details, host_bytes, round_line
from .processes import Processes
from .run_directory import RunDirectory
from .summary import Summary, notes_of_task, plot_losses
from .sweep_results import values_of, write_results


class RunFiles(NamedTuple):
    """The open files of a run directory."""

    directory: RunDirectory
    checkpoints: Checkpoints
    metrics: MetricsWriter


class Recorder:
    """Records the progress and the results of a training run.

    If there are several processes, only the first has the files. The others call the same methods,
    because arrays are read from the devices of all processes.
    """

    def __init__(
        self,
        engine: Engine,
        files: RunFiles | None,
        position: RunPosition,
        processes: Processes,
        console: RunConsole,
    ):
        """Records from the given position on. `save` changes `position` to the current position.
        `files` is None in a process that writes none."""
        self._engine, self._files = engine, files
        self._processes, self._console = processes, console
        self._position, self._before = position, position.train_seconds
        # Rounds and microbatches at the newest checkpoint; None if there is no checkpoint.
        self._saved: tuple[int, int] | None = None
        if position != RunPosition():
            self._saved = position.rounds, position.microbatches
        self._started = self._recorded = time.monotonic()
        # The content of tasks.json.
        self._ended: Mapping[str, Any] | None = None

    def record(self, updates: Sequence[TaskUpdate]) -> None:
        """Writes and shows the updates of a round, and exports the adapters of the tasks that end
        with it."""
        evaluations = self._engine.take_evaluations()
        if self._files:
            self._files.metrics.write(updates, evaluations)
            self._record_round(self._files.metrics)
            self._record_ends(self._files.directory)
        self._console.show(self._engine, updates, evaluations)
        for update in updates:
            if self._engine.progress(update.task).status == "succeeded":
                with self._engine.device_time.waiting(CHECKPOINTS):
                    self.export(update.task)

    def record_start(self, timeline: StartTimeline) -> None:
        """Writes how the time until now was spent, and shows it if the user asked for it."""
        spans = timeline.spans
        if self._files:
            text = json.dumps([span._asdict() for span in spans], indent=1)
            write_atomically(self._files.directory.start, text + "\n")
        self._console.show_start(spans)

    def _record_round(self, metrics: MetricsWriter) -> None:
        """Writes the line of the round that was dispatched last, unless it is already written."""
        record, now = self._engine.take_round(), time.monotonic()
        if record is not None:
            spent = self._engine.device_time.spent(self._recorded, now)
            self._recorded = now
            memory, is_detailed = devices_bytes(), has_details(record.index)
            metrics.write_round(round_line(record, spent, memory, host_bytes(), is_detailed))

    def _record_ends(self, directory: RunDirectory) -> None:
        """Writes which tasks have ended while others still train, if the list has changed."""
        progress = {name: self._engine.progress(name) for name in self._engine.names}
        ended = {
            name: {
                "status": shown_state(task.status, task.stopped_early),
                "error": task.error,
                "stopped_early": task.stopped_early,
            }
            for name, task in progress.items()
            if task.status != "running"
        }
        if ended != self._ended:
            self._ended = ended
            write_atomically(directory.ended, json.dumps({"tasks": ended}, indent=2) + "\n")

    def save(self) -> None:
        """Fetches and records all results, and starts to save a checkpoint unless there is one of
        this position."""
        with self._engine.device_time.waiting(CHECKPOINTS):
            self._save()

    def _save(self) -> None:
        engine, position, files = self._engine, self._position, self._files
        self.record(engine.drain())
        position.rounds, position.microbatches = engine.rounds, engine.microbatches
        position.computed_tokens = engine.computed_tokens
        position.train_seconds = self._before + time.monotonic() - self._started
        if files:
            files.metrics.tell(position)
        if (saved := (engine.rounds, engine.microbatches)) == self._saved:
            return
        self._saved = saved
        arrays = {name: engine.task_arrays(name) for name in engine.begun}
        if files:
            save_run(files.checkpoints, engine, position, arrays)

    def wait(self) -> None:
        if self._files:
            self._files.checkpoints.wait()

    def export(self, name: str) -> None:
        engine = self._engine
        adapter, base, prepared = engine.result(name)(), engine.backbone, engine.prepared(name)
        if self._files:
            export_adapter(
                self._files.directory.adapter(name),
                adapter,
                prepared.task.adapter,
                base.config,
                base.name_or_path,
                base_fingerprint=base.fingerprint,
                base=checkpoint_tensors(
                    base.name_or_path, base.compute_dtype, base.config.backbone_format
                ),
                notes=notes_of_task(
                    TrainedTask.of(prepared, engine.progress(name), prepared.fingerprints)
                ),
                rendering=prepared.samples.rendering,
            )

    def finish(
        self, round_seconds: float | None, sweeps: Sequence[Sweep], **predicted: float | None
    ) -> Summary:
        """Exports the adapters of the tasks that succeeded, and writes the plots, the results of
        sweeps and the summary. `round_seconds` and the fields in `predicted`, whose names begin
        with "predicted", are as in `Summary`."""
        engine, files = self._engine, self._files
        for name in engine.names:
            if engine.progress(name).status == "succeeded":
                self.export(name)
        numbers: Mapping[str, float | None] = {"round_seconds": round_seconds, **predicted}
        summary = Summary.of(engine, self._position, values_of(sweeps), **numbers)
        if files:
            plot_losses(files.directory.metrics, files.directory.loss_plot)
            if sweeps:
                write_results(sweeps, summary, files.directory)
            write_atomically(files.directory.summary, summary.to_json())
            files.directory.ended.unlink(missing_ok=True)
            files.metrics.finish()
        return summary
