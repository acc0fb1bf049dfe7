"""A dropout mask is a function of (key, layer, module, sample, position, column), and looks random
in each."""

from functools import cache, partial
from itertools import combinations, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmux.pallas_kernels.counter_dropout import (
    KEEP_ALL,
    PERIOD,
    Dropout,
    counters_from,
    draws,
    keep_mask,
    keep_threshold,
    salts,
    token_counters,
)
from jaxmux.pallas_kernels.grouped_lora.dropout_sm90 import _select, _select_packed

TOKENS, COLUMNS = 512, 256
# The members of a group, whose draws come from one hash.
GROUP = tuple(pair + block for block in (0, 8, 16, 24) for pair in (0, 1))


def mask(
    *, rate=0.5, key=7, sample=3, layer=0, module=0, positions=None, columns=COLUMNS
) -> np.ndarray:
    """The mask of one sequence of one task, alone in the stream."""
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


@cache
def large_mask(rate: float) -> np.ndarray:
    return mask(rate=rate, positions=np.arange(8192))


def counters_of(positions: np.ndarray) -> jnp.ndarray:
    tokens = len(positions)
    dropout = Dropout(
        jnp.zeros(1),
        jnp.asarray([7], jnp.uint32),
        jnp.full(tokens, 3, jnp.uint32),
        jnp.asarray(positions, jnp.int32),
    )
    return token_counters(dropout, jnp.zeros(tokens, jnp.int32), 0, 0)


def firsts() -> set[int]:
    """The first columns of all groups."""
    return {start + pair for start in range(0, COLUMNS, PERIOD) for pair in (0, 2, 4, 6)}


def deviations(hits: np.ndarray, probability: float) -> float:
    """How many standard deviations the mean of independent trials lies from their probability."""
    return abs(hits.mean() - probability) / np.sqrt(probability * (1 - probability) / hits.size)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_kept_fraction_is_one_minus_rate(rate):
    assert deviations(mask(rate=rate), 1 - rate) < 5


@pytest.mark.parametrize(
    "place",
    [{"layer": 17}, {"module": 5}, {"key": 2**32 - 1}, {"sample": 2**31}, {"positions": 9**5}],
    ids=str,
)
def test_kept_fraction_is_the_same_everywhere(place):
    place = {k: v + np.arange(TOKENS) if k == "positions" else v for k, v in place.items()}
    assert deviations(mask(rate=0.1, columns=2048, **place), 0.9) < 4


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("axis", [0, 1])
def test_every_token_and_every_column_keeps_its_share(rate, axis):
    kept = mask(rate=rate)
    spread = kept.mean(axis=axis).std()
    expected = np.sqrt(rate * (1 - rate) / kept.shape[axis])
    assert 0.8 < spread / expected < 1.2


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.5])
def test_counts_of_tokens_and_columns_spread_as_those_of_numpys_generator(rate):
    """For independent draws, the sum of squared standard scores is chi-squared distributed."""
    kept = large_mask(rate)
    theirs = np.random.default_rng(0).random(kept.shape) >= rate
    for axis, count in ((0, kept.shape[1]), (1, kept.shape[0])):
        spread = np.sqrt(rate * (1 - rate) * kept.shape[axis])
        for hits in (kept, theirs):
            scores = (hits.sum(axis=axis) - (1 - rate) * kept.shape[axis]) / spread
            assert abs((scores**2).sum() - count) < 4 * np.sqrt(2 * count)
            assert np.abs(scores).max() < 5.5


@pytest.mark.parametrize("rate", [0.0, 2.0**-18])
def test_rate_zero_keeps_everything(rate):
    assert large_mask(rate).all()


@pytest.mark.parametrize("rate", [2.0**-16, 0.05, 0.1, 1 / 3, 0.999])
def test_rate_is_resolved_to_a_multiple_of_two_to_the_minus_sixteen(rate):
    """Of all 2^16 upper halves of a draw, the share that is dropped is the rounded rate."""
    kept = np.arange(-(1 << 15), 1 << 15) < int(keep_threshold(jnp.float32(rate)))
    assert abs((~kept).mean() - rate) <= 2.0**-17 + 1e-9


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


