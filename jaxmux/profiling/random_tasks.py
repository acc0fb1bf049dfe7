"""Tasks on random tokens, for measurements that depend only on shapes."""

import dataclasses
from collections.abc import Sequence
from functools import partial

import numpy as np

from jaxmux.data import GlobalBatches, Sample, Samples
from jaxmux.engine import PreparedTask
from jaxmux.models import BackboneConfig
from jaxmux.optimizers import OPTIMIZERS
from jaxmux.peft import LoRA, initial_adapter, resolve_targets
from jaxmux.tasks import Task

from .grid import OPTIMIZER


def random_task(
    config: BackboneConfig,
    name: str,
    lengths: Sequence[int],
    batch: int,
    steps: int,
    rank: int,
    seed: int = 0,
) -> PreparedTask:
    """A task with LoRA on all linears and samples of random tokens.

    Args:
      config: configuration of the backbone.
      name: name of the task.
      lengths: stream lengths of its samples, in tokens.
      batch: samples of a global batch.
      steps: steps that the task trains.
      rank: rank of its adapter.
      seed: seed of the samples.
    """
    optimizer = OPTIMIZERS[OPTIMIZER](1e-4)
    task = Task(name, "random", LoRA(rank), optimizer, batch_size=batch, steps=steps)
    targets = resolve_targets(task.adapter.target_modules, config)
    samples = random_samples(config, lengths, seed)
    return PreparedTask(
        task=task,
        targets=targets,
        make_adapter=partial(initial_adapter, task.adapter, targets, config, seed=0),
        samples=Samples(samples, len(samples), 0, 0),
        batches=GlobalBatches(samples, batch, seed=0),
        steps=steps,
        eval_samples=[],
    )


def random_samples(config: BackboneConfig, lengths: Sequence[int], seed: int) -> list[Sample]:
    """Samples of these stream lengths. Each has one token more than its stream length; all tokens
    but the first are targets."""
    rng = np.random.default_rng(seed)
    return [
        Sample(
            rng.integers(0, config.vocab_size, length + 1, np.int32), np.arange(length + 1) > 0, i
        )
        for i, length in enumerate(lengths)
    ]


def in_other_names(task: PreparedTask, count: int) -> list[PreparedTask]:
    """`count` copies of a task, named task0, task1, and so on. Copying is faster than making each
    task, which reads or draws its samples."""
    return [
        dataclasses.replace(task, task=dataclasses.replace(task.task, name=f"task{i}"))
        for i in range(count)
    ]
