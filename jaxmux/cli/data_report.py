"""Describes the data of a config's tasks as values: counts, lengths, samples and rows."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxmux.data import Sample
from jaxmux.data.preferences import LABEL
from jaxmux.data.stored_samples import stream_lengths, target_tokens, token_counts
from jaxmux.engine.tasks.prepared_task import TaskData
from jaxmux.models import BackboneConfig
from jaxmux.objectives import Objective
from jaxmux.planner.packing import Placement, ShapeClass, pack_round, smallest_shape_class
from jaxmux.runs.task_warnings import of_labels, of_texts
from jaxmux.tasks import Task

_BINS = 8
# The samples of a pair, in their order, and labelled answers by their labels.
_ANSWERS, _LABELLED = ("chosen", "rejected"), ("undesirable", "desirable")


@dataclasses.dataclass(frozen=True)
class ShownSample:
    """A sample as the model sees it.

    Attributes:
      source: path of its source.
      number: number of the sample, or of its pair, in its source, from 1.
      answer: "chosen" or "rejected" of a pair, "desirable" or "undesirable" of a labelled answer;
        empty for other samples.
      tokens: ids of its tokens.
      targets: for each token, whether it counts in the loss.
      parts: its text in parts, each with whether its tokens count in the loss.
      at_max_length: whether it has `max_length` tokens, so that it may have been cut.
    """

    source: str
    number: int
    answer: str
    tokens: list[int]
    targets: list[bool]
    parts: list[tuple[str, bool]]
    at_max_length: bool


@dataclasses.dataclass(frozen=True)
class SourceReport:
    """Counts of one source of a task, without held-out records.

    Attributes:
      path: its path.
      records: number of records read.
      epoch_samples: number of samples or pairs in an epoch, including repeated ones.
      share: `epoch_samples` divided by the number for all sources together.
      epoch_tokens: number of tokens in these samples, without mismatched answers.
      target_share: fraction of these tokens that counts in the loss.
      truncated, dropped, bad_records, equal_answers: `truncated`, `dropped`, `skipped` and
        `equal_answers` of `Samples`.
      first_bad_record: the error of the first bad record; empty if there is none.
      unknown_targets: fraction of the tokens counting in the loss that the tokenizer does not know.
      cut_targets: fraction of the tokens counting in the loss that truncation removes.
    """

    path: str
    records: int
    epoch_samples: int
    share: float
    epoch_tokens: int
    target_share: float
    truncated: int
    dropped: int
    bad_records: int
    first_bad_record: str
    unknown_targets: float
    cut_targets: float
    equal_answers: int


@dataclasses.dataclass(frozen=True)
class AnswerLengths:
    """Numbers of target tokens of the chosen or of the rejected answers of an epoch, or of its
    desirable or undesirable ones, of which there are `count`."""

    count: int
    shortest: int
    mean: float
    median: float
    longest: int

    @classmethod
    def of(cls, tokens: np.ndarray) -> "AnswerLengths":
        return cls(
            len(tokens),
            int(tokens.min()),
            float(tokens.mean()),
            float(np.median(tokens)),
            int(tokens.max()),
        )


@dataclasses.dataclass(frozen=True)
class TaskReport:
    """Description of a task's training data.

    Attributes:
      objective: the kind of its objective.
      unit: "sample", "pair" or "answer", a labelled one; `samples`, `held_out` and `batch_size` are
        numbers of them.
      samples: number in an epoch.
      held_out: number that is held out.
      epochs: number of epochs in these steps.
      max_length: most tokens of a sample.
      longest: tokens of the longest sample, held-out samples included.
      context: most tokens of a sequence for which the backbone was made.
      histogram: triples (least tokens, most tokens, number of samples of an epoch). A pair has two
        samples, the prompt with each answer. Mismatched answers are left out.
      answers: lengths by "chosen" and "rejected", or by "desirable" and "undesirable" as far as
        there are such; empty without pairs and labels.
      longer_chosen: fraction of the pairs in which the chosen answer is the longer one; 0 without
        pairs.
      template_date: the time that a chat template has read, in ISO 8601; empty if none has read it.
        In training, templates read the time at which the run begins.
      warnings: the warnings of training about the texts and labels of the records.
      shown: the first samples or pairs of each source.
    """

    name: str
    objective: str
    unit: str
    samples: int
    held_out: int
    batch_size: int
    steps: int
    epochs: float
    max_length: int
    longest: int
    context: int
    histogram: list[tuple[int, int, int]]
    answers: dict[str, AnswerLengths]
    longer_chosen: float
    sources: list[SourceReport]
    template_date: str
    warnings: list[str]
    shown: list[ShownSample]


@dataclasses.dataclass(frozen=True)
class PackingReport:
    """The positions of the first global batches of all tasks in microbatches.

    Attributes:
      microbatches: number of microbatches of the first round.
      rows_used: number of their rows that hold samples.
      padding: fraction of the tokens of these rows that is padding. Rows without samples do not
        count, because training chooses microbatches that have few of them.
      rows: the samples of each row of the first microbatch that holds samples, in order: name of
        the task, offset in the row, and stream length.
    """

    shape: ShapeClass
    microbatches: int
    rows_used: int
    padding: float
    rows: list[list[tuple[str, int, int]]]


def report_task(
    task: Task, data: TaskData, config: BackboneConfig, tokenizer: Any, count: int
) -> TaskReport:
    """Describes the data of a task, with the first `count` samples or pairs of each source."""
    samples, objective = data.samples.samples, task.objective
    lengths = token_counts(objective.trained(samples))
    held_out = token_counts(data.eval_samples)
    shown = [
        _shown(sample, source.path, n, objective, tokenizer, task.max_length)
        for source, source_data in zip(task.sources, data.sources, strict=True)
        for n, sample in enumerate(
            objective.trained(source_data.samples[: count * objective.members])
        )
    ]
    answers, longer_chosen = {}, 0.0
    if objective.records == "pairs":
        chosen, rejected = (samples.target_tokens[i::2] for i in range(2))
        answers = {"chosen": AnswerLengths.of(chosen), "rejected": AnswerLengths.of(rejected)}
        longer_chosen = float(np.mean(chosen > rejected))
    if objective.records == "labels":
        trained = objective.trained(samples)
        by_label = [trained.target_tokens[trained.numbers[LABEL] == n] for n in range(2)]
        pairs = zip(_LABELLED, by_label, strict=True)
        answers = {name: AnswerLengths.of(tokens) for name, tokens in pairs if len(tokens)}
    return TaskReport(
        name=task.name,
        objective=objective.kind,
        unit=objective.unit,
        samples=objective.count(samples),
        held_out=objective.count(data.eval_samples),
        batch_size=task.batch_size,
        steps=data.steps,
        epochs=data.steps / data.batches.batches_per_epoch,
        max_length=task.max_length,
        longest=int(max(lengths.max(), held_out.max(initial=0))),
        context=config.max_position_embeddings,
        histogram=_histogram(lengths),
        answers=answers,
        longer_chosen=longer_chosen,
        sources=[
            _report_source(source.path, source_data, len(samples), objective)
            for source, source_data in zip(task.sources, data.sources, strict=True)
        ],
        template_date=data.samples.rendering.date,
        warnings=[*of_labels(task, data.samples), *of_texts(data.samples)],
        shown=shown,
    )


def report_packing(
    tasks: Sequence[Task],
    data: Mapping[str, TaskData],
    tokens: int,
    row_len: int | None,
    chunk_len: int | None,
) -> PackingReport:
    """Packs the first global batch of every task.

    Args:
      data: by name of the task, its data.
      tokens: most tokens of a microbatch, rounded up to whole rows.
      row_len: tokens of a row; None means the shortest rows that hold every sample.
      chunk_len: tokens of a chunk; None means the shortest.

    Raises:
      PlanningError: a sample is longer than `row_len`, or a length is not a power of two.
    """
    names = [task.name for task in tasks]
    parts = [
        stream_lengths(samples)
        for of_task in data.values()
        for samples in (of_task.samples.samples, of_task.eval_samples)
    ]
    shape = smallest_shape_class(
        np.unique(np.concatenate(parts)).tolist(), tokens, chunk_len, row_len
    )
    trained = [task.objective.trained(data[task.name].batches[0]) for task in tasks]
    lengths = {slot: stream_lengths(batch).tolist() for slot, batch in enumerate(trained)}
    microbatches = pack_round(lengths, shape).microbatches()
    used = sum(map(sum, lengths.values()))
    rows = sum(len({placement.row for placement in placed}) for placed in microbatches)
    return PackingReport(
        shape,
        len(microbatches),
        rows,
        1 - used / (rows * shape.row_len),
        _rows(microbatches[0], lengths, names, shape),
    )


def to_json(tasks: Sequence[TaskReport], packing: PackingReport) -> dict[str, Any]:
    fields = {"tasks": {report.name: dataclasses.asdict(report) for report in tasks}}
    shape = {name: getattr(packing.shape, name) for name in ("rows", "row_len", "chunk_len")}
    return fields | {
        "packing": {
            **shape,
            "microbatches": packing.microbatches,
            "rows_used": packing.rows_used,
            "padding": packing.padding,
            "first_microbatch": [
                [{"task": name, "offset": offset, "places": n} for name, offset, n in row]
                for row in packing.rows
            ],
        }
    }


def _rows(
    placements: Sequence[Placement],
    lengths: Mapping[int, Sequence[int]],
    names: Sequence[str],
    shape: ShapeClass,
) -> list[list[tuple[str, int, int]]]:
    rows: list[list[tuple[str, int, int]]] = [[] for _ in range(shape.rows)]
    for placement in placements:
        name, tokens = names[placement.slot], lengths[placement.slot][placement.sample]
        rows[placement.row].append((name, placement.offset, tokens))
    return [sorted(row, key=lambda sample: sample[1]) for row in rows if row]


def _report_source(path: str, data: Any, of_all: int, objective: Objective) -> SourceReport:
    samples = objective.trained(data.samples)
    tokens = int(samples.token_counts.sum(dtype=np.int64))
    targets = max(1, data.target_tokens)
    return SourceReport(
        path=path,
        records=data.read,
        epoch_samples=objective.count(data.samples),
        share=len(data.samples) / of_all,
        epoch_tokens=tokens,
        target_share=target_tokens(samples) / tokens,
        truncated=data.truncated,
        dropped=data.dropped,
        bad_records=data.skipped,
        first_bad_record=data.first_skipped,
        unknown_targets=data.unknown_target_tokens / targets,
        cut_targets=data.cut_target_tokens / targets,
        equal_answers=data.equal_answers,
    )


def _histogram(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """Numbers of samples in at most `_BINS` ranges of equal width, from the shortest to the longest
    sample, as (least tokens, most tokens, number)."""
    low, high = int(lengths.min()), int(lengths.max())
    width = -(-(high - low + 1) // _BINS)
    counts = np.bincount((lengths - low) // width)
    return [
        (low + i * width, min(high, low + (i + 1) * width - 1), int(count))
        for i, count in enumerate(counts)
    ]


def _shown(
    sample: Sample, path: str, index: int, objective: Objective, tokenizer: Any, max_length: int
) -> ShownSample:
    ids, mask = sample.input_ids.tolist(), sample.target_mask.tolist()
    borders = [0, *(np.flatnonzero(np.diff(sample.target_mask)) + 1).tolist(), len(ids)]
    parts, before = [], ""
    for start, end in zip(borders, borders[1:], strict=False):
        # If a part were decoded alone, some tokenizers would lose the space before its first word.
        whole = tokenizer.decode(ids[:end], clean_up_tokenization_spaces=False)
        if whole.startswith(before):
            text = whole[len(before) :]
        else:
            text = tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False)
        parts.append((text, mask[start]))
        before = whole
    answer = ""
    if objective.records == "pairs":
        index, member = divmod(index, objective.members)
        answer = _ANSWERS[member]
    if LABEL in sample.numbers:
        answer = _LABELLED[int(sample.numbers[LABEL])]
    return ShownSample(path, index + 1, answer, ids, mask, parts, len(ids) == max_length)
