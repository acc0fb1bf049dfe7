"""A whole run, from a checkpoint folder and tasks to exported adapters."""

import dataclasses
import math
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxmux.completion import Request, complete
from jaxmux.data import load_tokenizer
from jaxmux.engine import Engine, EngineOptions, TaskUpdate, prepare_task
from jaxmux.models import Backbone, device_memory, load_backbone
from jaxmux.package_files import resolve_path
from jaxmux.peft import export_adapter
from jaxmux.planner.costs.admission import Admission
from jaxmux.tasks import Task, TaskError

from .checkpoints import Checkpoints, RunPosition, read_shape
from .console import RunConsole
from .loss_plot import plot_losses
from .metrics import MetricsWriter, read_metrics
from .run_directory import RunDirectory, write_atomically
from .run_options import check_names, check_options
from .run_shape import choose_run_shape, run_costs
from .summary import Summary


class Interrupted(Exception):
    """The run was told to stop and has saved its state; the same call goes on from there."""

    def __init__(self, signal_number: int):
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.signal_number = signal_number


def fine_tune(
    backbone: str | Path,
    tasks: Sequence[Task],
    run_dir: str | Path,
    *,
    dtype: str = "auto",
    tokens_per_microbatch: int = 8192,
    row_len: int | None = None,
    chunk_len: int | None = None,
    remat: str = "auto",
    memory_gib: float | None = None,
    checkpoint_every: int = 50,
    keep_checkpoints: int = 3,
    max_bad_steps: int = 10,
    sample_tokens: int = 64,
    restart: bool = False,
    config_text: str | None = None,
    console: RunConsole | None = None,
) -> Summary:
    """Trains all tasks together on one frozen backbone and exports their adapters.

    Every task is read and checked before anything is trained. A call with the same arguments goes
    on where the last one stopped; a finished run returns its summary.

    Args:
      backbone: Hugging Face checkpoint folder with config.json, safetensors and a tokenizer.
      tasks: what to train.
      run_dir: folder for metrics, checkpoints, adapters, plots and the summary.
      dtype: of the backbone: "auto" (bfloat16 on an accelerator, float32 on CPU), "bfloat16" or
        "float32". Adapters and their optimizer states are float32 always.
      tokens_per_microbatch: N, the most tokens per forward and backward pass; memory grows with it.
      row_len: tokens that attention sees together, a power of two, at least the longest sample.
      chunk_len: tokens of the unit that belongs to one task, a power of two; the kernels want 128
        or more. Where one or both of these are None, they, and how much of N a pass takes, are
        what is predicted to train fastest; where both are given, a pass takes N.
      remat: "none", "norms", "dots", "lean" or "full": what is kept from forward to backward, from
        most to least memory; "dots" recomputes no matrix product. "auto" mixes them over the layers
        so that least is recomputed in the memory that there is.
      memory_gib: memory of the device to use, by which tasks are refused and "auto" chooses; None
        for all that JAX may use.
      checkpoint_every: rounds between checkpoints. A round is one global batch of every task.
      keep_checkpoints: how many are kept.
      max_bad_steps: consecutive non-finite updates after which a task fails; the others go on.
      sample_tokens: longest completion of a task's `sample_prompt`.
      restart: deletes what an earlier run left in `run_dir`.
      config_text: the config that led to this call, kept as `run_dir/config.gin`.
      console: where the run reports; None prints to the terminal.

    Returns:
      The summary that is also in `run_dir/summary.json`; `summary.succeeded` tells whether every
      task did.

    Raises:
      TaskError: a task cannot be trained; it is named, and nothing has been trained.
      BackboneError, DataError, PlanningError, RunDirectoryError: likewise for what they name.
      Interrupted: SIGINT or SIGTERM arrived; the state is saved.
    """
    console = console or RunConsole()
    backbone = str(Path(resolve_path(backbone)).absolute())
    if not tasks:
        raise TaskError("no tasks to train")
    check_names(tasks)
    check_options(
        {
            "dtype": dtype,
            "remat": remat,
            "memory_gib": memory_gib,
            "tokens_per_microbatch": tokens_per_microbatch,
            "checkpoint_every": checkpoint_every,
            "keep_checkpoints": keep_checkpoints,
            "max_bad_steps": max_bad_steps,
            "sample_tokens": sample_tokens,
        }
    )
    identity = {
        "backbone": backbone,
        "dtype": dtype,
        "tokens_per_microbatch": tokens_per_microbatch,
        "row_len": row_len,
        "chunk_len": chunk_len,
        "tasks": {task.name: _identity(task) for task in tasks},
    }
    directory = RunDirectory(run_dir, identity, restart=restart)
    try:
        finished = None if restart else Summary.load(directory.summary)
        if finished:
            console.say(f"{directory.path}: this run has finished")
            console.summarise(finished, _adapter_folders(finished, directory))
            return finished
        model, tokenizer = load_backbone(backbone, dtype), load_tokenizer(backbone)
        prepared = [prepare_task(task, model.config, tokenizer) for task in tasks]
        console.announce(prepared, model.config.max_position_embeddings)
        if row_len is not None:
            for task in prepared:
                task.refuse_rows_of(row_len)
        memory = None if memory_gib is None else int(memory_gib * 2**30)
        # A run goes on in the shape class that it began with, whatever would be chosen today.
        shape = None if restart else read_shape(directory.checkpoints)
        costs = run_costs(prepared, model.config, model.dtype, remat, memory)
        if shape is None or max(task.longest for task in prepared) > shape.row_len:
            choice = choose_run_shape(prepared, costs, tokens_per_microbatch, row_len, chunk_len)
            console.say(str(choice))
            shape = choice.alignment.shape
        options = EngineOptions(shape, remat=remat, memory=memory, max_bad_steps=max_bad_steps)
        admission = None
        if memory or device_memory():
            asked = tokens_per_microbatch
            admission = Admission(costs.replica, shape, asked, more_stages=False)
        engine = Engine(model, options, admission)
        engine.register_tasks(prepared)
        directory.begin(config_text)
        checkpoints = Checkpoints(directory.checkpoints, keep_checkpoints)
        try:
            position = _train(engine, directory, checkpoints, checkpoint_every, console)
        finally:
            engine.close()
            checkpoints.close()
        summary = _finish(engine, directory, position, console)
        _show_samples(engine, model, tokenizer, sample_tokens, console)
        console.summarise(summary, _adapter_folders(summary, directory))
        return summary
    finally:
        directory.close()


