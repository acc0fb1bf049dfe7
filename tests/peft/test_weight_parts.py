"""Parts of weights are those of whole decompositions in float64."""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxmux.peft import remembered
from jaxmux.peft.weight_parts import approximate_principal_part, orthonormal_part, principal_part

RANK = 4


@pytest.fixture(params=[(9, 20), (20, 9), (12, 12)], ids=str)
def weight(request):
    drawn = np.random.default_rng(0).standard_normal(request.param)
    left, values, right = np.linalg.svd(drawn, full_matrices=False)
    return ((left * 5 * 0.8 ** np.arange(len(values))) @ right).astype(np.float32)


def test_singular_values_are_shared_out_equally(weight):
    left, values, right = np.linalg.svd(np.float64(weight), full_matrices=False)
    a, b = principal_part(weight, RANK)
    assert a.shape == (weight.shape[1], RANK) and b.shape == (RANK, weight.shape[0])
    wanted = (left[:, :RANK] * values[:RANK]) @ right[:RANK]
    np.testing.assert_allclose((a @ b).T, wanted, atol=1e-12)
    for gram in (a.T @ a, b @ b.T):
        np.testing.assert_allclose(gram, np.diag(values[:RANK]), atol=1e-12)


def test_signs_do_not_depend_on_the_machine(weight):
    _, b = principal_part(weight, RANK)
    assert (b.max(axis=1) > -b.min(axis=1)).all()


def test_a_weight_of_low_rank_has_no_more_parts(weight):
    """Its other singular values are zero."""
    low = np.outer(weight[:, 0], weight[0])
    a, b = principal_part(low, RANK)
    assert np.isfinite(a).all() and np.isfinite(b).all()
    np.testing.assert_allclose((a @ b).T, low, atol=1e-6)


def test_power_iterations_come_near_the_exact_part(weight):
    def part(iterations):
        rng = np.random.default_rng(5)
        return approximate_principal_part(weight, RANK, iterations, rng)

    exact = principal_part(weight, RANK)
    errors = [np.linalg.norm(part(n).a @ part(n).b - exact.a @ exact.b) for n in (0, 4, 99)]
    assert errors[0] > 0.1 and errors[0] > 2 * errors[1] and errors[2] < 1e-6
    np.testing.assert_allclose(part(99).a, exact.a, atol=1e-6)
    # Without iterations it is the projection on the product of the weight with random vectors.
    tall = np.float64(weight if weight.shape[0] >= weight.shape[1] else weight.T)
    drawn = np.random.default_rng(5).standard_normal((tall.shape[1], RANK))
    wanted = tall @ drawn @ np.linalg.lstsq(tall @ drawn, tall, rcond=None)[0]
    found = (part(0).a @ part(0).b).T
    np.testing.assert_allclose(found if found.shape == tall.shape else found.T, wanted, atol=1e-10)


def test_columns_are_those_of_the_whole_decomposition(weight):
    q, r = np.linalg.qr(np.float64(weight))
    a, b = orthonormal_part(weight, RANK)
    np.testing.assert_allclose(a.T, r[:RANK], atol=1e-12)
    np.testing.assert_allclose(b.T, q[:, :RANK], atol=1e-12)


def test_parts_are_remembered_as_long_as_the_backbone(monkeypatch):
    weight = np.random.default_rng(0).standard_normal((9, 20)).astype(np.float32)
    computed = []

    def part_of(base, rank):
        def compute():
            computed.append(rank)
            return principal_part(base("w"), rank)

        return remembered.remembered(base, rank, compute)

    def one(name):
        return weight

    def other(name):
        return 2 * weight

    first = part_of(one, 2)
    assert part_of(one, 2) is first and computed == [2]
    assert part_of(other, 2).a.shape == part_of(one, 3).a[:, :2].shape and computed == [2, 2, 3]
    # Only the last one has room.
    monkeypatch.setattr(remembered, "_MOST_BYTES", 1)
    assert part_of(one, 1) is part_of(one, 1) and computed == [2, 2, 3, 1]
    part_of(one, 2)
    assert computed == [2, 2, 3, 1, 2]
    known = len(remembered._known)
    del one
    # All else is older, and collecting it takes seconds after other tests.
    gc.collect(0)
    assert len(remembered._known) == known - 1


def test_what_is_being_computed_is_waited_for():
    """If it fails, those that have waited compute it themselves."""
    barrier, begun, let_go = threading.Barrier(4), [], threading.Event()

    def base(name):
        raise AssertionError("read")

    def compute():
        begun.append(threading.current_thread())
        let_go.wait(10)
        if len(begun) == 1:
            raise OSError("the first one fails")
        return np.ones(3)

    def one():
        barrier.wait(10)
        return remembered.remembered(base, "key", compute)

    with ThreadPoolExecutor(4) as threads:
        results = [threads.submit(one) for _ in range(4)]
        time.sleep(0.05)
        assert len(begun) == 1
        let_go.set()
        failed = [own for own in results if own.exception(10)]
        values = [own.result() for own in results if own not in failed]
    assert len(failed) == 1 and len(values) == 3 and len(begun) == 2
    assert all(value is values[0] for value in values)
