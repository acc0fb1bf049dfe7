"""A training run, from a backbone's folder and tasks to exported adapters."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from jaxmux.generation import Request, complete
from jaxmux.models import Backbone, backbone_dtype
from jaxmux.peft import is_adapter_folder
from jaxmux.sweeps import Sweep, expanded, sweeps_of
from jaxmux.tasks import Task

from .console import RunConsole, StartTimeline
from .metrics import json_line
from .processes import Processes, StopSignals
from .run_directory import RunDirectory
from .run_inputs import RunInputs, check_arguments, described, identity_of, read_inputs
from .run_layout import load_beside
from .run_options import RunOptions
from .summary import Summary
from .trackers import refuse_missing
from .training import Results, Training

DEFAULTS = RunOptions()


def fine_tune(
    backbone: str | Path,
    tasks: Sequence[Task | Sweep],
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
    its summary. In the folder of an earlier call, the following must not change: the backbone, the
    tasks (except `sample_prompt`), and the options dtype, tokens_per_microbatch, row_len, chunk_len
    and max_sequences. All other options may change.

    Several processes train one run if each has joined the others (`jax.distributed.initialize`) and
    makes the same call. Process 0 alone reads and writes `run_dir` and prints progress; all need
    the backbone and the data.

    A task fails if too many consecutive updates are not finite (`options.max_bad_steps`). The
    training of the other tasks continues.

    Args:
      backbone: Hugging Face checkpoint folder with config.json, safetensors and a tokenizer. A path
        may begin with "jaxmux:" for a folder that ships with jaxmux.
      tasks: the tasks to train, at least one, with different names. A `Sweep` stands for the tasks
        of all its configurations.
      run_dir: folder of the training run. It gets metrics.jsonl (one line for each task and round,
        which is one global batch of every task), held_out.jsonl, rounds.jsonl (one line for each
        round), samples.jsonl (one line for each completion of a `sample_prompt`), the files of
        trackers such as tensorboard, checkpoints, adapters/<task> (Hugging Face PEFT folders of the
        tasks that have an adapter), loss.png, summary.json, run.json (the record of what is
        trained), and for sweeps sweep.json and sweep.png.
      options: sizes of microbatches, memory, checkpoints and other settings.
      restart: whether to delete the files that an earlier training run wrote to `run_dir`, and
        start anew.
      config_text: text of a gin config that is kept as `run_dir/config.gin`; None keeps none.
      console: object that prints progress and results; None prints them to standard output. Of
        several processes, only process 0 uses it.

    Returns:
      The summary, which is also in `run_dir/summary.json`. `summary.succeeded` is True if no task
      failed.

    Raises:
      TaskError: there is no task, or a task cannot be trained. Nothing has been trained by this
        call.
      BackboneError, DataError, PlanningError, RunDirectoryError: the backbone, data, options or
        folder that the message names cannot be used. Nothing has been trained by this call.
      ProcessFailed: another process of this run has failed or ended.
      Interrupted: SIGINT or SIGTERM arrived during training; the state is saved. Signals are
        handled only if `fine_tune` runs in the main thread.
    """
    sweeps, tasks = sweeps_of(tasks), expanded(tasks)
    processes = Processes()
    console = console or RunConsole(log_every=options.log_every)
    if not processes.is_first:
        console = RunConsole.silent()
    with StopSignals() as stop, processes, processes.noticing_failures(), ExitStack() as stack:
        timeline = stack.enter_context(StartTimeline())
        backbone = processes.together(lambda: check_arguments(backbone, tasks, run_dir, restart))
        processes.refuse_differences(described(tasks, sweeps, options, restart))
        processes.on_first(lambda: refuse_missing(options.trackers))
        identity = identity_of(backbone, tasks, sweeps, options)
        directory = processes.on_first(lambda: RunDirectory(run_dir, identity, restart=restart))
        if directory:
            stack.enter_context(directory)
            if directory.failure:
                console.say(f"{directory.path}: the process before failed: {directory.failure}")
        # Everything is read and checked before the backbone is loaded.
        begun = processes.agree(processes.on_first(lambda: directory.begun))
        inputs = processes.together(
            lambda: read_inputs(backbone, tasks, options, directory, begun, timeline)
        )
        processes.refuse_differences(inputs.fingerprints)
        processes.on_first(lambda: directory.refuse_changes(inputs.fingerprints))
        finished = None if restart else _finished_summary(directory, console)
        if finished := processes.agree(finished):
            if directory:
                console.say(f"{directory.path}: this run has finished; --restart trains it anew")
                console.summarise(finished, directory, inputs.config, sweeps)
                console.suggest(finished, directory, tasks, sweeps)
            return finished
        training = Training(
            backbone=backbone,
            inputs=inputs,
            sweeps=sweeps,
            options=options,
            directory=directory,
            config_text=config_text,
            processes=processes,
            console=console,
            stop=stop,
            timeline=timeline,
        )
        results = training.run()
        if results.adapters and processes.is_first:
            _complete_prompts(backbone, inputs, results, options, directory, console)
        if directory:
            console.summarise(results.summary, directory, inputs.config, sweeps)
            console.suggest(results.summary, directory, tasks, sweeps)
        return processes.agree(results.summary)


def _finished_summary(directory: RunDirectory | None, console: RunConsole) -> Summary | None:
    """The summary of a finished training run whose adapters all exist; None otherwise."""
    if directory is None or directory.extended or not directory.summary.exists():
        return None
    summary = Summary.load(directory.summary)
    if summary is None:
        console.say(f"{directory.summary}: damaged; it is written again")
        return None
    for name, task in summary.tasks.items():
        if task["status"] != "failed" and not is_adapter_folder(directory.adapter(name)):
            console.say(f"{directory.adapter(name)}: missing; it is exported again")
            return None
    return summary


def _complete_prompts(
    backbone: str,
    inputs: RunInputs,
    results: Results,
    options: RunOptions,
    directory: RunDirectory,
    console: RunConsole,
) -> None:
    """Completes the tasks' prompts with the bare backbone and with their adapters, and appends the
    completions to samples.jsonl."""
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
        done = results.summary.tasks[task.name]
        step = (task.keep_best and done["best_step"]) or done["steps"]
        with open(directory.samples, "ab") as file:
            for task_step, text in ((0, old), (step, new)):
                fields = {"task": task.name, "task_step": task_step}
                fields |= {"prompt": task.sample_prompt, "completion": text}
                file.write(json_line(fields | {"time": round(time.time(), 3)}))
