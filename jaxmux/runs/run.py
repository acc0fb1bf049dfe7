"""A training run, from a backbone's folder and tasks to exported adapters."""

import dataclasses
import math
import operator
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from jaxmux.atomic_files import write_atomically
from jaxmux.backbone_folder import resolve_backbone
from jaxmux.completion import Request, complete
from jaxmux.data import load_tokenizer
from jaxmux.engine import Engine, EngineOptions, PreparedTask, TaskUpdate, prepare_task
from jaxmux.engine.compile_ahead import ProgramsAhead
from jaxmux.errors import Interrupted
from jaxmux.models import (
    Backbone,
    BackboneConfig,
    backbone_dtype,
    backbone_fingerprint,
    check_backbone,
    planned_remat,
)
from jaxmux.peft import export_adapter, is_adapter_folder, kind_of
from jaxmux.planner.costs.admission import Admission
from jaxmux.tasks import Task, TaskError

from .checkpoints import Checkpoints, RunPosition
from .console import RunConsole
from .loss_plot import plot_losses
from .metrics import MetricsWriter
from .run_directory import FORMAT, RunDirectory
from .run_layout import choose_layout, load_beside, load_on, refuse_mesh
from .run_options import AUTO_MESH, RunOptions, check_names
from .stop_signals import StopSignals
from .summary import Summary

DEFAULTS = RunOptions()


def fine_tune(
    backbone: str | Path,
    tasks: Sequence[Task],
    run_dir: str | Path,
    options: RunOptions = DEFAULTS,
    *,
    restart: bool = False,
    config_text: str | None = None,
    console: RunConsole | None = None,
) -> Summary:
    """Trains all tasks together on one frozen backbone and exports their adapters.

    Every task is read and checked before training starts. If an earlier call with these arguments
    was interrupted, this call continues from its last checkpoint. If it finished, this call returns
    its summary. In the folder of an earlier call, another backbone, other tasks (`sample_prompt`
    may change), or another dtype, tokens_per_microbatch, row_len, chunk_len or max_sequences are
    refused; all other options may change.

    A task fails if too many consecutive updates are not finite (`options.max_bad_steps`). The
    training of the other tasks continues.

    Args:
      backbone: Hugging Face checkpoint folder with config.json, safetensors and a tokenizer. A path
        may begin with "jaxmux:" for a folder that ships with jaxmux.
      tasks: the tasks to train, at least one, with different names.
      run_dir: folder of the training run. It gets metrics.jsonl (one line for each task and round,
        which is one global batch of every task), tensorboard, checkpoints, adapters/<task> (Hugging
        Face PEFT folders of the tasks that succeeded), loss.png, summary.json, and run.json (the
        record of what is trained).
      options: sizes of microbatches, memory, checkpoints and other settings.
      restart: True deletes the files that an earlier training run wrote to `run_dir`, and starts
        anew.
      config_text: text of a gin config that is kept as `run_dir/config.gin`; None keeps none.
      console: object that prints progress and results; None prints them to standard output.

    Returns:
      The summary, which is also in `run_dir/summary.json`. `summary.succeeded` is True if every
      task succeeded.

    Raises:
      TaskError: there is no task, or a task cannot be trained. Nothing has been trained by this
        call.
      BackboneError, DataError, PlanningError, RunDirectoryError: the backbone, data, options or
        folder that the message names cannot be used. Nothing has been trained by this call.
      Interrupted: SIGINT or SIGTERM arrived during training; the state is saved. Signals are
        handled only if `fine_tune` runs in the main thread.
    """
    console = console or RunConsole(log_every=options.log_every)
    backbone = str(Path(resolve_backbone(backbone)).absolute())
    if not tasks:
        raise TaskError("no tasks to train")
    check_names(tasks)
    _refuse_own_adapters(tasks, Path(run_dir), restart)
    identity = {
        "format": FORMAT,
        "backbone": backbone,
        "dtype": options.dtype,
        "tokens_per_microbatch": options.tokens_per_microbatch,
        "row_len": options.row_len,
        "chunk_len": options.chunk_len,
        "max_sequences": options.max_sequences,
        "tasks": {task.name: _identity(task) for task in tasks},
    }
    with (
        StopSignals() as stop,
        closing(RunDirectory(run_dir, identity, restart=restart)) as directory,
    ):
        # Everything is read and checked before the backbone is loaded.
        config, tokenizer = BackboneConfig.from_folder(backbone), load_tokenizer(backbone)
        fingerprints = {"backbone": backbone_fingerprint(backbone)}
        directory.refuse_changes(fingerprints)
        check_backbone(backbone)
        reserved = options.reserved(config)
        if options.mesh != AUTO_MESH:
            refuse_mesh(options.deployment, config)
        prepared = [
            prepare_task(task, config, tokenizer, fingerprints["backbone"]) for task in tasks
        ]
        for task in prepared:
            fingerprints |= task.fingerprints
            if options.row_len is not None:
                task.refuse_rows_of(options.row_len)
        directory.refuse_changes(fingerprints)
        if not restart and (finished := _finished_summary(directory, console)):
            console.say(f"{directory.path}: this run has finished; --restart trains it anew")
            console.summarise(finished, directory, config)
            return finished
        console.announce(prepared, config)
        layout = choose_layout(prepared, config, options, directory.shapes, console)
        engine_options = EngineOptions(
            layout.shape,
            reserved,
            options.remat,
            options.memory,
            options.attention,
            options.grouped_lora,
            max_bad_steps=options.max_bad_steps,
            replica_shapes=layout.shapes if layout.costs else (),
            sequence_costs=layout.costs,
        )
        dtype = backbone_dtype(options.dtype)
        console.say("compiling the training step; this can take a minute")
        with ExitStack() as stack:
            programs = None
            if layout.deployment.devices == 1:
                programs = ProgramsAhead(config, dtype, engine_options, prepared)
                stack.enter_context(closing(programs))
            model = load_on(layout.deployment, backbone, dtype, config)
            admission, *others = layout.admissions or (None,)
            engine = Engine(model, engine_options, admission, programs, others)
            engine.register_tasks(prepared)
            engine.refuse_implementations()
            console.announce_restart(directory)
            directory.begin(fingerprints, layout.added_to(directory.shapes), config_text)
            checkpoints = Checkpoints(directory.checkpoints, options.keep_checkpoints, console.say)
            with closing(checkpoints), closing(engine):
                position = _restore(engine, checkpoints, console)
                with closing(MetricsWriter(directory, position, console.say)) as metrics:
                    every = options.checkpoint_every
                    seconds = _train(
                        engine, directory, checkpoints, metrics, position, every, console, stop
                    )
                    predicted = {
                        "predicted_memory_bytes": _predicted_memory(engine, admission),
                        "predicted_round_seconds": layout.round_seconds,
                    }
                    summary = _finish(engine, directory, metrics, position, seconds, predicted)
        if shown := _with_prompts(engine):
            if not isinstance(model, Backbone):
                model = load_beside(backbone, dtype, config)
            if model is None:
                console.say("sample_prompt: one device has no memory for the whole backbone")
            else:
                _show_samples(shown, engine, model, tokenizer, options.sample_tokens, console)
        console.summarise(summary, directory, config)
        return summary


