"""The command `jaxmux eval`: compares adapters with the bare backbone on held-out data."""

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from jaxmux.atomic_files import holds_object, require_output, write_atomically
from jaxmux.engine.tasks.prepared_task import Loaded, read_held_out
from jaxmux.evaluation import EvalCase, HeldOutData, losses_of, matches_of
from jaxmux.models import Backbone, BackboneConfig
from jaxmux.objectives import ACCURACY, SFT
from jaxmux.runs.metrics import finite_or_none
from jaxmux.tasks import Task

from .held_out_cases import read_cases
from .plan_tables import NumberTable
from .report_console import report_console

# The keys of the file with the results.
_KEYS = ("backbone", "limit", "results")
_WHICH = "backbone", "adapter"


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code, 0. Raises InputError for unusable input."""
    if options.out:
        require_output(options.out, "evaluation", partial(holds_object, keys=_KEYS))
    folder, backbone, cases = read_cases(options, _held_out_data)
    results = _results(cases, backbone, options)
    _show(results)
    if options.out:
        text = dict(zip(_KEYS, (folder, options.limit, results), strict=True))
        write_atomically(options.out, json.dumps(text, indent=2) + "\n")
    return 0


def _held_out_data(
    task: Task, config: BackboneConfig, tokenizer: Any, loaded: Loaded
) -> Iterator[HeldOutData]:
    samples = read_held_out(task, config, tokenizer, loaded)
    yield HeldOutData(_name_of_data(task), samples, task.objective)


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
