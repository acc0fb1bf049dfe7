"""Rounds hold every sample once and update every task once, however samples are divided."""

from collections import Counter
from functools import partial

import numpy as np
import pytest

from jaxmux import AdamW, LoRA, Task
from jaxmux.data import GlobalBatches, Sample, Samples
from jaxmux.engine import PreparedTask
from jaxmux.engine.rounds import ReplicaInput, training_rounds
from jaxmux.planner.costs import PoolSpec
from jaxmux.planner.devices import Replica
from jaxmux.planner.packing import ShapeClass
from jaxmux.planner.replicas import TokenCosts, assign_samples

# Samples that do not fit the pipeline's rows go to the other replica.
SHAPES = {
    Replica.uniform(pp=1, tp=2): ShapeClass(2, 512, 64, 16),
    Replica.uniform(pp=2, tp=1): ShapeClass(4, 128, 64, 16),
}


def task(name: str, lengths: np.ndarray, batch_size: int, steps: int) -> PreparedTask:
    ids = [np.zeros(length + 1, np.int32) for length in lengths]
    samples = [Sample(tokens, np.arange(len(tokens)) > 0, i) for i, tokens in enumerate(ids)]
    return PreparedTask(
        task=Task(name, "none", LoRA(4), AdamW(), batch_size=batch_size, steps=steps),
        targets={"self_attn.q_proj": np.ones(4, bool)},
        make_adapter=dict,
        samples=Samples(samples, len(samples), 0, 0),
        batches=GlobalBatches(samples, batch_size, seed=0),
        steps=steps,
        eval_samples=[],
    )


@pytest.mark.parametrize("seed", range(12))
def test_unlike_replicas_train_every_sample_once_and_update_every_task_once_a_round(seed):
    rng = np.random.default_rng(seed)
    tasks = {
        slot: task(
            f"task{slot}",
            rng.integers(40, rng.choice([120, 160, 300]), 200),
            batch_size=int(rng.choice([2, 4, 8, 64])),
            steps=int(rng.integers(4, 9)),
        )
        for slot in range(int(rng.integers(3, 7)))
    }
    inputs = [ReplicaInput(shape, replica, streams=True) for replica, shape in SHAPES.items()]
    dispatch = partial(assign_samples, list(SHAPES), TokenCosts(SHAPES))
    pool = PoolSpec(slots=len(tasks), rank=4)
    rounds = list(training_rounds(tasks, dict.fromkeys(tasks, 0), pool, inputs, dispatch=dispatch))
    assert len(rounds) == max(own.steps for own in tasks.values())
    for step, plan in enumerate(rounds):
        live = {slot: own for slot, own in tasks.items() if step < own.steps}
        updated = [slot for update in plan.updates for slot in update.slots]
        assert sorted(updated) == sorted(plan.steps) == sorted(live)
        trained = Counter(
            (slot, i)
            for microbatch in plan.microbatches
            for slot, own in microbatch.samples.items()
            for i in own
        )
        expected = {(slot, i) for slot, own in live.items() for i in range(len(own.batches[step]))}
        assert trained == dict.fromkeys(expected, 1)
        for update in plan.updates:
            last = [i for i, m in enumerate(plan.microbatches) if {*m.samples} & {*update.slots}]
            assert update.after == max(last)
