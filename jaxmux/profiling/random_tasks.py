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
    """Returns a prepared task with samples of random tokens, for measurements.

    Register it with `Engine.register_tasks`. The task trains LoRA on all linears of the backbone,
    with AdamW at a learning rate of 1e-4. It has no held-out data. `in_other_names` makes further
    tasks from it.

    Args:
      config: configuration of the backbone.
      name: name of the task.
      lengths: stream length of each sample in tokens, that is, its tokens without the last one,
        which is only predicted.
      batch: number of samples of a global batch.
      steps: number of global batches that the task trains.
      rank: rank of the LoRA adapter.
      seed: seed of the random tokens. It does not affect the initial adapter or the order of the
        samples.
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
    """Returns samples of random tokens; `random_task` makes a whole task from them.

    All tokens of a sample but the first are targets of the loss.

    Args:
      config: configuration of the backbone; tokens are drawn from its vocabulary.
      lengths: stream length of each sample in tokens. A sample has one token more than its stream
        length, because the last token is only predicted.
      seed: seed of the random tokens; equal seeds give equal samples.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for i, length in enumerate(lengths):
        ids = rng.integers(0, config.vocab_size, length + 1, np.int32)
        samples.append(Sample(ids, np.arange(length + 1) > 0, i))
    return samples


def in_other_names(task: PreparedTask, count: int) -> list[PreparedTask]:
    """Returns copies of a prepared task under the names "task0", "task1" and so on.

    The copies share the samples of `task` and start from equal adapters. Copying is faster than
    preparing each task, which would read or draw its samples again.

    Args:
      task: the task to copy; it is not changed.
      count: number of copies.
    """
    return [
        dataclasses.replace(task, task=dataclasses.replace(task.task, name=f"task{i}"))
        for i in range(count)
    ]
