"""A training run, from a backbone's folder and tasks to exported adapters."""

import dataclasses
import json
import math
import operator
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

from jaxmux.backbone_folder import resolve_backbone
from jaxmux.completion import Request, complete
from jaxmux.data import load_tokenizer
from jaxmux.engine import Engine, EngineOptions, PreparedTask, prepare_task
from jaxmux.engine.compile_ahead import ProgramsAhead
from jaxmux.errors import Interrupted
from jaxmux.installed_versions import installed_versions
from jaxmux.models import (
    Backbone,
    BackboneConfig,
    backbone_dtype,
    backbone_fingerprint,
    check_backbone,
    device_memory,
    planned_remat,
)
from jaxmux.peft import Adapter, is_adapter_folder, kind_of
from jaxmux.planner.costs.admission import Admission
from jaxmux.sharding import PlacedBackbone
from jaxmux.tasks import Task, TaskError

from .checkpoints import Checkpoints, RunPosition, array_specs
from .console import RunConsole
from .metrics import MetricsWriter
from .processes import Processes
from .recorder import Recorder, RunFiles
from .run_directory import FORMAT, RunDirectory
from .run_layout import RunLayout, choose_layout, load_beside, load_on, refuse_mesh
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

    Several processes train one run if each has joined the others (`jax.distributed.initialize`)
    and makes the same call. Process 0 alone reads and writes `run_dir` and prints progress; all
    need the backbone and the data.

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
      console: object that prints progress and results; None prints them to standard output. Of
        several processes, only process 0 uses it.

    Returns:
      The summary, which is also in `run_dir/summary.json`. `summary.succeeded` is True if every
      task succeeded.

    Raises:
      TaskError: there is no task, or a task cannot be trained. Nothing has been trained by this
        call.
      BackboneError, DataError, PlanningError, RunDirectoryError: the backbone, data, options or
        folder that the message names cannot be used. Nothing has been trained by this call.
      ProcessFailed: another process of this run has failed or ended.
      Interrupted: SIGINT or SIGTERM arrived during training; the state is saved. Signals are
        handled only if `fine_tune` runs in the main thread.
    """
    processes = Processes()
    console = console or RunConsole(log_every=options.log_every)
    if not processes.is_first:
        console = RunConsole.silent()
    with StopSignals() as stop, processes, processes.noticing_failures(), ExitStack() as stack:
        backbone = processes.together(lambda: _check_arguments(backbone, tasks, run_dir, restart))
        processes.refuse_differences(_described(tasks, options, restart))
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
        directory = processes.on_first(lambda: RunDirectory(run_dir, identity, restart=restart))
        if directory:
            stack.enter_context(closing(directory))
        # Everything is read and checked before the backbone is loaded.
        inputs = processes.together(lambda: _read_inputs(backbone, tasks, options, directory))
        processes.refuse_differences(inputs.fingerprints)
        processes.on_first(lambda: directory.refuse_changes(inputs.fingerprints))
        finished = None if restart else _finished_summary(directory, console)
        if finished := processes.agree(finished):
            if directory:
                console.say(f"{directory.path}: this run has finished; --restart trains it anew")
                console.summarise(finished, directory, inputs.config)
            return finished
        results = _train_tasks(
            backbone, inputs, options, directory, config_text, processes, console, stop
        )
        if results.adapters and processes.is_first:
            _complete_prompts(backbone, inputs, results, options, console)
        if directory:
            console.summarise(results.summary, directory, inputs.config)
        return processes.agree(results.summary)


def _check_arguments(
    backbone: str | Path, tasks: Sequence[Task], run_dir: str | Path, restart: bool
) -> str:
    """Checks the arguments of `fine_tune`; returns the path of the backbone's folder."""
    folder = str(Path(resolve_backbone(backbone)).absolute())
    if not tasks:
        raise TaskError("no tasks to train")
    check_names(tasks)
    _refuse_own_adapters(tasks, Path(run_dir), restart)
    return folder


def _described(tasks: Sequence[Task], options: RunOptions, restart: bool) -> dict[str, str]:
    """What all processes have to be given alike. Paths may differ, but not what lies there."""
    settings = {f.name: getattr(options, f.name) for f in dataclasses.fields(RunOptions)}
    described: dict[str, Any] = {
        "options": settings | {"restart": restart},
        "versions": installed_versions("jaxmux", "jax", "jaxlib"),
    }
    for task in tasks:
        fields = _identity(task)
        del fields["data"], fields["eval_data"]
        described[f"settings of task {task.name!r}"] = fields
    return {w: json.dumps(value, sort_keys=True, default=str) for w, value in described.items()}