@pytest.mark.long
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
@pytest.mark.parametrize("axis", [0, 1])
def test_neighbouring_positions_and_columns_are_uncorrelated(rate, axis):
    centred = np.moveaxis(large_mask(rate), axis, 0).astype(np.float32) - np.float32(1 - rate)
    for lag in (1, 2, 3, 5, 7, 8, 9, 16, 24, 25, 32, 64, 128):
        products = centred[lag:] * centred[:-lag]
        correlation = products.mean(dtype=np.float64) / (rate * (1 - rate))
        assert abs(correlation) < 4.5 / np.sqrt(products.size), lag


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.5])
def test_all_pairs_of_columns_are_uncorrelated(rate):
    """This includes members of a group, whose draws are multiples of one hash."""
    centred = large_mask(rate).astype(np.float32) - np.float32(1 - rate)
    scores = centred.T @ centred / (rate * (1 - rate) * np.sqrt(len(centred)))
    scores = scores[np.triu_indices(len(scores), 1)]
    assert abs((scores**2).mean() - 1) < 4.5 * np.sqrt(2 / scores.size)
    assert np.abs(scores).max() < 6


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("columns", [GROUP, tuple(range(8)), tuple(range(0, 256, 32))], ids=str)
def test_patterns_of_eight_columns_are_as_frequent_as_those_of_independent_draws(rate, columns):
    """Pearson's chi-squared test over all 256 patterns, at every offset of the columns."""
    kept = large_mask(rate)
    starts = [s for s in range(kept.shape[1] - max(columns)) if columns != GROUP or s in firsts()]
    bits = sum(kept[:, np.add(starts, c)].astype(np.int64) << i for i, c in enumerate(columns))
    survivors = np.array([pattern.bit_count() for pattern in range(256)])
    expected = bits.size * (1 - rate) ** survivors * rate ** (8 - survivors)
    observed, common = np.bincount(bits.ravel(), minlength=256), expected > 10
    statistic = ((observed - expected)[common] ** 2 / expected[common]).sum()
    # Overlapping windows repeat each other's deviations at most eight times.
    repeats = 1 if columns == GROUP else 8
    assert abs(statistic - common.sum()) < 4.5 * np.sqrt(2 * repeats * common.sum())


@pytest.mark.parametrize(("first", "second"), list(combinations(range(8), 2)))
def test_draws_of_two_members_of_a_group_fill_the_square_evenly(first, second):
    counters = counters_of(np.arange(1 << 16))
    columns = jnp.asarray([GROUP[first], GROUP[second]])
    x, y = np.asarray(draws(counters[:, None], salts(counters)[:, None], columns[None])).T
    cells = np.histogram2d(x, y, bins=32, range=[[-(2**31), 2**31]] * 2)[0]
    expected = len(x) / cells.size
    statistic = ((cells - expected) ** 2 / expected).sum()
    assert abs(statistic - cells.size) < 4.5 * np.sqrt(2 * cells.size)


def test_every_bit_of_the_upper_half_of_a_draw_is_fair():
    counters = counters_of(np.arange(1 << 14))
    drawn = draws(counters[:, None], salts(counters)[:, None], jnp.arange(64)[None])
    for bit in range(16, 32):
        assert deviations(np.asarray(drawn >> bit) & 1, 0.5) < 4.5


def test_masks_of_many_samples_and_layers_are_all_distinct():
    firsts_of = [
        mask(sample=sample, layer=layer, positions=np.arange(4), columns=64)
        for sample, layer in product((*range(16), *range(2**32 - 16, 2**32)), range(2))
    ]
    rows = np.packbits(np.concatenate(firsts_of), axis=1)
    assert len(np.unique(rows, axis=0)) == len(rows)


def test_tokens_whose_counters_differ_by_the_step_between_groups_are_unrelated():
    """Their groups have the same sums of counter and column, at shifted columns."""
    counters = counters_of(np.arange(1 << 12))
    kept = keep_mask(counters, jnp.full(len(counters), 0.5), 256)
    others = keep_mask(counters_from(counters, PERIOD), jnp.full(len(counters), 0.5), 256)
    assert deviations(np.asarray(kept[:, PERIOD:] == others[:, :-PERIOD]), 0.5) < 4.5


@pytest.mark.long
def test_a_tile_has_the_draws_of_its_columns():
    counters = counters_of(np.arange(8))[:, None]
    whole = draws(counters, salts(counters), jnp.arange(96)[None])
    tile = draws(counters_from(counters, 64), salts(counters), jnp.arange(32)[None])
    np.testing.assert_array_equal(tile, whole[:, 64:])


@pytest.mark.parametrize("columns", [slice(0, 64), slice(32, 96), slice(160, 256)], ids=str)
def test_a_mask_from_a_later_column_on_is_a_slice_of_the_whole_mask(columns):
    counters = counters_of(np.arange(TOKENS))
    of_columns = partial(keep_mask, counters, jnp.full(TOKENS, 0.5))
    width = columns.stop - columns.start
    whole, traced = of_columns(COLUMNS), jax.jit(partial(of_columns, width))
    np.testing.assert_array_equal(of_columns(width, columns.start), whole[:, columns])
    np.testing.assert_array_equal(traced(jnp.int32(columns.start)), whole[:, columns])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("threshold", [-KEEP_ALL, 1 - KEEP_ALL, -1, 0, 1, 26214, KEEP_ALL - 1])
def test_packed_selection_is_selection(threshold, dtype):
    drawn = (jnp.arange(1 << 16, dtype=jnp.int32) - (1 << 15)) << 16 | 0x1234
    value = jax.random.normal(jax.random.key(0), drawn.shape, dtype).at[5:].set(jnp.nan)
    packed, expected = (f(value, drawn, jnp.int32(threshold)) for f in (_select_packed, _select))
    np.testing.assert_array_equal(packed.view(jnp.uint16), expected.view(jnp.uint16))


def test_no_two_tokens_of_a_long_sequence_share_a_mask():
    rows = mask(positions=np.arange(4096), columns=64)
    assert len(np.unique(np.packbits(rows, axis=1), axis=0)) == 4096


def test_a_wider_module_extends_the_mask_of_a_narrower_one():
    np.testing.assert_array_equal(mask(columns=64), mask(columns=256)[:, :64])


@pytest.mark.long
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
