"""Gradient accumulation over microbatches gives the gradient of the whole global batch."""

import numpy as np
import pytest

from jaxmux.optimizers import SGD
from jaxmux.planner.packing import ShapeClass
from tests.engine.conftest import SMALL


def shape(rows: int) -> ShapeClass:
    """One sample fills a row, so a microbatch holds `rows` samples."""
    return ShapeClass(rows, row_len=64, chunk_len=64, max_sequences=1)


@pytest.fixture(scope="module")
def task(make_task):
    return make_task(
        "task",
        samples=8,
        lengths=(40, 65),
        batch_size=8,
        steps=6,
        dropout=0.1,
        optimizer=SGD(0.01, clip_norm=None),
    )


def trained(make_engine, train, task, rows):
    engine = make_engine(task, shape=shape(rows))
    updates = train(engine)["task"]
    assert engine.microbatches == task.steps * 8 // rows
    return engine, updates


# tests/parity, too, compares steps of several microbatches with those of whole batches.
@pytest.mark.slow
def test_one_microbatch_of_eight_and_four_of_two_agree(task, make_engine, train):
    whole, whole_updates = trained(make_engine, train, task, rows=8)
    split, split_updates = trained(make_engine, train, task, rows=2)
    for one, other in zip(whole_updates, split_updates, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-6)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-6)
    start = task.make_adapter()
    for module, factors in whole.adapter("task").items():
        pairs = zip(factors, split.adapter("task")[module], start[module], strict=True)
        for one, other, first in pairs:
            change = np.linalg.norm(one - first)
            assert change > 0
            assert np.linalg.norm(one - other) <= 1e-5 * change
            assert np.linalg.norm(one - other) <= 1e-6 * np.linalg.norm(one)


def test_loss_of_a_batch_is_the_mean_over_its_target_tokens(make_task, make_engine, train):
    """At learning rate 0 the adapters stay at zero: the loss of a batch of eight follows from those
    of its samples."""
    data = {"samples": 8, "lengths": (4, 65), "optimizer": SGD(0.0), "dropout": 0.1}
    singles = make_task("task", batch_size=1, steps=8, **data)
    batch = make_task("task", batch_size=8, steps=1, **data)
    alone = train(make_engine(singles, shape=SMALL))["task"]
    engine = make_engine(batch, shape=SMALL)
    (whole,) = train(engine)["task"]
    assert engine.microbatches > 1
    tokens = [u.target_tokens for u in alone]
    assert len(set(tokens)) > 1 and whole.target_tokens == sum(tokens)
    assert whole.loss == pytest.approx(
        np.average([u.loss for u in alone], weights=tokens), rel=1e-6
    )