def _refuse_own_adapters(tasks: Sequence[Task], run_dir: Path, restart: bool) -> None:
    """TaskError if a task begins with an adapter that `restart` would delete."""
    for task in tasks:
        source = task.resume_from
        if restart and source and Path(source).resolve().is_relative_to(run_dir.resolve()):
            raise TaskError(
                f"task {task.name!r}: restart would delete {source}, with which the task begins; "
                "copy it to another place, or choose another run_dir"
            )


def _finished_summary(directory: RunDirectory, console: RunConsole) -> Summary | None:
    """The summary of a finished training run whose results are all there; None otherwise."""
    if directory.extended or not directory.summary.exists():
        return None
    summary = Summary.load(directory.summary)
    if summary is None:
        console.say(f"{directory.summary}: damaged; it is written again")
        return None
    for name, task in summary.tasks.items():
        if task["status"] == "succeeded" and not is_adapter_folder(directory.adapter(name)):
            console.say(f"{directory.adapter(name)}: missing; it is exported again")
            return None
    return summary


def _restore(engine: Engine, checkpoints: Checkpoints, console: RunConsole) -> RunPosition:
    """Restores the newest checkpoint; without one, measures the losses before training."""
    position = checkpoints.restore(engine)
    if position is None:
        position = RunPosition()
        _evaluate(engine, engine.names, "eval_loss_first")
    elif not engine.finished:
        console.say(f"going on from the checkpoint after round {position.rounds}")
    return position


