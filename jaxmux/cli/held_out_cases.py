"""Reads the backbone, the adapters and the held-out data of `jaxmux eval` and `jaxmux score`."""

import argparse
import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from jaxmux.data import Source, load_tokenizer
from jaxmux.data.chat_templates import TemplateClock
from jaxmux.engine.tasks.prepared_task import Loaded
from jaxmux.evaluation import EvalCase, HeldOutData
from jaxmux.installation import resolve_path
from jaxmux.models import (
    Backbone,
    BackboneConfig,
    checkpoint_tensors,
    load_backbone,
    resolve_backbone,
)
from jaxmux.objectives import LOSS
from jaxmux.peft import adapter_tokenizer, import_adapter, is_adapter_folder
from jaxmux.peft.peft_folder import tokenizer_key
from jaxmux.runs import RunDirectoryError, read_record
from jaxmux.runs.run_directory import begun_of, lock_state, without_adapter
from jaxmux.specifications.reading import from_json
from jaxmux.tasks import LONGEST_NAME, Task, TaskError

# Reads the held-out data of a task. `Loaded` is the cache for its tokenizer.
ReadHeldOut = Callable[[Task, BackboneConfig, Any, Loaded], Iterable[HeldOutData]]


def read_cases(
    options: argparse.Namespace, read: ReadHeldOut
) -> tuple[str, Backbone, list[EvalCase]]:
    """Reads what the options name: --run_dir and --task, or --backbone, --adapter and --max_length,
    and for both --data and --limit. Without adapters the bare backbone is the only case.

    Returns:
      The backbone's folder, the backbone, and a case for each data set that `read` yields for each
      adapter, with the first --limit records.

    Raises:
      InputError: something cannot be read, or a task has no held-out data.
    """
    folder, dtype, form, adapters = (_of_run if options.run_dir else _of_options)(options)
    backbone, tokenizer = load_backbone(folder, dtype, form), load_tokenizer(folder)
    base = checkpoint_tensors(folder, backbone.compute_dtype, form)
    # Chat templates that write the date use the date of training.
    begun = begun_of(read_record(Path(options.run_dir))) if options.run_dir else datetime.now()
    # The data that has been read, by tokenizer.
    cases, loaded = [], defaultdict(Loaded)
    imported = partial(
        import_adapter,
        config=backbone.config,
        base_fingerprint=backbone.fingerprint,
        base=base,
        base_model=str(folder),
    )
    for task, adapter in adapters:
        name, spec, weights, reference, reader = None, None, None, None, tokenizer
        if adapter is not None:
            spec, weights = imported(adapter)
            if task.objective.needs_reference and task.resume_from:
                reference = imported(resolve_path(task.resume_from))
            name, task = task.name, dataclasses.replace(task, adapter=spec)
            adapted_tokenizer = adapter_tokenizer(adapter, tokenizer)
            has_own_tokens = tokenizer_key(adapted_tokenizer)[0] != tokenizer_key(tokenizer)[0]
            if adapted_tokenizer is not tokenizer and (options.data or has_own_tokens):
                # If a source named a template, its records that are not chats would be refused.
                task, reader = _with_template(task, None), adapted_tokenizer
            elif adapted_tokenizer is not tokenizer:
                task = _with_template(task, adapted_tokenizer.chat_template)
        for evaluated in _with_data(task, options.data):
            known = loaded[tokenizer_key(reader)]
            try:
                with TemplateClock(begun):
                    data = list(read(evaluated, backbone.config, reader, known))
            except TaskError as e:
                # The user has named no task.
                raise (e.__cause__ if adapter is None and e.__cause__ else e) from None
            for held_out in data:
                most = options.limit and options.limit * held_out.objective.members
                held_out = held_out._replace(samples=held_out.samples[:most])
                cases.append(EvalCase(name, held_out, spec, weights, reader, reference))
    return folder, backbone, cases


# Tasks with the folders of their adapters; None for the bare backbone.
_Adapters = Sequence[tuple[Task, Path | None]]