class _Inputs(NamedTuple):
    """What a training run reads before it begins.

    Attributes:
      config: configuration of the backbone.
      tokenizer: the backbone's tokenizer.
      prepared: the tasks.
      fingerprints: hashes of the backbone and of the data, by what they describe.
    """

    config: BackboneConfig
    tokenizer: Any
    prepared: list[PreparedTask]
    fingerprints: dict[str, str]


def _read_inputs(
    backbone: str, tasks: Sequence[Task], options: RunOptions, directory: RunDirectory | None
) -> _Inputs:
    """Reads and checks everything but the backbone's weights."""
    config, tokenizer = BackboneConfig.from_folder(backbone), load_tokenizer(backbone)
    fingerprints = {"backbone": backbone_fingerprint(backbone)}
    if directory:
        # Another backbone is said at once, before the data is read.
        directory.refuse_changes(fingerprints)
    check_backbone(backbone)
    options.reserved(config)
    if options.mesh != AUTO_MESH:
        refuse_mesh(options.deployment, config)
    prepared = [prepare_task(task, config, tokenizer, fingerprints["backbone"]) for task in tasks]
    for task in prepared:
        fingerprints |= task.fingerprints
        if options.row_len is not None:
            task.refuse_rows_of(options.row_len)
    return _Inputs(config, tokenizer, prepared, fingerprints)


class _Results(NamedTuple):
    """What training gives.

    Attributes:
      summary: the summary.
      adapters: by name, the adapters of the tasks that have a prompt and succeeded.
      model: the backbone on the devices.
    """

    summary: Summary
    adapters: dict[str, Adapter]
    model: Backbone | list[PlacedBackbone]


