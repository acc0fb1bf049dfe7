"""A rank below the pool's costs a task nothing: the padding stays zero and the result is the
same."""

import numpy as np
import pytest

from jaxmux.optimizers import SGD, AdamW, Lion
from tests.engine.conftest import SMALL

OPTIMIZERS = {
    "adamw": AdamW(1e-2, weight_decay=0.1),
    "sgd": SGD(1e-2, weight_decay=0.1),
    "lion": Lion(1e-3, weight_decay=0.1),
}
RANK, POOL_RANK = 4, 8


@pytest.fixture(scope="module")
def tasks(make_task):
    return [make_task(k, rank=RANK, dropout=0.1, optimizer=o) for k, o in OPTIMIZERS.items()]


@pytest.fixture(scope="module")
def padded(tasks, make_engine, train):
    engine = make_engine(*tasks, rank=POOL_RANK, shape=SMALL)
    return engine, train(engine)


@pytest.fixture(scope="module")
def exact(tasks, make_engine, train):
    engine = make_engine(*tasks, rank=RANK, shape=SMALL)
    return engine, train(engine)


def factors_of(tree):
    """The `a` and `b` leaves of adapters, accumulators or moments."""
    if hasattr(tree, "a"):
        yield "a", np.asarray(tree.a)
        yield "b", np.asarray(tree.b)
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from factors_of(value)
    elif isinstance(tree, tuple):
        for value in tree:
            yield from factors_of(value)


def test_padding_stays_exactly_zero(padded):
    state = padded[0].state
    seen = 0
    for factor, leaf in factors_of((state.adapters, state.accumulators, state.moments)):
        own, padding = (
            (leaf[..., :RANK], leaf[..., RANK:])
            if factor == "a"
            else (leaf[..., :RANK, :], leaf[..., RANK:, :])
        )
        assert padding.size == own.size and not padding.any()
        seen += 1
    # Adapters and accumulators; two moments, which AdamW needs and SGD and Lion share; 2 modules.
    assert seen == (2 + 2) * 2 * 2


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_task_in_a_wider_pool_learns_the_same(name, padded, exact):
    for one, other in zip(padded[1][name], exact[1][name], strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
    expected = exact[0].adapter(name)
    for module, factors in padded[0].adapter(name).items():
        for found, wanted in zip(factors, expected[module], strict=True):
            assert found.shape == wanted.shape
            assert np.linalg.norm(found - wanted) < 1e-3 * np.linalg.norm(wanted)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_taken_from_a_wide_pool_fits_a_narrow_one(name, tasks, padded, exact):
    wide, narrow = padded[0].task_arrays(name), exact[0].task_arrays(name)
    assert {k: v.shape for k, v in wide.items()} == {k: v.shape for k, v in narrow.items()}