def _of_run(options: argparse.Namespace) -> tuple[str, str, str | None, _Adapters]:
    """The backbone's folder, dtype and format, and the adapters with their tasks, from a run
    directory."""
    run_dir = Path(options.run_dir)
    record = read_record(run_dir)
    folders = {name: run_dir / "adapters" / name for name in record["tasks"]}
    # Without --task, failed tasks are left out.
    names = options.task or [name for name in folders if is_adapter_folder(folders[name])]
    if not names:
        raise without_adapter(run_dir)
    adapters = []
    for name in dict.fromkeys(names):
        if name not in record["tasks"]:
            known = ", ".join(record["tasks"])
            raise RunDirectoryError(f"{run_dir}: no task {name!r}; its tasks are {known}")
        if not is_adapter_folder(folder := folders[name]):
            ends = str(lock_state(run_dir))
            raise RunDirectoryError(
                f"{folder}: no adapter, so the task has not succeeded{ends and f' ({ends})'}; "
                "`jaxmux export` writes those of unfinished tasks, which --backbone with --adapter "
                "evaluates"
            )
        try:
            task = from_json({"name": name, **record["tasks"][name]})
        except (KeyError, TypeError, ValueError) as e:
            raise RunDirectoryError(
                f"{run_dir / 'run.json'}: damaged (task {name!r}: {e})"
            ) from None
        adapters.append((task, folder))
    return record["backbone"], record["dtype"], record.get("backbone_format"), adapters


def _of_options(options: argparse.Namespace) -> tuple[str, str, str | None, _Adapters]:
    """Like `_of_run`, from --backbone and --adapter."""
    folders: dict[str, Path | None] = {}
    for option in options.adapter or ():
        given, is_named, path = option.partition("=")
        folder = Path(path if is_named else option)
        # Names of folders may have characters that names of tasks must not have.
        shown = re.sub(r"[^A-Za-z0-9._-]", "_", given if is_named else folder.resolve().name)
        name = shown.lstrip("._-")[:LONGEST_NAME] or "adapter"
        if name in folders:
            raise TaskError(
                f"--adapter: {folders[name]} and {folder} have the name {name!r}; give one of them "
                f"another name: --adapter=NAME={folder}"
            )
        folders[name] = folder
    tasks = [
        (Task(name, options.data[0], max_length=options.max_length, steps=1), folder)
        for name, folder in (folders or {"backbone": None}).items()
    ]
    return resolve_backbone(options.backbone), options.dtype, options.backbone_format, tasks


def _with_template(task: Task, template: str | None) -> Task:
    """Sets the chat template of the sources that use the template of the training data. `template`
    is the one in the adapter's folder; None removes the template. The file that the task names may
    have changed since training."""
    named = next((source.chat_template for source in task.sources if source.chat_template), None)

    def changed(source: Source) -> Source:
        is_named = named is not None and source.chat_template == named
        return dataclasses.replace(source, chat_template=template) if is_named else source

    held_out = task.eval_data and changed(task.eval_data)
    return dataclasses.replace(task, data=tuple(map(changed, task.sources)), eval_data=held_out)


def _with_data(task: Task, files: Sequence[str] | None) -> Iterator[Task]:
    """Yields the task with each of the held-out files, or with its own held-out data."""
    if not files:
        if not task.eval_data and task.validation_fraction is None:
            raise TaskError(
                f"task {task.name!r}: has neither eval_data nor validation_fraction; name held-out "
                "records with --data"
            )
        yield task
        return
    # Fields and loss masks are those of the task's data.
    like: Source = task.eval_data or task.sources[0]
    for file in dict.fromkeys(files):
        source = dataclasses.replace(like, path=resolve_path(file), **_WHOLE_FILE)
        yield dataclasses.replace(
            task, eval_data=source, validation_fraction=None, eval_every=None, **_UNSET
        )


# Fields of a source that limit or repeat its samples in training; reset for evaluation.
_WHOLE_FILE = {"split": "train", "max_samples": None, "repeat": None, "weight": None}
# Fields of a task that are only permitted with `eval_every`, or with its objective.
_UNSET = {"keep_best": False, "patience": None, "validation_seed": None}
_UNSET |= {"best_metric": LOSS, "stop_when": None}
