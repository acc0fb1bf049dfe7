"""Loops over the owners of chunks, beside a loop of Python over all chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmux.peft.shared_projections import add_projected
from jaxmux.peft.sparse_products import sparse_product
from jaxmux.peft.turns import group_size, in_turns

CHUNKS, LENGTH, K, N = 12, 4, 6, 10
NONE = 5
OWNERS = [3, 3, 5, 0, 5, 5, 5, 5, 0, 3, 2, 5]


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch):
    """Four groups, of which one has no owner."""
    monkeypatch.setattr("jaxmux.peft.turns._GROUP_TOKENS", 4 * LENGTH - 1)


@pytest.fixture
def normal():
    rng = np.random.default_rng(0)
    return lambda *shape: jnp.float32(rng.standard_normal(shape))


def test_every_chunk_is_changed_once_and_by_its_owner(normal):
    x = normal(CHUNKS, LENGTH, K)
    assert group_size(x) == 3

    def turn(owner, given, values):
        return given * (owner + 1), values[1] + 1

    zeros = jnp.zeros_like(x), jnp.zeros(CHUNKS)
    scaled, count = in_turns(jnp.array(OWNERS), NONE, turn, x, zeros, 3)
    owned = np.array(OWNERS) < NONE
    np.testing.assert_array_equal(count, owned)
    factors = np.where(owned, np.array(OWNERS) + 1, 0)
    np.testing.assert_array_equal(scaled, x * factors[:, None, None])


@pytest.mark.parametrize("owners", [OWNERS, [NONE] * CHUNKS], ids=["owners", "no owners"])
def test_projections_and_their_gradients(normal, owners):
    y, x = normal(CHUNKS, LENGTH, N), normal(CHUNKS, LENGTH, K)
    factors, projections = (
        (normal(CHUNKS, 3), normal(CHUNKS, N)),
        (normal(5, K, 3), normal(5, 3, N)),
    )
    owner = jnp.array(owners)

    def expected(y, x, ld, lb):
        a, b = (p[jnp.minimum(owner, 4)] for p in projections)
        v = jnp.einsum("clk,ckr,cr,crn,cn->cln", x, a, ld, b, lb)
        return y + jnp.where(owner[:, None, None] < NONE, v, 0)

    def found(y, x, ld, lb):
        return add_projected(y, x, ld, lb, *projections, owner)

    _check(found, expected, (y, x, *factors), normal(*y.shape))


def test_sparse_matrices_and_their_gradients(normal):
    x, owner = normal(CHUNKS, LENGTH, K), np.array(OWNERS)
    places = np.stack([np.random.default_rng(i).permutation(K * N)[:7] for i in range(NONE + 1)])
    places = np.where(np.arange(7) < 6, places, K * N)[owner]
    values = normal(NONE + 1, 7)[owner]
    same = owner[:, None] == owner
    first = jnp.where(owner < NONE, jnp.argmax(same, axis=1), CHUNKS)

    def expected(x, values):
        dense = jax.vmap(lambda at, v: jnp.zeros(K * N).at[at].set(v, mode="drop"))(places, values)
        y = jnp.einsum("clk,ckn->cln", x, dense.reshape(CHUNKS, K, N))
        return jnp.where(owner[:, None, None] < NONE, y, 0)

    def found(x, values):
        return sparse_product(N, x, values, jnp.asarray(places), first)

    _check(found, expected, (x, values), normal(CHUNKS, LENGTH, N))


def _check(found, expected, arguments, cotangent):
    results = []
    for function in (found, expected):
        y, backward = jax.vjp(jax.jit(function), *arguments)
        results.append((y, *backward(cotangent)))
    for own, other in zip(*results, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)
