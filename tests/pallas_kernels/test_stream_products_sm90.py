"""The row and column products for Hopper GPUs: values in interpret mode, and lowering of real
shapes."""

import jax.numpy as jnp
import numpy as np
import pytest
from grouped_lora_cases import ROUTINGS, abstract, normals, owned_chunks

from jaxmux.pallas_kernels.counter_dropout import keep_mask
from jaxmux.pallas_kernels.grouped_lora.column_products_sm90 import (
    ColumnOperands,
    ColumnTiling,
    column_products,
)
from jaxmux.pallas_kernels.grouped_lora.dropout_sm90 import Masks
from jaxmux.pallas_kernels.grouped_lora.row_products_sm90 import (
    RowOperands,
    RowTiling,
    row_products,
)
from jaxmux.pallas_kernels.grouped_lora.tilings import row_tiling

TOKENS, CHUNKS, SLOTS, RANK = 512, 4, 3, 16
ROW_TILING = RowTiling(tile_m=64, tile_k=64, stages=3)
COLUMN_TILING = ColumnTiling(stripe=64, tile_rows=64, stages=3)
MORE_ROUTINGS = ROUTINGS | {
    "spans of a tile and of several": (0, 1, 1, -1, 1, 0, 0, 2),
    "empty around single tiles": (-1, 2, -1, 2, 0, -1, -1, 2),
}
SCALE = (0.5, 2.0, 1.0)


def integers(rng, *shape, dtype=jnp.bfloat16):
    """Values whose products and sums are exact in float32, so that results can be equal."""
    return jnp.asarray(rng.integers(-4, 5, size=shape), dtype)


def row_operands(rng, width, ranks=(RANK,)) -> RowOperands:
    return RowOperands(
        integers(rng, TOKENS, width), tuple(integers(rng, SLOTS, rank, width) for rank in ranks)
    )


def column_operands(rng, width, ranks=(RANK,), rank_major=False, values=integers) -> ColumnOperands:
    def accumulator(rank):
        shape = (rank, width) if rank_major else (width, rank)
        return values(rng, SLOTS, *shape, dtype=jnp.float32)

    return ColumnOperands(
        values(rng, TOKENS, width),
        tuple(values(rng, rank, TOKENS) for rank in ranks),
        tuple(map(accumulator, ranks)),
        rank_major,
    )


def multiply_rows(groups, chunk_slot, tiling=ROW_TILING):
    slots, scale = jnp.asarray(chunk_slot), jnp.asarray(SCALE)
    return row_products(tuple(groups), slots, scale, tiling=tiling)


def assert_row_products(results, group: RowOperands, chunk_slot):
    z = np.asarray(group.z, np.float32)
    for result, factor in zip(results, group.factors, strict=True):
        expected = np.zeros((factor.shape[1], TOKENS), np.float32)
        for slot, rows in owned_chunks(chunk_slot, TOKENS):
            expected[:, rows] = SCALE[slot] * np.asarray(factor[slot], np.float32) @ z[rows].T
        assert result.dtype == factor.dtype
        np.testing.assert_array_equal(result, expected.astype(result.dtype))


def assert_column_products(results, group: ColumnOperands, chunk_slot):
    z = np.asarray(group.z, np.float32)
    for result, low, accumulator in zip(results, group.lows, group.accumulators, strict=True):
        expected = np.array(accumulator)
        for slot, rows in owned_chunks(chunk_slot, TOKENS):
            gradient = z[rows].T @ np.asarray(low, np.float32)[:, rows].T
            expected[slot] += gradient.T if group.rank_major else gradient
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("chunk_slot", MORE_ROUTINGS.values(), ids=MORE_ROUTINGS)
def test_row_products_are_those_of_each_chunks_owner(chunk_slot, interpret):
    group = row_operands(np.random.default_rng(0), 256)
    [result] = multiply_rows([group], chunk_slot)
    assert_row_products(result, group, chunk_slot)


