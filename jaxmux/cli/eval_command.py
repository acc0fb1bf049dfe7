"""The command `jaxmux eval`: compares adapters with the bare backbone on held-out data."""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from jaxmux.atomic_files import holds_object, require_output, write_atomically
from jaxmux.engine.tasks.prepared_task import Loaded, read_held_out
from jaxmux.evaluation import EvalCase, HeldOutData, losses_of, matches_of
from jaxmux.models import Backbone, BackboneConfig
from jaxmux.runs.metrics import finite_or_none
from jaxmux.tasks import Task

from .held_out_cases import read_cases
from .plan_tables import NumberTable
from .report_console import report_console

# The keys of the file with the results.
_KEYS = ("backbone", "limit", "results")


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
    yield HeldOutData(_name_of_data(task), read_held_out(task, config, tokenizer, loaded))


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
            "samples": len(case.samples),
            "target_tokens": case.target_tokens,
            "compared": match and match.compared,
        }
        for which in ("backbone", "adapter"):
            mean = getattr(loss, which)
            equal = match and match.compared and getattr(match, which) / match.compared
            result[which] = {
                "loss": finite_or_none(mean),
                "perplexity": finite_or_none(math.exp(mean) if mean < 700 else math.inf),
                "exact_match": equal if match and match.compared else None,
            }
        results.append(result)
    return results


def _show(results: Sequence[dict[str, Any]]) -> None:
    several = len({result["data"] for result in results}) > 1
    # The data are named in rows below their task, so that both get the full width of the column.
    name = "task, data" if several else "task"
    table = NumberTable(name, "samples", "loss", "perplexity", "exact\nmatch")
    table.caption, table.caption_justify = "backbone → adapter", "left"
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
                _pair(result, "exact_match", ".0%"),
            )
    report_console().print(table)


def _pair(result: dict[str, Any], field: str, form: str) -> str:
    values = [result[which][field] for which in ("backbone", "adapter")]
    if values == [None, None]:
        return "–"
    return " → ".join("–" if value is None else format(value, form) for value in values)
