"""A dropout mask is a function of (key, layer, module, sample, position, column), and looks random
in each."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmux.pallas_kernels.counter_dropout import Dropout, keep_mask, token_counters

TOKENS, COLUMNS = 512, 256


def mask(
    *, rate=0.5, key=7, sample=3, layer=0, module=0, positions=None, columns=COLUMNS
) -> np.ndarray:
    """The mask of one sequence of one task that lies alone in the stream."""
    positions = np.arange(TOKENS) if positions is None else np.asarray(positions)
    dropout = Dropout(
        jnp.asarray([rate], jnp.float32),
        jnp.asarray([key], jnp.uint32),
        jnp.full(len(positions), sample, jnp.uint32),
        jnp.asarray(positions, jnp.int32),
    )
    owner = jnp.zeros(len(positions), jnp.int32)
    counters = token_counters(dropout, owner, layer, module)
    return np.asarray(keep_mask(counters, dropout.rate[owner], columns))


def deviations(hits: np.ndarray, probability: float) -> float:
    """How many standard deviations the mean of independent trials lies from their probability."""
    return abs(hits.mean() - probability) / np.sqrt(probability * (1 - probability) / hits.size)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_kept_fraction_is_one_minus_rate(rate):
    assert deviations(mask(rate=rate), 1 - rate) < 5


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("axis", [0, 1])
def test_every_token_and_every_column_keeps_its_share(rate, axis):
    kept = mask(rate=rate)
    spread = kept.mean(axis=axis).std()
    expected = np.sqrt(rate * (1 - rate) / kept.shape[axis])
    assert 0.8 < spread / expected < 1.2


def test_rate_zero_keeps_everything():
    assert mask(rate=0.0).all()


def test_a_higher_rate_drops_the_same_features_and_more():
    low, high = mask(rate=0.1), mask(rate=0.5)
    assert (low >= high).all() and (low & ~high).any()


@pytest.mark.parametrize(
    "change",
    [
        {"layer": 1},
        {"layer": 31},
        {"module": 1},
        {"module": 6},
        {"sample": 4},
        {"sample": 2**32 - 1},
        {"key": 8},
        {"key": 2**31 + 7},
        {"positions": np.arange(1, TOKENS + 1)},
        {"layer": 1, "module": 1},
    ],
    ids=str,
)
def test_another_identity_has_an_unrelated_mask(change):
    assert deviations(mask() == mask(**change), 0.5) < 5


def test_layers_modules_samples_and_keys_are_pairwise_unrelated():
    masks = [
        mask(layer=layer, module=module, sample=sample, key=key).reshape(-1)
        for layer in range(2)
        for module in range(3)
        for sample in range(2)
        for key in (1, 2)
    ]
    signs = 2.0 * np.stack(masks) - 1
    correlations = np.corrcoef(signs)[np.triu_indices(len(masks), 1)]
    assert np.abs(correlations).max() < 5.5 / np.sqrt(TOKENS * COLUMNS)


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("lag", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("axis", [0, 1])
def test_neighbouring_positions_and_columns_are_uncorrelated(rate, lag, axis):
    kept = np.moveaxis(mask(rate=rate), axis, 0).astype(np.float64) - (1 - rate)
    product = kept[lag:] * kept[:-lag]
    correlation = product.mean() / (rate * (1 - rate))
    assert abs(correlation) < 5 / np.sqrt(product.size)


def test_no_two_tokens_of_a_long_sequence_share_a_mask():
    rows = mask(positions=np.arange(4096), columns=64)
    assert len(np.unique(np.packbits(rows, axis=1), axis=0)) == 4096


def test_a_wider_module_extends_the_mask_of_a_narrower_one():
    np.testing.assert_array_equal(mask(columns=64), mask(columns=256)[:, :64])


def test_mask_does_not_depend_on_place_slot_or_neighbours():
    """Two sequences in a shuffled stream of three tasks get the masks they have alone."""
    rng = np.random.default_rng(0)
    sample = np.repeat([3, 9, 3], [40, 30, 20]).astype(np.uint32)
    position = np.concatenate([np.arange(40), np.arange(30), np.arange(20)])
    slot = np.repeat([2, 2, 0], [40, 30, 20])
    keys, rates = [55, 66, 7], [0.3, 0.9, 0.1]
    order = rng.permutation(90)

    dropout = Dropout(
        jnp.asarray(rates, jnp.float32),
        jnp.asarray(keys, jnp.uint32),
        jnp.asarray(sample[order]),
        jnp.asarray(position[order], jnp.int32),
    )
    owner = jnp.asarray(slot[order])
    counters = token_counters(dropout, owner, jnp.int32(4), 2)
    together = np.empty((90, 32), bool)
    together[order] = keep_mask(counters, dropout.rate[owner], 32)

    def alone(slot, sample, length):
        return mask(
            rate=rates[slot],
            key=keys[slot],
            sample=sample,
            layer=4,
            module=2,
            positions=np.arange(length),
            columns=32,
        )

    np.testing.assert_array_equal(together[:40], alone(2, 3, 40))
    np.testing.assert_array_equal(together[40:70], alone(2, 9, 30))
    np.testing.assert_array_equal(together[70:], alone(0, 3, 20))
