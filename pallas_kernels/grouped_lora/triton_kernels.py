"""The three Triton kernels of `triton.py`; two of them serve the forward and the backward pass.

Every tile of rows lies in one chunk and so belongs to one slot. A program loads only the factors of
that slot, and none for a tile of an empty chunk (slot -1). The kernels that serve several
projections take three pointers for each kind of array; `MODULES` is the number that is used.
"""

import triton
import triton.language as tl

# Constants of `counter_dropout`: _GOLDEN, powers 1, 2 and 4 of _MULTIPLIER, and the multipliers of
# its hashes.
_GOLDEN = tl.constexpr(0x9E3779B9)
_POWERS = tl.constexpr((2891336453, 894955033, 208698993))
_MIX = tl.constexpr(0x85EBCA6B)
_SALT = tl.constexpr(0xC2B2AE35)


@triton.jit
def low_rank_kernel(
    x_ptr,
    chunk_slot_ptr,
    scale_ptr,
    factors_ptr,
    counters_ptr,
    rate_ptr,
    out_0_ptr,
    out_1_ptr,
    out_2_ptr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNK_LEN: tl.constexpr,
    STRIDE_WIDTH: tl.constexpr,
    STRIDE_RANK: tl.constexpr,
    MODULES: tl.constexpr,
    DROPOUT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`out_m = scale[t] · dropout_m(x) F[m, t]`: [N, r] from x [N, WIDTH]; zeros in empty chunks.

    F is [MODULES, T, ...] with the given strides: A in the forward pass, B^T in the backward pass.
    One program computes TILE_M rows, for all modules.
    """
    row = tl.program_id(0) * TILE_M
    slot = tl.load(chunk_slot_ptr + row // CHUNK_LEN)
    scale = tl.load(scale_ptr + slot, mask=slot >= 0, other=0.0)
    rate = tl.load(rate_ptr + slot, mask=DROPOUT and slot >= 0, other=0.0)
    rows, ranks, depth = tl.arange(0, TILE_M), tl.arange(0, RANK), tl.arange(0, TILE_K)
    x_tile = x_ptr + row.to(tl.int64) * WIDTH + rows[:, None] * WIDTH + depth[None, :]
    factor_tile = (
        factors_ptr
        + slot.to(tl.int64) * (WIDTH * RANK)
        + depth[:, None] * STRIDE_WIDTH
        + ranks[None, :] * STRIDE_RANK
    )
    sums = ()
    for _ in tl.static_range(MODULES):
        sums = sums + (tl.zeros((TILE_M, RANK), tl.float32),)
    for start in range(0, tl.where(slot >= 0, WIDTH, 0), TILE_K):
        x = tl.load(x_tile + start)
        new_sums = ()
        for m in tl.static_range(MODULES):
            dropped = x
            if DROPOUT:
                counters = tl.load(counters_ptr + m * TOKENS + row + rows)
                dropped = _drop(x, counters, start + depth, rate)
            factor = tl.load(factor_tile + m * SLOTS * WIDTH * RANK + start * STRIDE_WIDTH)
            new_sums = new_sums + (tl.dot(dropped, factor, sums[m], input_precision=PRECISION),)
        sums = new_sums
    outs = (out_0_ptr, out_1_ptr, out_2_ptr)
    at = row.to(tl.int64) * RANK + rows[:, None] * RANK + ranks[None, :]
    for m in tl.static_range(MODULES):
        tl.store(outs[m] + at, (scale * sums[m]).to(x_ptr.dtype.element_ty))


@triton.jit
def routed_matmul_kernel(
    layer_ptr,
    chunk_slot_ptr,
    counters_ptr,
    rate_ptr,
    lhs_0_ptr,
    weight_0_ptr,
    low_0_ptr,
    factor_0_ptr,
    lhs_1_ptr,
    weight_1_ptr,
    low_1_ptr,
    factor_1_ptr,
    lhs_2_ptr,
    weight_2_ptr,
    low_2_ptr,
    factor_2_ptr,
    out_ptr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH_0: tl.constexpr,
    DEPTH_1: tl.constexpr,
    DEPTH_2: tl.constexpr,
    RANK: tl.constexpr,
    CHUNK_LEN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    MODULES: tl.constexpr,
    DROPOUT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    SLICE_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`out = Σ_m lhs_m W_m[layer] + dropout_m(low_m F_m[t])`: [N, COLUMNS] from lhs_m [N, DEPTH_m].

    W is [L, DEPTH, COLUMNS] and F [T, r, COLUMNS]; the last two dimensions of both are swapped if
    TRANSPOSED. One program computes one TILE_M x TILE_N tile; empty chunks get zeros.
    """
    row_tile, column_tile = _tile_of_program(TOKENS // TILE_M, COLUMNS // TILE_N, GROUP_M)
    row, column = row_tile * TILE_M, column_tile * TILE_N
    slot = tl.load(chunk_slot_ptr + row // CHUNK_LEN)
    layer = tl.load(layer_ptr).to(tl.int64)
    lhs = (lhs_0_ptr, lhs_1_ptr, lhs_2_ptr)
    weights = (weight_0_ptr, weight_1_ptr, weight_2_ptr)
    lows = (low_0_ptr, low_1_ptr, low_2_ptr)
    factors = (factor_0_ptr, factor_1_ptr, factor_2_ptr)
    depths: tl.constexpr = (DEPTH_0, DEPTH_1, DEPTH_2)
    rows, columns = tl.arange(0, TILE_M), tl.arange(0, TILE_N)
    out = out_ptr + row.to(tl.int64) * COLUMNS + rows[:, None] * COLUMNS + (column + columns)
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    if DROPOUT:
        rate = tl.load(rate_ptr + slot, mask=slot >= 0, other=0.0)
        # The sum of the masked products is first stored in the output's own tile, a slice at a
        # time: there are not enough registers for the accumulator, a second float32 tile and its
        # hashes.
        for start in tl.range(column, column + TILE_N, SLICE_N, num_stages=1):
            dropped = tl.zeros((TILE_M, SLICE_N), tl.float32)
            for m in tl.static_range(MODULES):
                low, factor = _low_rank_tiles(
                    lows[m], factors[m], slot, row, start,
                    RANK, COLUMNS, TRANSPOSED, TILE_M, SLICE_N,
                )  # fmt: skip
                product = tl.dot(low, factor, input_precision=PRECISION)
                counters = tl.load(counters_ptr + m * TOKENS + row + rows)
                dropped += _drop(product, counters, start + tl.arange(0, SLICE_N), rate)
            slice_ptr = out_ptr + row.to(tl.int64) * COLUMNS + rows[:, None] * COLUMNS
            slice_ptr += start + tl.arange(0, SLICE_N)[None, :]
            tl.store(slice_ptr, dropped.to(out_ptr.dtype.element_ty))
        tl.debug_barrier()
        total += tl.load(out)
    else:
        for m in tl.static_range(MODULES):
            low, factor = _low_rank_tiles(
                lows[m], factors[m], slot, row, column, RANK, COLUMNS, TRANSPOSED, TILE_M, TILE_N
            )
            total = tl.dot(low, factor, total, input_precision=PRECISION)
    for m in tl.static_range(MODULES):
        total = _add_product(
            total, lhs[m], weights[m] + layer * (depths[m] * COLUMNS), slot, row, column,
            depths[m], COLUMNS, TRANSPOSED, TILE_M, TILE_N, TILE_K, PRECISION,
        )  # fmt: skip
    tl.store(out, total.to(out_ptr.dtype.element_ty))


@triton.jit
def slot_gradient_kernel(
    layer_ptr,
    x_ptr,
    low_0_ptr,
    low_1_ptr,
    low_2_ptr,
    order_ptr,
    starts_ptr,
    counters_ptr,
    rate_ptr,
    before_0_ptr,
    before_1_ptr,
    before_2_ptr,
    after_0_ptr,
    after_1_ptr,
    after_2_ptr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    CHUNK_LEN: tl.constexpr,
    STRIDE_WIDTH: tl.constexpr,
    STRIDE_RANK: tl.constexpr,
    MODULES: tl.constexpr,
    DROPOUT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`after_m[layer, t] = before_m[layer, t] + dropout_m(x)^T low_m` over the tokens of slot t.

    `after` and `before` are the same array: the accumulator of A or of B, float32 [L, T, ...] with
    the given strides. Slot t's chunks are order[starts[t] : starts[t + 1]], in stream order; the
    array `order` has one entry more than there are chunks. One program computes TILE_K columns of x
    for one slot, so no two programs write to the same element, and accumulators of slots without
    chunks are not touched.
    """
    column, slot = tl.program_id(0) * TILE_K, tl.program_id(1)
    tiles: tl.constexpr = CHUNK_LEN // TILE_M
    first, last = tl.load(starts_ptr + slot), tl.load(starts_ptr + slot + 1)
    rate = tl.load(rate_ptr + slot, mask=DROPOUT, other=0.0)
    rows, ranks, columns = tl.arange(0, TILE_M), tl.arange(0, RANK), tl.arange(0, TILE_K)
    lows = (low_0_ptr, low_1_ptr, low_2_ptr)
    sums = ()
    for _ in tl.static_range(MODULES):
        sums = sums + (tl.zeros((TILE_K, RANK), tl.float32),)
    # The next chunk's index is loaded one iteration ahead: if the address of a load depended on
    # another load of the same iteration, only one tile would be in flight.
    chunk = tl.load(order_ptr + first)
    for i in range(first * tiles, last * tiles):
        row = chunk * CHUNK_LEN + (i % tiles) * TILE_M
        chunk = tl.load(order_ptr + (i + 1) // tiles)
        x_tile = x_ptr + row.to(tl.int64) * WIDTH + rows[:, None] * WIDTH + (column + columns)
        x = tl.load(x_tile)
        low_at = row.to(tl.int64) * RANK + rows[:, None] * RANK + ranks[None, :]
        new_sums = ()
        for m in tl.static_range(MODULES):
            dropped = x
            if DROPOUT:
                counters = tl.load(counters_ptr + m * TOKENS + row + rows)
                dropped = _drop(x, counters, column + columns, rate)
            low = tl.load(lows[m] + low_at)
            new_sums = new_sums + (
                tl.dot(tl.trans(dropped), low, sums[m], input_precision=PRECISION),
            )
        sums = new_sums
    place = tl.load(layer_ptr).to(tl.int64) * tl.num_programs(1) + slot
    at = place * (WIDTH * RANK) + (
        (column + columns)[:, None] * STRIDE_WIDTH + ranks[None, :] * STRIDE_RANK
    )
    accumulators = (after_0_ptr, after_1_ptr, after_2_ptr)
    for m in tl.static_range(MODULES):
        accumulator = accumulators[m] + at
        before = tl.load(accumulator, mask=first < last, other=0.0)
        tl.store(accumulator, before + sums[m], mask=first < last)


@triton.jit
def _tile_of_program(row_tiles, column_tiles, GROUP_M: tl.constexpr):
    """The row and column of a program's tile. Consecutive programs share GROUP_M tiles of rows, so
    that these stay in the L2 cache."""
    program = tl.program_id(0)
    group_size = GROUP_M * column_tiles
    first = program // group_size * GROUP_M
    height = min(row_tiles - first, GROUP_M)
    return first + program % group_size % height, program % group_size // height


@triton.jit
def _low_rank_tiles(
    low_ptr,
    factor_ptr,
    slot,
    row,
    column,
    RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """The tile's rows of `low` [TILE_M, r] and its slot's factor [r, TILE_N]; zeros for an empty
    chunk."""
    rows, ranks, columns = tl.arange(0, TILE_M), tl.arange(0, RANK), tl.arange(0, TILE_N)
    low = tl.load(
        low_ptr + row.to(tl.int64) * RANK + rows[:, None] * RANK + ranks[None, :],
        mask=slot >= 0,
        other=0.0,
    )
    factor = tl.load(
        factor_ptr
        + slot.to(tl.int64) * (RANK * COLUMNS)
        + ranks[:, None] * (1 if TRANSPOSED else COLUMNS)
        + (column + columns)[None, :] * (RANK if TRANSPOSED else 1),
        mask=slot >= 0,
        other=0.0,
    )
    return low, factor


@triton.jit
def _add_product(
    total,
    lhs_ptr,
    weight_ptr,
    slot,
    row,
    column,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`total + lhs W` for one tile, or `total` in an empty chunk; W is [DEPTH, COLUMNS] or its
    transpose."""
    rows, columns, depth = tl.arange(0, TILE_M), tl.arange(0, TILE_N), tl.arange(0, TILE_K)
    stride_depth: tl.constexpr = 1 if TRANSPOSED else COLUMNS
    stride_column: tl.constexpr = DEPTH if TRANSPOSED else 1
    lhs_tile = lhs_ptr + row.to(tl.int64) * DEPTH + rows[:, None] * DEPTH + depth[None, :]
    weight_tile = (
        weight_ptr
        + column.to(tl.int64) * stride_column
        + depth[:, None] * stride_depth
        + columns[None, :] * stride_column
    )
    for _ in range(0, tl.where(slot >= 0, DEPTH, 0), TILE_K):
        lhs, weight = tl.load(lhs_tile), tl.load(weight_tile)
        total = tl.dot(lhs, weight, total, input_precision=PRECISION)
        lhs_tile += TILE_K
        weight_tile += TILE_K * stride_depth
    return total


@triton.jit
def _drop(x, counters, columns, rate):
    """The dropout of `base._drop` for one tile, with the mask of `counter_dropout.keep_mask`."""
    group = ((columns >> 5) << 2) | ((columns >> 1) & 3)
    h = counters[:, None] + (group.to(tl.uint32) * _GOLDEN)[None, :]
    salt = (counters ^ (counters >> 15)) * _SALT
    h = (h ^ (h >> 16) ^ salt[:, None]) * _MIX
    draw = ((h ^ (h >> 15)) * _member_multiplier(columns)[None, :]).to(tl.int32, bitcast=True)
    keep = (draw >> 16) < 32768 - (rate * 65536.0 + 0.5).to(tl.int32)
    return tl.where(keep, x, 0.0)


@triton.jit
def _member_multiplier(columns):
    multiplier = tl.full(columns.shape, _POWERS[0], tl.uint32)
    multiplier *= tl.where(columns & 1 != 0, _POWERS[0], 1).to(tl.uint32)
    multiplier *= tl.where(columns & 8 != 0, _POWERS[1], 1).to(tl.uint32)
    multiplier *= tl.where(columns & 16 != 0, _POWERS[2], 1).to(tl.uint32)
    return multiplier
