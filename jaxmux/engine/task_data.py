"""Reads and tokenizes a task's data, and divides it into global batches."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxmux.data import GlobalBatches, Part, Sample, Samples, Source, load_samples
from jaxmux.models import BackboneConfig
from jaxmux.package_files import resolve_path
from jaxmux.peft import kind_of
from jaxmux.tasks import Task


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
    kept, apart, held_out_source = None, None, task.eval_data
    if (fraction := task.validation_fraction) is not None:
        kept, apart = (Part(fraction, task.seed, held_out) for held_out in (False, True))
        held_out_source = task.data
    samples = _load(task.data, task, config, tokenizer, kept)
    batches = GlobalBatches(samples.samples, task.batch_size, task.seed, task.epochs)
    held_out: list[Sample] = []
    if held_out_source:
        held_out = _load(held_out_source, task, config, tokenizer, apart).samples
    steps = len(batches) if task.steps is None else task.steps
    return TaskData(samples, batches, steps, held_out)


def with_virtual_tokens(samples: Sequence[Sample], adapter: Any) -> list[Sample]:
    """The samples with the positions that a task's adapter fills before them. They do not count in
    the task's longest sample (`Task.max_length`).

    Args:
      samples: the samples.
      adapter: the specification of the adapter.
    """
    number = kind_of(adapter).virtual_tokens(adapter)
    return [sample._replace(virtual_tokens=number) for sample in samples]


def _load(
    source: Source, task: Task, config: BackboneConfig, tokenizer: Any, part: Part | None
) -> Samples:
    source = dataclasses.replace(source, path=resolve_path(source.path))
    sizes = {"max_length": task.max_length, "vocab_size": config.vocab_size}
    found = load_samples(source, tokenizer, **sizes, part=part)
    return found._replace(samples=with_virtual_tokens(found.samples, task.adapter))