def _train(
    engine: Engine,
    directory: RunDirectory,
    checkpoints: Checkpoints,
    metrics: MetricsWriter,
    position: RunPosition,
    checkpoint_every: int,
    console: RunConsole,
    stop: StopSignals,
) -> float | None:
    """Trains until every task has ended, and moves `position`. Writes checkpoints and metrics, and
    exports an adapter as soon as its task has succeeded. Returns the median seconds from one round
    to the next, in the later half of the rounds; None if there were too few."""

    def record(updates: Sequence[TaskUpdate]) -> None:
        metrics.write(updates)
        console.show(engine, updates)
        for update in updates:
            if engine.progress(update.task).status == "succeeded":
                _export(engine, update.task, directory)

    def save() -> None:
        record(engine.drain())
        position.rounds, position.microbatches = engine.rounds, engine.microbatches
        position.computed_tokens = engine.computed_tokens
        position.train_seconds = seconds_before + time.monotonic() - started
        position.metrics_bytes = metrics.position()
        checkpoints.save(engine, position)

    seconds_before, started = position.train_seconds, time.monotonic()
    ends: list[float] = []
    console.start(engine)
    try:
        with stop.deferred(console.say):
            while not engine.finished:
                record(engine.train_round(lambda: stop.arrived))
                ends.append(time.monotonic())
                if stop.arrived:
                    save()
                    checkpoints.wait()
                    raise Interrupted(stop.number, saved=True)
                if engine.rounds % checkpoint_every == 0:
                    save()
            save()
    finally:
        console.stop()
    later = ends[len(ends) // 2 :]
    return statistics.median(map(operator.sub, later[1:], later)) if len(later) > 2 else None


def _finish(
    engine: Engine,
    directory: RunDirectory,
    metrics: MetricsWriter,
    position: RunPosition,
    round_seconds: float | None,
    predicted: Mapping[str, float | None],
) -> Summary:
    succeeded = [n for n in engine.names if engine.progress(n).status == "succeeded"]
    _evaluate(engine, succeeded, "eval_loss")
    for name in succeeded:
        if engine.progress(name).status == "succeeded":
            _export(engine, name, directory)
        else:
            shutil.rmtree(directory.adapter(name), ignore_errors=True)
    progress = {name: engine.progress(name) for name in engine.names}
    metrics.write_held_out({name: p.eval_loss_first for name, p in progress.items()}, 0)
    metrics.write_held_out({name: p.eval_loss for name, p in progress.items()}, position.rounds)
    plot_losses(directory.metrics, directory.loss_plot)
    summary = Summary.of(engine, position, round_seconds=round_seconds, **predicted)
    write_atomically(directory.summary, summary.to_json())
    return summary


def _predicted_memory(engine: Engine, admission: Admission | None) -> int | None:
    """The peak memory that was predicted before training, in bytes; None if it is not known."""
    if admission is None or engine.remat is None:
        return None
    pools = [engine.prepared(name).pool for name in engine.names]
    stages = admission.costs.replica.pp
    return int(admission.peak(pools, planned_remat(engine.remat), in_flight=stages))


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
        directory.adapter(name),
        engine.adapter(name),
        spec,
        base.config,
        base.name_or_path,
        base_fingerprint=base.fingerprint,
    )


def _with_prompts(engine: Engine) -> list[PreparedTask]:
    """The tasks with a prompt that is completed after training, if they succeeded."""
    return [
        p
        for p in map(engine.prepared, engine.names)
        if p.task.sample_prompt is not None and engine.progress(p.task.name).status == "succeeded"
    ]


def _show_samples(
    shown: Sequence[PreparedTask],
    engine: Engine,
    model: Backbone,
    tokenizer: Any,
    tokens: int,
    console: RunConsole,
) -> None:
    before = [Request(p.task.sample_prompt) for p in shown]
    after = [
        Request(p.task.sample_prompt, p.task.adapter, engine.adapter(p.task.name)) for p in shown
    ]
    texts = complete(model, tokenizer, before + after, max_new_tokens=tokens)
    for p, old, new in zip(shown, texts, texts[len(shown) :], strict=False):
        console.samples(p.task.name, p.task.sample_prompt, old, new)


def _identity(task: Task) -> dict[str, Any]:
    """The entry of a task in run.json."""
    fields = dataclasses.asdict(task)
    del fields["name"], fields["sample_prompt"]
    adapter = {"kind": kind_of(task.adapter).name, **fields["adapter"]}
    optimizer = {"kind": task.optimizer.kind, **fields["optimizer"]}
    return fields | {"adapter": adapter, "optimizer": optimizer}