def _train_tasks(
    backbone: str,
    inputs: _Inputs,
    options: RunOptions,
    directory: RunDirectory | None,
    config_text: str | None,
    processes: Processes,
    console: RunConsole,
    stop: StopSignals,
) -> _Results:
    """Trains the tasks, from the choice of the devices to the exported adapters."""
    config, prepared = inputs.config, inputs.prepared
    console.announce(prepared, config)
    if processes.count > 1:
        # What the devices keep has to be the same everywhere.
        memory = options.memory or processes.least(device_memory())
        options = dataclasses.replace(options, memory_gib=memory and memory / 2**30)
    layout = processes.agree(
        processes.on_first(
            lambda: choose_layout(prepared, config, options, directory.shapes, console)
        )
    )
    engine_options = EngineOptions(
        layout.shape,
        options.reserved(config),
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
        model = processes.together(lambda: load_on(layout.deployment, backbone, dtype, config))
        admission, *others = layout.admissions or (None,)
        engine = Engine(model, engine_options, admission, programs, others)
        engine.register_tasks(prepared)
        engine.refuse_implementations()
        checkpoints = processes.on_first(
            lambda: _begin(directory, inputs.fingerprints, layout, options, config_text, console)
        )
        if checkpoints:
            stack.enter_context(closing(checkpoints))
        stack.enter_context(closing(engine))
        position = _restore(engine, checkpoints, processes, console)
        files = None
        if checkpoints:
            metrics = stack.enter_context(closing(MetricsWriter(directory, position, console.say)))
            files = RunFiles(directory, checkpoints, metrics)
        recorder = Recorder(engine, files, position, processes, console)
        seconds = _train(engine, recorder, options.checkpoint_every, processes, console, stop)
        succeeded = [n for n in engine.names if engine.progress(n).status == "succeeded"]
        _evaluate(engine, succeeded, "eval_loss")
        summary = recorder.finish(
            succeeded,
            seconds,
            predicted_memory_bytes=_predicted_memory(engine, admission),
            predicted_round_seconds=layout.round_seconds,
        )
        adapters = {p.task.name: engine.adapter(p.task.name) for p in _with_prompts(engine)}
    return _Results(summary, adapters, model)


def _begin(
    directory: RunDirectory,
    fingerprints: Mapping[str, str],
    layout: RunLayout,
    options: RunOptions,
    config_text: str | None,
    console: RunConsole,
) -> Checkpoints:
    """Begins to write the run directory; returns its checkpoints."""
    console.announce_restart(directory)
    directory.begin(fingerprints, layout.added_to(directory.shapes), config_text)
    return Checkpoints(directory.checkpoints, options.keep_checkpoints, console.say)


def _refuse_own_adapters(tasks: Sequence[Task], run_dir: Path, restart: bool) -> None:
    """TaskError if a task begins with an adapter that `restart` would delete."""
    for task in tasks:
        source = task.resume_from
        if restart and source and Path(source).resolve().is_relative_to(run_dir.resolve()):
            raise TaskError(
                f"task {task.name!r}: restart would delete {source}, with which the task begins; "
                "copy it to another place, or choose another run_dir"
            )


def _finished_summary(directory: RunDirectory | None, console: RunConsole) -> Summary | None:
    """The summary of a finished training run whose results are all there; None otherwise."""
    if directory is None or directory.extended or not directory.summary.exists():
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


def _restore(
    engine: Engine, checkpoints: Checkpoints | None, processes: Processes, console: RunConsole
) -> RunPosition:
    """Restores the newest checkpoint; without one, measures the losses before training."""
    specs = array_specs(engine)
    found = processes.on_first(lambda: checkpoints.newest(specs))
    # The arrays travel by themselves, task by task.
    described = processes.agree(found and found._replace(arrays={}))
    if described is None:
        _evaluate(engine, engine.names, "eval_loss_first")
        return RunPosition()
    own = found.arrays if found else dict.fromkeys(specs)
    arrays = {name: processes.share_arrays(own[name], specs[name]) for name in specs}
    described._replace(arrays=arrays).restore(engine)
    if not engine.finished:
        console.say(f"going on from the checkpoint after round {engine.rounds}")
    return described.position


def _train(
    engine: Engine,
    recorder: Recorder,
    checkpoint_every: int,
    processes: Processes,
    console: RunConsole,
    stop: StopSignals,
) -> float | None:
    """Trains until every task has ended, and records the progress. Returns the median seconds from
    one round to the next, in the later half of the rounds; None if there were too few."""
    ends: list[float] = []
    # The number of the signal that stops all processes.
    signal = 0

    def stopped() -> bool:
        nonlocal signal
        signal = signal or processes.stop_number(stop.number)
        return bool(signal)

    console.start(engine)
    try:
        with stop.deferred(console.say):
            while not engine.finished:
                saves = (engine.rounds + 1) % checkpoint_every == 0
                recorder.record(engine.train_round(stopped, stream=not saves))
                ends.append(time.monotonic())
                if stopped():
                    recorder.save()
                    recorder.wait()
                    # No process leaves before the checkpoint is on disk.
                    processes.gather(None)
                    raise Interrupted(signal, saved=True)
                if engine.rounds % checkpoint_every == 0:
                    recorder.save()
                processes.end_round()
            recorder.save()
    finally:
        console.stop()
    later = ends[len(ends) // 2 :]
    return statistics.median(map(operator.sub, later[1:], later)) if len(later) > 2 else None


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


def _with_prompts(engine: Engine) -> list[PreparedTask]:
    """The tasks with a prompt that is completed after training, if they succeeded."""
    return [
        p
        for p in map(engine.prepared, engine.names)
        if p.task.sample_prompt is not None and engine.progress(p.task.name).status == "succeeded"
    ]


def _complete_prompts(
    backbone: str, inputs: _Inputs, results: _Results, options: RunOptions, console: RunConsole
) -> None:
    """Completes the tasks' prompts with the bare backbone and with their adapters."""
    model, adapters = results.model, results.adapters
    if not isinstance(model, Backbone):
        model = load_beside(backbone, backbone_dtype(options.dtype), inputs.config)
    if model is None:
        console.say("sample_prompt: one device has no memory for the whole backbone")
        return
    tasks = [p.task for p in inputs.prepared if p.task.name in adapters]
    before = [Request(task.sample_prompt) for task in tasks]
    after = [Request(task.sample_prompt, task.adapter, adapters[task.name]) for task in tasks]
    texts = complete(model, inputs.tokenizer, before + after, max_new_tokens=options.sample_tokens)
    for task, old, new in zip(tasks, texts, texts[len(tasks) :], strict=False):
        console.samples(task.name, task.sample_prompt, old, new)


def _identity(task: Task) -> dict[str, Any]:
    """The entry of a task in run.json."""
    fields = dataclasses.asdict(task)
    del fields["name"], fields["sample_prompt"]
    adapter = {"kind": kind_of(task.adapter).name, **fields["adapter"]}
    optimizer = {"kind": task.optimizer.kind, **fields["optimizer"]}
    return fields | {"adapter": adapter, "optimizer": optimizer}
