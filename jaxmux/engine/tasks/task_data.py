"""Reads and tokenizes a task's data, and divides it into global batches."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxmux.data import (
    GlobalBatches,
    Rendering,
    Sample,
    Samples,
    Source,
    SplitPart,
    StoredSamples,
    TokenFile,
    load_samples,
)
from jaxmux.data.mixing import copies, epoch_counts
from jaxmux.data.stored_samples import joined
from jaxmux.models import BackboneConfig
from jaxmux.package_files import resolve_path
from jaxmux.peft import kind_of
from jaxmux.tasks import Task, TaskError

# Odd, and about 2**32 divided by the golden ratio, so that multiples of it lie far apart.
_ID_STRIDE = 0x9E3779B1


class TaskData(NamedTuple):
    """The data of a task as in `PreparedTask`, and for each source of the training data, its part
    of `samples` with its own counts."""

    samples: Samples
    batches: GlobalBatches
    steps: int
    eval_samples: Sequence[Sample]
    sources: tuple[Samples, ...]


class Loaded:
    """A cache of the data of tasks with the same backbone: samples by source, longest sample and
    held-out part, and the file of their tokens."""

    def __init__(self):
        self.tokens = TokenFile()
        self.samples: dict[tuple[Source, int, SplitPart | None], Samples] = {}


def read_data(
    task: Task, config: BackboneConfig, tokenizer: Any, loaded: Loaded | None = None
) -> TaskData:
    """Reads and tokenizes a task's training and held-out data. `loaded` is a cache of the data of
    tasks with the same backbone, to which the data of this task are added; None reads everything.
    Raises a TaskError that names the task if data cannot be read or have no sample."""
    loaded = Loaded() if loaded is None else loaded
    try:
        sources = _of_sources(task, config, tokenizer, loaded, held_out=False)
        samples = _together(sources)
        batches = GlobalBatches(samples.samples, task.batch_size, task.seed, task.epochs)
    except ValueError as e:
        raise TaskError(f"task {task.name!r}: {e}") from e
    held_out = read_held_out(task, config, tokenizer, loaded)
    steps = len(batches) if task.steps is None else task.steps
    return TaskData(samples, batches, steps, held_out, sources)


def read_held_out(
    task: Task, config: BackboneConfig, tokenizer: Any, loaded: Loaded | None = None
) -> Sequence[Sample]:
    """Reads and tokenizes only a task's held-out data; empty if the task has none. Arguments and
    errors are those of `read_data`."""
    loaded = Loaded() if loaded is None else loaded
    try:
        if task.eval_data:
            return _load(task.eval_data, task, config, tokenizer, None, loaded).samples
        if task.validation_fraction is not None:
            return _together(_of_sources(task, config, tokenizer, loaded, held_out=True)).samples
    except ValueError as e:
        raise TaskError(f"task {task.name!r}: {e}") from e
    return ()


def with_virtual_tokens(samples: StoredSamples, adapter: Any) -> StoredSamples:
    """The samples with the positions that a task's adapter fills before them. They do not count in
    the task's longest sample (`Task.max_length`)."""
    return samples.with_virtual_tokens(kind_of(adapter).virtual_tokens(adapter))


def _of_sources(
    task: Task, config: BackboneConfig, tokenizer: Any, loaded: Loaded, *, held_out: bool
) -> tuple[Samples, ...]:
    """For each source of a task, the samples that are held out, or those that are not. Training
    samples occur as often as in an epoch."""
    parts: list[Samples] = []
    for number, source in enumerate(task.sources):
        part = None
        if (fraction := task.validation_fraction) is not None:
            part = SplitPart(fraction, task.split_seed, held_out, number)
        parts.append(_load(source, task, config, tokenizer, part, loaded))
    samples = [part.samples for part in parts]
    if not held_out:
        counts = epoch_counts(list(map(len, samples)), task.sources)
        samples = [
            copies(stored, count, task.seed) for stored, count in zip(samples, counts, strict=True)
        ]
    # Records of the same index in different sources get other dropout masks.
    shifted = [stored.with_ids_shifted(n * _ID_STRIDE) for n, stored in enumerate(samples)]
    return tuple(part._replace(samples=s) for part, s in zip(parts, shifted, strict=True))


def _together(sources: Sequence[Samples]) -> Samples:
    sums = map(_sum, zip(*(source[1:] for source in sources), strict=True))
    return Samples(joined([source.samples for source in sources]), *sums)


def _sum(values: Sequence[Any]) -> Any:
    """The sum of counts, the first text that is not empty, or the combined rendering."""
    if isinstance(values[0], Rendering):
        return Rendering.together(values)
    if isinstance(values[0], Counter):
        return sum(values, Counter())
    return next(filter(None, values), "") if isinstance(values[0], str) else sum(values)


def _load(
    source: Source,
    task: Task,
    config: BackboneConfig,
    tokenizer: Any,
    part: SplitPart | None,
    loaded: Loaded,
) -> Samples:
    source = dataclasses.replace(source, path=resolve_path(source.path))
    key = source, task.max_length, part
    if (samples := loaded.samples.get(key)) is None:
        samples = load_samples(
            source,
            tokenizer,
            max_length=task.max_length,
            vocab_size=config.vocab_size,
            part=part,
            tokens=loaded.tokens,
        )
        loaded.samples[key] = samples
    return samples._replace(samples=with_virtual_tokens(samples.samples, task.adapter))
