"""The command `jaxmux score`: log-probabilities of data under the bare backbone and adapters."""

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxmux.atomic_files import holds_object, opened_atomically, require_output
from jaxmux.data import Samples
from jaxmux.data.preferences import holds_pairs
from jaxmux.engine.tasks.prepared_task import Loaded, read_held_out_by_source
from jaxmux.evaluation import EvalCase, HeldOutData, Score, scores_of
from jaxmux.models import BackboneConfig
from jaxmux.objectives import DPO, SFT
from jaxmux.planner.numbers import numbered
from jaxmux.printable import escaped
from jaxmux.runs.metrics import finite_or_none
from jaxmux.tasks import Task

from .held_out_cases import read_cases

# Keys of every line.
_KEYS = ("adapter", "data", "record", "log_prob", "target_tokens", "mean")


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code, 0. Raises InputError for unusable input."""
    if options.out:
        require_output(options.out, "file of scores", partial(holds_object, keys=_KEYS))
    said: set[str] = set()
    read = partial(_held_out_data, are_named=bool(options.data), said=said)
    _, backbone, cases = read_cases(options, read)
    names, lines = _names(cases), 0
    with (
        closing(scores_of(cases, backbone)) as scores,
        opened_atomically(options.out) if options.out else nullcontext(sys.stdout) as file,
    ):
        for score in scores:
            line = _line(score, names[score.held_out.name], options.tokens)
            file.write(json.dumps(line) + "\n")
            lines += 1
    if options.out:
        print(f"{numbered(lines, 'line')} -> {options.out}", file=sys.stderr)
    return 0


def _held_out_data(
    task: Task,
    config: BackboneConfig,
    tokenizer: Any,
    loaded: Loaded,
    *,
    are_named: bool,
    said: set[str],
) -> Iterator[HeldOutData]:
    """The data of each held-out source. Prints what is cut or left out, unless it is in `said`.
    `are_named` tells whether the user has named the file, which may then hold other records than
    those of the task's objective."""
    if are_named:
        pairs, of_task = holds_pairs(task.eval_data), task.objective
        if pairs != (of_task.members == 2) or of_task.rollouts:
            task = dataclasses.replace(task, objective=DPO() if pairs else SFT())
    for source, samples in read_held_out_by_source(task, config, tokenizer, loaded):
        for text in _left_out(samples, task.max_length):
            if (line := f"{source.path}: {text}") not in said:
                said.add(line)
                print(escaped(line), file=sys.stderr)
        yield HeldOutData(source.path, samples.samples, task.objective)


def _left_out(samples: Samples, max_length: int) -> Iterator[str]:
    def counted(count: int, noun: str) -> str:
        return f"{numbered(count, noun)} {'is' if count == 1 else 'are'}"

    length = f"{max_length:,} tokens (max_length)"
    if samples.truncated:
        yield f"{counted(samples.truncated, 'sample')} cut to {length}"
    if samples.dropped:
        yield f"{counted(samples.dropped, 'record')} left out, longer than {length}"
    if samples.skipped:
        skipped = counted(samples.skipped, "record")
        yield f"{skipped} left out, the first because of {samples.first_skipped}"


def _names(cases: list[EvalCase]) -> dict[str, str]:
    """By path, the name of each file; the path itself if several files have the name."""
    paths = {case.held_out.name for case in cases}
    counts = Counter(Path(path).name for path in paths)
    return {path: name if counts[name := Path(path).name] == 1 else path for path in paths}


def _line(score: Score, data: str, with_tokens: bool) -> dict[str, Any]:
    sample, log_probs = score.sample, score.log_probs
    record, answer = sample.sample_id, {}
    if score.held_out.are_pairs:
        record, member = divmod(record, 2)
        answer = {"answer": ("chosen", "rejected")[member]}
    total = float(log_probs[sample.target_mask[1:]].sum(dtype=np.float64))
    line = {
        "adapter": score.adapter,
        "data": data,
        "record": record,
        **answer,
        "log_prob": finite_or_none(total),
        "target_tokens": sample.target_tokens,
        "mean": finite_or_none(total / sample.target_tokens),
    }
    if with_tokens:
        line |= {
            "tokens": sample.input_ids.tolist(),
            "targets": sample.target_mask.tolist(),
            "log_probs": [None, *map(finite_or_none, log_probs.tolist())],
        }
    return line
