"""Cross entropy in blocks against log-softmax in float64."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmux.models import TokenLosses, chunk_losses
from jaxmux.models.loss import log_probs
from jaxmux.pallas_kernels.frozen_weight import FrozenWeight

WIDTH, VOCAB = 16, 97


def case(tokens: int, seed=0):
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((tokens, WIDTH)).astype(np.float32)
    head = rng.standard_normal((WIDTH, VOCAB)).astype(np.float32)
    targets = rng.integers(VOCAB, size=tokens).astype(np.int32)
    weight = np.where(rng.random(tokens) < 0.6, rng.random(tokens), 0).astype(np.float32)
    return hidden, head, targets, weight


@jax.jit
def losses_and_gradient(hidden, head, targets, weight, chunk_slot, cotangent):
    def function(hidden):
        losses = TokenLosses.cross_entropy(weight)
        return chunk_losses(hidden, FrozenWeight.of(head), targets, losses, chunk_slot)[:, 0]

    losses, vjp = jax.vjp(function, hidden)
    return losses, *vjp(cotangent)


def run(hidden, head, targets, weight, chunks, cotangent=None):
    cotangent = np.ones(chunks, np.float32) if cotangent is None else cotangent
    owners = np.zeros(chunks, np.int32)
    found = losses_and_gradient(hidden, head, targets, weight, owners, jnp.asarray(cotangent))
    return [np.asarray(x) for x in found]


def reference(hidden, head, targets, weight, chunks, cotangent):
    hidden, head, weight = (x.astype(np.float64) for x in (hidden, head, weight))
    logits = hidden @ head
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    tokens = np.arange(len(hidden))
    losses = (-weight * log_p[tokens, targets]).reshape(chunks, -1).sum(axis=1)
    d_logits = np.exp(log_p)
    d_logits[tokens, targets] -= 1
    d_logits *= (weight * np.repeat(cotangent, len(hidden) // chunks))[:, None]
    return losses, d_logits @ head.T


# Fewer, as many and more tokens than the 1024 of a block; chunks that are longer than a block, one
# of which cannot be cut into equal pieces.
@pytest.mark.parametrize(
    ("tokens", "chunks"), [(128, 2), (1024, 16), (3072, 24), (4096, 2), (4224, 1), (1031, 1)]
)
def test_losses_and_gradient_follow_log_softmax(tokens, chunks):
    inputs = case(tokens)
    cotangent = np.random.default_rng(1).standard_normal(chunks).astype(np.float32)
    losses, gradient = run(*inputs, chunks, cotangent)
    expected, expected_gradient = reference(*inputs, chunks, cotangent)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("chunk_len", [64, 1024, 1536, 4096, 4224])
def test_no_more_logits_than_those_of_a_block_are_in_memory(chunk_len):
    shapes = case(2 * chunk_len), np.zeros(2, np.int32), np.ones(2, np.float32)
    program = str(jax.make_jaxpr(losses_and_gradient)(*shapes[0], *shapes[1:]))
    rows = {int(n) for n in re.findall(rf"f32\[(?:\d+,)*(\d+),{VOCAB}\]", program)}
    assert max(rows - {WIDTH}) <= 1024


def test_tokens_of_weight_zero_add_exactly_nothing():
    hidden, head, targets, weight = case(256)
    losses, gradient = run(hidden, head, targets, np.where(np.arange(256) < 128, 0, weight), 4)
    np.testing.assert_array_equal(losses[:2], 0)
    np.testing.assert_array_equal(gradient[:128], 0)
    assert (losses[2:] > 0).all() and gradient[128:].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38])
def test_a_broken_token_of_weight_zero_changes_nothing(value):
    hidden, head, targets, weight = case(256)
    weight[70] = 0
    healthy = run(hidden, head, targets, weight, 4)
    hidden[70] = value
    for one, other in zip(healthy, run(hidden, head, targets, weight, 4), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38])
def test_a_broken_chunk_changes_no_bit_of_the_others(value):
    hidden, head, targets, weight = case(2048)
    chunks, broken = 32, 5
    healthy = run(hidden, head, targets, weight, chunks)
    of_chunk = slice(broken * 64, broken * 64 + 64)
    hidden[of_chunk], weight[of_chunk] = value, 1.0
    losses, gradient = run(hidden, head, targets, weight, chunks)
    others = np.arange(chunks) != broken
    np.testing.assert_array_equal(losses[others], healthy[0][others])
    np.testing.assert_array_equal(
        gradient[np.repeat(others, 64)], healthy[1][np.repeat(others, 64)]
    )
    assert not np.isfinite(losses[broken])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_broken_cotangent_stays_in_its_chunk(value):
    inputs = case(256)
    cotangent = np.ones(4, np.float32)
    healthy = run(*inputs, 4, cotangent)[1]
    cotangent[2] = value
    gradient = run(*inputs, 4, cotangent)[1]
    others = np.repeat(np.arange(4) != 2, 64)
    np.testing.assert_array_equal(gradient[others], healthy[others])


def test_a_chunk_has_the_same_bits_wherever_it_lies():
    hidden, head, targets, weight = case(2048)
    order = np.random.default_rng(2).permutation(32)
    tokens = (order[:, None] * 64 + np.arange(64)).reshape(-1)
    losses, gradient = run(hidden, head, targets, weight, 32)
    moved = run(hidden[tokens], head, targets[tokens], weight[tokens], 32)
    np.testing.assert_array_equal(losses[order], moved[0])
    np.testing.assert_array_equal(gradient[tokens], moved[1])


def test_large_logits_do_not_overflow():
    hidden, head, targets, weight = case(128)
    losses, gradient = run(1e4 * hidden, head, targets, weight, 2)
    assert np.isfinite(losses).all() and np.isfinite(gradient).all()


def test_half_precision_losses_are_float32():
    hidden, head, targets, weight = case(256)
    half, half_head = (jnp.asarray(x, jnp.bfloat16) for x in (hidden, head))
    losses, gradient = run(half, half_head, targets, weight, 4)
    assert losses.dtype == np.float32 and gradient.dtype == jnp.bfloat16
    expected, wanted = reference(
        np.asarray(half, np.float64),
        np.asarray(half_head, np.float64),
        targets,
        weight,
        4,
        np.ones(4),
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    error = np.linalg.norm(gradient.astype(np.float64) - wanted) / np.linalg.norm(wanted)
    assert error < 0.01


def test_negative_weights_count():
    hidden, head, targets, weight = case(256)
    weight[::3] *= -2
    losses, gradient = run(hidden, head, targets, weight, 4)
    expected, wanted = reference(hidden, head, targets, weight, 4, np.ones(4))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-6)


def test_a_weight_that_is_nan_reaches_its_chunk_only():
    hidden, head, targets, weight = case(256)
    healthy = run(hidden, head, targets, weight, 4)
    weight[70] = np.nan
    losses, gradient = run(hidden, head, targets, weight, 4)
    assert np.isnan(losses[1]) and np.isnan(gradient[70]).all()
    others = np.repeat(np.arange(4) != 1, 64)
    np.testing.assert_array_equal(gradient[others], healthy[1][others])


# Blocks of one and of several chunks; a chunk that is cut into pieces.
@pytest.mark.parametrize(("tokens", "chunks"), [(128, 2), (3072, 24), (4096, 2)])
def test_log_probabilities_follow_log_softmax(tokens, chunks):
    hidden, head, targets, _ = case(tokens)
    arrays = map(jnp.asarray, (hidden, targets, np.zeros(chunks, np.int32)))
    of_hidden, targets_of, owners = arrays
    weight = FrozenWeight.of(jnp.asarray(head))
    scores = log_probs(of_hidden, weight, targets_of, owners)
    found = log_probs(of_hidden, weight, targets_of, owners, with_squares=False)[:, 0]
    np.testing.assert_array_equal(scores[:, 0], found)
    one_by_one = reference(hidden, head, targets, -np.ones(tokens), tokens, np.ones(tokens))[0]
    assert found.shape == (tokens,) and found.dtype == np.float32
    np.testing.assert_allclose(found, one_by_one, rtol=1e-5, atol=1e-5)
