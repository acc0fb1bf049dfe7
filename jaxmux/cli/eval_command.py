"""The command `jaxmux eval`: compares adapters with the bare backbone on held-out data."""

import argparse
import dataclasses
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from jaxmux.atomic_files import holds_object, require_output, write_atomically
from jaxmux.data import Source, load_tokenizer
from jaxmux.data.chat_templates import TemplateClock
from jaxmux.engine.tasks.prepared_task import Loaded, read_held_out
from jaxmux.evaluation import EvalCase, losses_of, matches_of
from jaxmux.installation import resolve_path
from jaxmux.models import Backbone, checkpoint_tensors, load_backbone, resolve_backbone
from jaxmux.objectives import ACCURACY, SFT
from jaxmux.peft import adapter_tokenizer, import_adapter, is_adapter_folder
from jaxmux.peft.peft_folder import tokenizer_key
from jaxmux.runs import RunDirectoryError, read_record
from jaxmux.runs.metrics import finite_or_none
from jaxmux.runs.run_directory import begun_of, lock_state, without_adapter
from jaxmux.specifications.reading import from_json
from jaxmux.tasks import LONGEST_NAME, Task, TaskError

from .plan_tables import NumberTable
from .report_console import report_console

# The keys of the file with the results.
_KEYS = ("backbone", "limit", "results")
_WHICH = "backbone", "adapter"


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code, 0. Raises InputError for unusable input."""
    if options.out:
        require_output(options.out, "evaluation", partial(holds_object, keys=_KEYS))
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
        spec, weights = imported(adapter)
        reference = None
        if task.objective.needs_reference and task.resume_from:
            reference = imported(resolve_path(task.resume_from))
        task, reader = dataclasses.replace(task, adapter=spec), tokenizer
        adapted_tokenizer = adapter_tokenizer(adapter, tokenizer)
        has_own_tokens = tokenizer_key(adapted_tokenizer)[0] != tokenizer_key(tokenizer)[0]
        if adapted_tokenizer is not tokenizer and (options.data or has_own_tokens):
            # If a source named a template, its records that are not chats would be refused.
            task, reader = _with_template(task, None), adapted_tokenizer
        elif adapted_tokenizer is not tokenizer:
            task = _with_template(task, adapted_tokenizer.chat_template)
        for evaluated in _with_data(task, options.data):
            known = loaded[tokenizer_key(reader)]
            with TemplateClock(begun):
                samples = read_held_out(evaluated, backbone.config, reader, known)
            limit = options.limit and options.limit * task.objective.members
            cases.append(
                EvalCase(
                    task.name,
                    _name_of_data(evaluated),
                    spec,
                    weights,
                    samples[:limit],
                    reader,
                    task.objective,
                    reference,
                )
            )
    results = _results(cases, backbone, options)
    _show(results)
    if options.out:
        text = dict(zip(_KEYS, (folder, options.limit, results), strict=True))
        write_atomically(options.out, json.dumps(text, indent=2) + "\n")
    return 0


_Adapters = Sequence[tuple[Task, Path]]


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
    for name in names:
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
    adapters = []
    for adapter in options.adapter:
        # Names of folders may have characters that names of tasks must not have.
        shown = re.sub(r"[^A-Za-z0-9._-]", "_", Path(adapter).resolve().name)
        name = shown.lstrip("._-")[:LONGEST_NAME] or "adapter"
        task = Task(name, options.data[0], max_length=options.max_length, steps=1)
        adapters.append((task, Path(adapter)))
    return resolve_backbone(options.backbone), options.dtype, options.backbone_format, adapters


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
    for file in files:
        source = dataclasses.replace(like, path=resolve_path(file), **_WHOLE_FILE)
        yield dataclasses.replace(
            task, eval_data=source, validation_fraction=None, eval_every=None, **_UNSET
        )


# Fields of a source that limit or repeat its samples in training; reset for evaluation.
_WHOLE_FILE = {"split": "train", "max_samples": None, "repeat": None, "weight": None}
# Fields of a task that are only permitted with `eval_every`.
_UNSET = {"keep_best": False, "patience": None, "validation_seed": None}


def _name_of_data(task: Task) -> str:
    if task.eval_data:
        return Path(task.eval_data.path).name
    return f"{task.validation_fraction:.3g} of its data"


def _results(
    cases: Sequence[EvalCase], backbone: Backbone, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One JSON object for each case. Numbers that are not finite or were not measured are None."""
    losses = losses_of(cases, backbone)
    matches: Sequence[Any] = [None] * len(cases)
    if options.max_new_tokens != 0:
        matches = matches_of(cases, backbone, options.max_new_tokens)
    results = []
    for case, loss, match in zip(cases, losses, matches, strict=True):
        result = {
            "task": case.task,
            "data": case.data,
            "objective": case.objective.kind,
            "samples": case.records,
            "target_tokens": case.target_tokens,
            "compared": match and match.compared,
        }
        is_cross_entropy = case.objective.kind == SFT.kind
        for which in _WHICH:
            measured = getattr(loss, which)
            equal = match and match.compared and getattr(match, which) / match.compared
            result[which] = {
                "loss": finite_or_none(measured.loss),
                "perplexity": _perplexity(measured.loss) if is_cross_entropy else None,
                "exact_match": equal if match and match.compared else None,
            }
            if measured.metrics:
                result[which]["metrics"] = finite_or_none(measured.metrics)
        results.append(result)
    return results


def _perplexity(mean: float) -> float | None:
    return finite_or_none(math.exp(mean) if mean < 700 else math.inf)


def _show(results: Sequence[dict[str, Any]]) -> None:
    several = len({result["data"] for result in results}) > 1
    # The data are named in rows below their task, so that both get the full width of the column.
    name = "task, data" if several else "task"
    pairs = any(ACCURACY in result["adapter"].get("metrics", ()) for result in results)
    count, right = ("samples,\npairs", ["pairs\nright"]) if pairs else ("samples", [])
    table = NumberTable(name, count, "loss", "perplexity", *right, "exact\nmatch")
    table.caption, table.caption_justify = "backbone → adapter", "left"
    if pairs:
        table.caption += f"\n{_OF_PAIRS}"
    for task, of_task in groupby(results, key=lambda result: result["task"]):
        if several:
            table.add_section()
            table.add_row(task)
        for result in of_task:
            table.add_row(
                f"  {result['data']}" if several else task,
                f"{result['samples']:,}",
                _pair(result, "loss", ".4f"),
                _pair(result, "perplexity", ".4g"),
                *([_right(result)] if pairs else []),
                _pair(result, "exact_match", ".0%"),
            )
    report_console().print(table)


# What the table shows of tasks with pairs.
_OF_PAIRS = (
    "of pairs: the loss is the value of the task's objective; right are those whose chosen answer "
    "has the higher reward, with DPO compared with the adapter that training began with (of the "
    "backbone itself no pair is right); a match is a completion equal to the chosen answer"
)


def _right(result: dict[str, Any]) -> str:
    return _shown(result[which].get("metrics", {}).get(ACCURACY) for which in _WHICH)


def _pair(result: dict[str, Any], field: str, form: str) -> str:
    return _shown((result[which][field] for which in _WHICH), form)


def _shown(found: Iterable[float | None], form: str = ".0%") -> str:
    values = list(found)
    if values == [None, None]:
        return "–"
    return " → ".join("–" if value is None else format(value, form) for value in values)