def _train(
    engine: Engine,
    directory: RunDirectory,
    checkpoints: Checkpoints,
    checkpoint_every: int,
    console: RunConsole,
) -> RunPosition:
    """Rounds until every task has ended, with checkpoints, metrics and early exports."""
    position = checkpoints.restore(engine)
    if position is None:
        position = RunPosition()
        _evaluate(engine, engine.names, "eval_loss_first")
    elif not engine.finished:
        console.say(f"going on from the checkpoint behind round {position.rounds}")
    metrics = MetricsWriter(directory, position.metrics_bytes, position.rounds)

    def book(updates: Sequence[TaskUpdate]) -> None:
        metrics.write(updates)
        console.show(engine, updates)
        for update in updates:
            if engine.progress(update.task).status == "succeeded":
                _export(engine, update.task, directory)

    def save() -> None:
        book(engine.drain())
        position.rounds, position.microbatches = engine.rounds, engine.microbatches
        position.microbatches_done = engine.microbatches_done
        position.computed_tokens = engine.microbatches * engine.options.shape.tokens
        position.train_seconds = seconds_before + time.monotonic() - started
        position.metrics_bytes = metrics.position()
        checkpoints.save(engine, position)

    seconds_before, started = position.train_seconds, time.monotonic()
    console.start(engine)
    try:
        with _StopSignals() as stop:
            while not engine.finished:
                book(engine.train_round(stop))
                if stop():
                    save()
                    checkpoints.wait()
                    raise Interrupted(stop.received)
                if engine.rounds % checkpoint_every == 0:
                    save()
            save()
    finally:
        console.stop()
        metrics.close()
    return position


def _finish(
    engine: Engine, directory: RunDirectory, position: RunPosition, console: RunConsole
) -> Summary:
    succeeded = [n for n in engine.names if engine.progress(n).status == "succeeded"]
    _evaluate(engine, succeeded, "eval_loss")
    for name in succeeded:
        if engine.progress(name).status == "succeeded":
            _export(engine, name, directory)
        else:
            shutil.rmtree(directory.adapter(name), ignore_errors=True)
    plot_losses(read_metrics(directory), directory.loss_plot)
    summary = Summary.of(engine, position)
    write_atomically(directory.summary, summary.to_json())
    return summary


def _evaluate(engine: Engine, names: Sequence[str], field: str) -> None:
    for name, loss in engine.evaluate(names).items():
        progress = engine.progress(name)
        setattr(progress, field, loss if math.isfinite(loss) else None)
        if field == "eval_loss" and not math.isfinite(loss):
            progress.status, progress.error = "failed", "loss of the held-out data is not finite"
        held_out = engine.prepared(name).eval_samples
        progress.eval_target_tokens = sum(s.target_tokens for s in held_out)


def _export(engine: Engine, name: str, directory: RunDirectory) -> None:
    spec = engine.prepared(name).task.adapter
    base = engine.backbone
    export_adapter(
        directory.adapter(name), engine.adapter(name), spec, base.config, base.name_or_path
    )


def _show_samples(
    engine: Engine, model: Backbone, tokenizer: Any, tokens: int, console: RunConsole
) -> None:
    shown = [
        p
        for p in map(engine.prepared, engine.names)
        if p.task.sample_prompt is not None and engine.progress(p.task.name).status == "succeeded"
    ]
    if not shown:
        return
    before = [Request(p.task.sample_prompt) for p in shown]
    after = [
        Request(p.task.sample_prompt, p.task.adapter, engine.adapter(p.task.name)) for p in shown
    ]
    texts = complete(model, tokenizer, before + after, max_new_tokens=tokens)
    for p, old, new in zip(shown, texts, texts[len(shown) :], strict=False):
        console.samples(p.task.name, p.task.sample_prompt, old, new)


def _adapter_folders(summary: Summary, directory: RunDirectory) -> dict[str, str]:
    done = [name for name, task in summary.tasks.items() if task["status"] == "succeeded"]
    return {name: str(directory.adapter(name)) for name in done}


def _identity(task: Task) -> dict[str, Any]:
    kind = type(task.optimizer).__name__
    fields = dataclasses.asdict(task)
    del fields["name"], fields["sample_prompt"]
    return fields | {"optimizer": {"kind": kind, **fields["optimizer"]}}


class _StopSignals:
    """Turns SIGINT and SIGTERM into a question that the engine asks; a second signal acts at
    once."""

    def __init__(self):
        self.received = 0
        self._previous: dict[int, Callable | int | None] = {}

    def __call__(self) -> bool:
        return bool(self.received)

    def __enter__(self) -> "_StopSignals":
        # Python delivers signals to the main thread alone; elsewhere the caller decides.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: object) -> None:
        self.received = number
        signal.signal(number, self._previous[number])
