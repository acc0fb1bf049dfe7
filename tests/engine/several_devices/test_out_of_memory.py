"""A mesh whose devices run out of memory when programs are compiled recomputes more, and trains the
same."""

import itertools
import logging

import jax
import numpy as np
import pytest

from jaxmux.engine import compiled_stages
from jaxmux.errors import OutOfDeviceMemory

MESH = {"layers": (3, 1)}


@pytest.fixture
def fail_at(monkeypatch):
    """Lets the calls of `backward` with these numbers fail like those on a full device, after they
    have taken the donated arrays."""

    def fail(numbers) -> None:
        backward, seen = compiled_stages.backward, itertools.count()

        def failing(*arguments):
            found = backward(*arguments)
            if next(seen) in numbers:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
            return found

        failing.lower, failing.eval_shape = backward.lower, backward.eval_shape
        monkeypatch.setattr(compiled_stages, "backward", failing)

    return fail


def test_layers_recompute_more_and_nothing_is_lost(fail_at, make_engine, make_task, train, caplog):
    expected = make_engine(make_task("a"), make_task("b"), **MESH)
    expected_updates = train(expected)
    fail_at((1,))
    found = make_engine(make_task("a"), make_task("b"), **MESH)
    with caplog.at_level(logging.WARNING, logger="jaxmux"):
        found_updates = train(found)
    assert [r.message.split(";")[0] for r in caplog.records] == ["the device ran out of memory"]
    assert expected.remat == "dots" and found.remat == ("lean",) * 4
    assert (found.rounds, found.microbatches) == (expected.rounds, expected.microbatches)
    for name, updates in expected_updates.items():
        np.testing.assert_allclose(
            [u.loss for u in found_updates[name]], [u.loss for u in updates], rtol=1e-5
        )
        for module, factors in expected.adapter(name).items():
            for one, other in zip(found.adapter(name)[module], factors, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_only_the_leanest_policy_is_the_end(fail_at, make_engine, make_task, train):
    fail_at(range(100))
    with pytest.raises(OutOfDeviceMemory, match="256 tokens does not fit .* try .*=128"):
        train(make_engine(make_task("a"), **MESH))