@pytest.mark.parametrize("tile_m", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_row_products_are_scaled_in_float32_and_rounded_once(tile_m, interpret):
    rng, chunk_slot = np.random.default_rng(9), (1, 0, -1, 2)
    group = RowOperands(normals(rng, TOKENS, 128), (normals(rng, SLOTS, RANK, 128),))
    scale = jnp.asarray((1 / 3, 0.7, 1.1))
    [[result]] = row_products(
        (group,),
        jnp.asarray(chunk_slot),
        scale,
        tiling=RowTiling(tile_m=tile_m, tile_k=64, stages=2),
    )
    for slot, rows in owned_chunks(chunk_slot, TOKENS):
        product = np.float64(scale[slot]) * np.float64(group.factors[0][slot])
        expected = product @ np.float64(group.z[rows]).T
        # Half a unit in the last place of bfloat16, and the error of the float32 sum.
        np.testing.assert_allclose(np.float64(result[:, rows]), expected, rtol=2**-8, atol=1e-4)


@pytest.mark.long
def test_row_products_of_several_activations_and_factors(interpret):
    rng, chunk_slot = np.random.default_rng(1), (2, 0, -1, 2)
    groups = (row_operands(rng, 256, ranks=(16, 8, 24)), row_operands(rng, 128, ranks=(32,)))
    results = multiply_rows(groups, chunk_slot)
    for result, group in zip(results, groups, strict=True):
        assert_row_products(result, group, chunk_slot)


@pytest.mark.parametrize("rank_major", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("chunk_slot", MORE_ROUTINGS.values(), ids=MORE_ROUTINGS)
def test_column_products_are_added_to_each_chunks_owner(chunk_slot, rank_major, interpret):
    group = column_operands(np.random.default_rng(0), 128, rank_major=rank_major)
    [result] = column_products((group,), jnp.asarray(chunk_slot), tiling=COLUMN_TILING)
    assert_column_products(result, group, chunk_slot)


@pytest.mark.long
def test_column_products_of_several_groups_in_one_launch(interpret):
    rng, chunk_slot = np.random.default_rng(1), (2, 0, -1, 2)
    groups = (
        column_operands(rng, 128, ranks=(16, 8, 24)),
        column_operands(rng, 192, rank_major=True),
        column_operands(rng, 64, ranks=(8, 16), rank_major=True),
    )
    results = column_products(groups, jnp.asarray(chunk_slot), tiling=COLUMN_TILING)
    for result, group in zip(results, groups, strict=True):
        assert_column_products(result, group, chunk_slot)


def dropout(rng, modules, first_column=None) -> Masks:
    counters = rng.integers(2**32, size=(modules, TOKENS))
    rate = jnp.asarray((0.5, 0.0, 0.75))
    return Masks(tuple(jnp.asarray(counters, jnp.uint32)), rate, first_column)


def dropped(z, masks: Masks, module, chunk_slot):
    """The activation after the dropout for one of its products."""
    rate = jnp.repeat(masks.rate[jnp.asarray(chunk_slot)], TOKENS // len(chunk_slot))
    keep = keep_mask(masks.counters[module], rate, z.shape[1], masks.first_column)
    return jnp.where(keep, z, 0)


@pytest.mark.long
@pytest.mark.parametrize("tile_k", [pytest.param(64, marks=pytest.mark.slow), 128])
def test_row_products_of_dropped_activations(tile_k, interpret):
    rng, chunk_slot = np.random.default_rng(7), (2, 0, -1, 1)
    group = row_operands(rng, 256, ranks=(16, 8))._replace(masks=dropout(rng, 2))
    kept = row_operands(rng, 128)
    tiling = RowTiling(tile_m=64, tile_k=tile_k, stages=2)
    results, results_of_kept = multiply_rows([group, kept], chunk_slot, tiling)
    for i, result in enumerate(results):
        alone = RowOperands(dropped(group.z, group.masks, i, chunk_slot), group.factors[i : i + 1])
        assert_row_products([result], alone, chunk_slot)
    assert_row_products(results_of_kept, kept, chunk_slot)


# In the last case there is one thread block for each of the interpreter's multiprocessors.
@pytest.mark.long
@pytest.mark.parametrize(
    ("tile_rows", "width", "lows"),
    [
        (64, 128, 2),
        pytest.param(128, 128, 2, marks=pytest.mark.slow),
        (128, 64, 1),
    ],
)
def test_column_products_of_dropped_activations(tile_rows, width, lows, interpret):
    rng, chunk_slot = np.random.default_rng(8), (2, 0, -1, 1)
    group = column_operands(rng, width, ranks=(RANK,) * lows)._replace(masks=dropout(rng, lows))
    kept = column_operands(rng, 64, rank_major=True)
    results, results_of_kept = column_products(
        (group, kept),
        jnp.asarray(chunk_slot),
        tiling=ColumnTiling(tile_rows=tile_rows, stages=2),
    )
    for i, result in enumerate(results):
        one = slice(i, i + 1)
        z = dropped(group.z, group.masks, i, chunk_slot)
        alone = ColumnOperands(z, group.lows[one], group.accumulators[one], False)
        assert_column_products([result], alone, chunk_slot)
    assert_column_products(results_of_kept, kept, chunk_slot)


@pytest.mark.long
def test_products_of_dropped_activations_whose_columns_begin_later(interpret):
    rng, chunk_slot = np.random.default_rng(12), (2, 0, -1, 1)
    masks = dropout(rng, 1, first_column=jnp.int32(96))
    rows, columns = (f(rng, 128)._replace(masks=masks) for f in (row_operands, column_operands))
    [low] = multiply_rows([rows], chunk_slot)
    [grads] = column_products((columns,), jnp.asarray(chunk_slot), tiling=COLUMN_TILING)
    z_rows, z_columns = (dropped(each.z, masks, 0, chunk_slot) for each in (rows, columns))
    assert_row_products(low, rows._replace(z=z_rows), chunk_slot)
    assert_column_products(grads, columns._replace(z=z_columns), chunk_slot)


@pytest.mark.long
def test_column_products_of_more_ranks_than_registers(interpret):
    rng, chunk_slot = np.random.default_rng(11), (0, 1, -1, 0)
    group = column_operands(rng, 64, ranks=(128, 72))
    [results] = column_products((group,), jnp.asarray(chunk_slot))
    assert_column_products(results, group, chunk_slot)


@pytest.mark.long
def test_nan_of_one_task_and_of_empty_chunks_reaches_no_other(interpret):
    rng, chunk_slot = np.random.default_rng(3), (0, 1, -1, 1)
    size = TOKENS // CHUNKS
    poisoned = np.r_[0:size, 2 * size : 3 * size]
    rows, columns = row_operands(rng, 128), column_operands(rng, 128)
    rows = RowOperands(rows.z.at[poisoned].set(jnp.nan), (rows.factors[0].at[0].set(jnp.nan),))
    columns = columns._replace(
        z=rows.z,
        lows=(columns.lows[0].at[:, poisoned].set(jnp.nan),),
        accumulators=(columns.accumulators[0].at[0].set(jnp.nan),),
    )
    [[low]] = multiply_rows([rows], chunk_slot)
    [[grads]] = column_products((columns,), jnp.asarray(chunk_slot), tiling=COLUMN_TILING)
    by_chunk = np.isnan(low.T).reshape(CHUNKS, -1)
    assert by_chunk.all(axis=1).tolist() == [True, False, False, False]
    assert by_chunk.any(axis=1).tolist() == [True, False, False, False]
    assert np.isnan(grads).any(axis=(1, 2)).tolist() == [True, False, False]


def test_scale_of_an_idle_slot_reaches_no_row(interpret):
    group, slots = row_operands(np.random.default_rng(10), 128), jnp.asarray((0, -1, -1, 2))
    [[low]], [[same]] = (
        row_products((group,), slots, jnp.asarray(scale), tiling=ROW_TILING)
        for scale in ((1.0, 1.0, 2.0), (1.0, jnp.nan, 2.0))
    )
    np.testing.assert_array_equal(low, same)
    assert not np.any(low[:, TOKENS // CHUNKS : 3 * TOKENS // CHUNKS])


def test_slot_without_chunks_keeps_its_bits(interpret):
    group = column_operands(np.random.default_rng(4), 64)
    bits = np.array(group.accumulators[0]).view(np.uint32)
    bits[2, 0, :4] = 0x80000000, 0x7FC12345, 0xFF800000, 0x00000001
    group = group._replace(accumulators=(jnp.asarray(bits.view(np.float32)),))
    [[result]] = column_products((group,), jnp.asarray((0, 1, -1, 0)), tiling=COLUMN_TILING)
    np.testing.assert_array_equal(np.asarray(result).view(np.uint32)[2], bits[2])


def test_bits_of_a_tasks_sum_do_not_depend_on_its_neighbours(interpret):
    group = column_operands(np.random.default_rng(5), 64, values=normals)
    half = TOKENS // 2

    def rows_at(*starts):
        return np.concatenate([np.arange(start, start + half // 2) for start in starts])

    def sums(rows, chunk_slot):
        """The accumulator of task 1, which owns `rows`; all other rows are NaN."""
        z = jnp.full_like(group.z, jnp.nan).at[rows].set(group.z[:half])
        low = jnp.full_like(group.lows[0], jnp.nan).at[:, rows].set(group.lows[0][:, :half])
        [[result]] = column_products(
            (group._replace(z=z, lows=(low,)),),
            jnp.asarray(chunk_slot),
            tiling=COLUMN_TILING,
        )
        return result[1]

    alone = sums(rows_at(0, half // 2), (1, 1, -1, -1))
    apart = sums(rows_at(half // 2, 3 * half // 2), (-1, 1, -1, 1))
    among_others = sums(rows_at(0, 3 * half // 2), (1, 0, 2, 1))
    np.testing.assert_array_equal(alone, apart)
    np.testing.assert_array_equal(alone, among_others)


def test_tilings_that_do_not_fit_are_refused():
    rng = np.random.default_rng(6)
    slots, scale = jnp.zeros(CHUNKS, jnp.int32), jnp.asarray(SCALE)
    with pytest.raises(ValueError, match="192 columns"):
        row_products((row_operands(rng, 192),), slots, scale, tiling=RowTiling(tile_k=128))
    with pytest.raises(ValueError, match="tile_m = 256"):
        row_products((row_operands(rng, 128),), slots, scale, tiling=RowTiling(tile_m=256))
    with pytest.raises(ValueError, match="stripe = 128"):
        column_products((column_operands(rng, 192),), slots, tiling=ColumnTiling(stripe=128))
    with pytest.raises(ValueError, match="shared memory"):
        row_products(
            (row_operands(rng, 512),), slots, scale, tiling=RowTiling(tile_m=128, tile_k=512)
        )


def tiled_row_products(group: RowOperands, chunk_slot, scale):
    return row_products((group,), chunk_slot, scale, tiling=row_tiling(group))


# Every pair of a width and a rank, of a width and a number of slots, of a rank and such a number.
REAL = [
    (width, rank, (1, 4, 16)[(i + j) % 3])
    for i, width in enumerate((1024, 4096, 14336))
    for j, rank in enumerate((16, 64, 128))
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("width", "rank", "slots"),
    [REAL[4], *(pytest.param(*own, marks=pytest.mark.slow) for own in REAL if own != REAL[4])],
)
def test_real_shapes_lower(width, rank, slots, lowered):
    z, factor, low = abstract(8192, width), abstract(slots, rank, width), abstract(rank, 8192)
    chunk_slot, scale = abstract(64, dtype=jnp.int32), abstract(slots, dtype=jnp.float32)
    for modules in (1, 3):
        group = RowOperands(z, (factor,) * modules)
        lowered(tiled_row_products, group, chunk_slot, scale)
        accumulators = (abstract(slots, width, rank, dtype=jnp.float32),) * modules
        lowered(
            lambda z, lows, g, c: column_products((ColumnOperands(z, lows, g, False),), c),
            *(z, (low,) * modules, accumulators, chunk_slot),
        )


# With dropout, rank 128 of three modules is refused.
@pytest.mark.long
@pytest.mark.parametrize(
    ("width", "rank", "slots", "columns_begin_later"),
    [
        pytest.param(14336, 64, 4, False, marks=pytest.mark.slow),
        (4096, 64, 16, True),
        pytest.param(1024, 16, 1, False, marks=pytest.mark.slow),
        pytest.param(14336, 16, 16, True, marks=pytest.mark.slow),
    ],
)
def test_real_shapes_with_dropout_lower(width, rank, slots, columns_begin_later, lowered):
    counters = (abstract(8192, dtype=jnp.uint32),) * 3
    first_column = abstract(dtype=jnp.int32) if columns_begin_later else None
    masks = Masks(counters, abstract(slots, dtype=jnp.float32), first_column)
    z, chunk_slot = abstract(8192, width), abstract(64, dtype=jnp.int32)
    group, scale = (
        RowOperands(z, (abstract(slots, rank, width),) * 3, masks),
        abstract(slots, dtype=jnp.float32),
    )
    lowered(tiled_row_products, group, chunk_slot, scale)
    accumulators = (abstract(slots, width, rank, dtype=jnp.float32),) * 3
    lowered(
        lambda z, lows, g, masks, c: column_products(
            (ColumnOperands(z, lows, g, False, masks),), c
        ),
        *(z, (abstract(rank, 8192),) * 3, accumulators, masks, chunk_slot),
    )


def test_accumulators_are_updated_in_place(lowered):
    group = (
        abstract(8192, 1024),
        (abstract(16, 8192),),
        (abstract(4, 1024, 16, dtype=jnp.float32),),
    )
    text = lowered(
        lambda group, c: column_products((ColumnOperands(*group, False),), c),
        group,
        abstract(64, dtype=jnp.int32),
    )
    assert "output_operand_aliases = [#stablehlo.output_operand_alias<" in text
