"""Reads and tokenizes a task's data, and divides it into global batches."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxmux.data import GlobalBatches, Part, Sample, Samples, Source, load_samples, repeated
from jaxmux.models import BackboneConfig
from jaxmux.package_files import resolve_path
from jaxmux.peft import kind_of
from jaxmux.tasks import Task

# Odd, and about 2**32 divided by the golden ratio, so that multiples of it lie far apart.
_ID_STRIDE = 0x9E3779B1


class TaskData(NamedTuple):
    """The fields of a `PreparedTask` that hold its data."""

    samples: Samples
    batches: GlobalBatches
    steps: int
    eval_samples: list[Sample]


def read_data(task: Task, config: BackboneConfig, tokenizer: Any) -> TaskData:
    """Reads and tokenizes a task's training and held-out data.

    Args:
      task: the task.
      config: configuration of the backbone.
      tokenizer: the backbone's tokenizer, from `load_tokenizer`.

    Raises:
      ValueError: the data cannot be read or has no sample.
    """
    samples = _of_sources(task, config, tokenizer, held_out=False)
    batches = GlobalBatches(samples.samples, task.batch_size, task.seed, task.epochs)
    steps = len(batches) if task.steps is None else task.steps
    return TaskData(samples, batches, steps, read_held_out(task, config, tokenizer))


def read_held_out(task: Task, config: BackboneConfig, tokenizer: Any) -> list[Sample]:
    """Reads and tokenizes a task's held-out data alone; empty if the task has none.

    Args:
      task, config, tokenizer: as for `read_data`.

    Raises:
      ValueError: the data cannot be read or has no sample.
    """
    if task.eval_data:
        return _load(task.eval_data, task, config, tokenizer, None).samples
    if task.validation_fraction is not None:
        return _of_sources(task, config, tokenizer, held_out=True).samples
    return []


def with_virtual_tokens(samples: Sequence[Sample], adapter: Any) -> list[Sample]:
    """The samples with the positions that a task's adapter fills before them. They do not count in
    the task's longest sample (`Task.max_length`).

    Args:
      samples: the samples.
      adapter: the specification of the adapter.
    """
    number = kind_of(adapter).virtual_tokens(adapter)
    return [sample._replace(virtual_tokens=number) for sample in samples]


def _of_sources(task: Task, config: BackboneConfig, tokenizer: Any, *, held_out: bool) -> Samples:
    """The samples of all sources of a task, without or with only those that are held out, and the
    sums of their counts."""
    found: list[Samples] = []
    for number, source in enumerate(task.sources):
        part = None
        if (fraction := task.validation_fraction) is not None:
            part = Part(fraction, task.seed, held_out, number)
        own = _load(source, task, config, tokenizer, part)
        samples = own.samples if held_out else repeated(own.samples, source, task.seed)
        # Records of the same index in different sources get other dropout masks.
        shift = number * _ID_STRIDE
        samples = [s._replace(sample_id=(s.sample_id + shift) % 2**32) for s in samples]
        found.append(own._replace(samples=samples))
    return Samples(*(_sum(values) for values in zip(*found, strict=True)))


def _sum(values: Sequence[Any]) -> Any:
    """All samples, the sum of counts, or the first text that is not empty."""
    if isinstance(values[0], str):
        return next(filter(None, values), "")
    return sum(values, []) if isinstance(values[0], list) else sum(values)


def _load(
    source: Source, task: Task, config: BackboneConfig, tokenizer: Any, part: Part | None
) -> Samples:
    source = dataclasses.replace(source, path=resolve_path(source.path))
    sizes = {"max_length": task.max_length, "vocab_size": config.vocab_size}
    found = load_samples(source, tokenizer, **sizes, part=part)
    return found._replace(samples=with_virtual_tokens(found.samples, task.adapter))
