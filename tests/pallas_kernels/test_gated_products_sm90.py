"""The fused gated activation for Hopper GPUs: values in interpret mode, and lowering of real
shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_lora_cases import ROUTINGS, abstract, normals, owned_chunks

from jaxmux.pallas_kernels.grouped_lora.gated_backward_sm90 import BackwardTiling, gated_backward
from jaxmux.pallas_kernels.grouped_lora.gated_forward_sm90 import (
    ForwardTiling,
    forward_tiling,
    gated_forward,
)

TOKENS, WIDTH, CHUNKS, SLOTS, RANK = 512, 256, 4, 3, 16
FEW_ROUTINGS = [
    pytest.param(own, marks=() if name == "empty in the middle" else pytest.mark.slow, id=name)
    for name, own in ROUTINGS.items()
]
# Columns of one thread block of the backward kernel.
STRIPE = 128


def forward_arguments(rng, width=WIDTH) -> dict:
    return dict(
        gate=normals(rng, TOKENS, width),
        up=normals(rng, TOKENS, width),
        a=normals(rng, SLOTS, RANK, width),
    )


def backward_arguments(rng, rank=RANK, width=STRIPE) -> dict:
    rank_major = (2 * SLOTS, rank, width)
    shapes = rank_major, rank_major, (2 * SLOTS, width, rank)
    return dict(
        gate=normals(rng, TOKENS, width),
        up=normals(rng, TOKENS, width),
        dh=normals(rng, TOKENS, width),
        b=tuple(normals(rng, SLOTS, rank, width) for _ in range(2)),
        lows=tuple(normals(rng, rank, TOKENS) for _ in range(3)),
        accumulators=tuple(normals(rng, *shape, dtype=jnp.float32) for shape in shapes),
    )


def forward(arguments, chunk_slot, splits=1, tile_k=64):
    tiling = ForwardTiling(tile_k, splits, stages=2)
    return gated_forward(**arguments, chunk_slot=jnp.asarray(chunk_slot), tiling=tiling)


def backward(arguments, chunk_slot):
    """Runs the kernel with the accumulators of two layers, and the places of the second."""
    chunk_slot = jnp.asarray(chunk_slot)
    chunk_place = jnp.where(chunk_slot < 0, -1, SLOTS + chunk_slot)
    return gated_backward(
        **arguments,
        chunk_slot=chunk_slot,
        chunk_place=chunk_place,
        tiling=BackwardTiling(stages=3),
    )


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


def float32(x):
    return np.asarray(x, np.float32)


def empty_rows(chunk_slot):
    return np.repeat(np.asarray(chunk_slot) < 0, TOKENS // len(chunk_slot))


def assert_rounded(result, expected):
    """The result is bfloat16 and within its rounding error of the expected float32 value."""
    assert result.dtype == jnp.bfloat16
    np.testing.assert_allclose(float32(result), expected, rtol=2**-8, atol=1e-30)


@pytest.mark.long
@pytest.mark.parametrize("chunk_slot", FEW_ROUTINGS)
def test_forward_is_the_activation_and_its_product_with_the_owners_factor(chunk_slot, interpret):
    arguments = forward_arguments(np.random.default_rng(0))
    h, sums = forward(arguments, chunk_slot)
    expected = float32(swiglu(float32(arguments["gate"]), float32(arguments["up"])))
    assert_rounded(h, np.where(empty_rows(chunk_slot)[:, None], 0, expected))
    product = np.zeros((RANK, TOKENS), np.float32)
    for slot, rows in owned_chunks(chunk_slot, TOKENS):
        product[:, rows] = float32(arguments["a"][slot]) @ float32(h[rows]).T
    np.testing.assert_allclose(np.sum(sums, axis=0), product, rtol=1e-5, atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("chunk_slot", FEW_ROUTINGS)
def test_backward_is_the_gradient_of_the_activation(chunk_slot, interpret):
    arguments = backward_arguments(np.random.default_rng(1))
    gradients, _, _ = backward(arguments, chunk_slot)
    gate, up, dh = (float32(arguments[name]) for name in ("gate", "up", "dh"))
    expected = jax.vjp(swiglu, gate, up)[1](dh)
    for gradient, reference in zip(gradients, expected, strict=True):
        reference = np.where(empty_rows(chunk_slot)[:, None], 0, reference)
        assert_rounded(gradient, reference)


@pytest.mark.long
@pytest.mark.parametrize(
    "rank, width, chunk_slot",
    [
        *(
            pytest.param(RANK, STRIPE, chunk_slot, marks=pytest.mark.slow)
            for chunk_slot in ROUTINGS.values()
        ),
        (RANK, 2 * STRIPE, (0, 1, 1, -1, 1, 0, 0, 2)),
        pytest.param(RANK, STRIPE, (-1, 2, -1, 2, 0, -1, -1, 2), marks=pytest.mark.slow),
        (64, STRIPE, (0, 1, 1, -1, 1, 0, 0, 2)),
    ],
)
def test_backward_products_are_those_of_each_chunks_owner(rank, width, chunk_slot, interpret):
    arguments = backward_arguments(np.random.default_rng(2), rank, width)
    gradients, sums, accumulators = backward(arguments, chunk_slot)
    gates = dict(gate=arguments["gate"], up=arguments["up"])
    h, _ = forward(gates | dict(a=arguments["b"][0]), (0,) * CHUNKS)
    for gradient, partial_sums, b in zip(gradients, sums, arguments["b"], strict=True):
        expected = np.zeros((rank, TOKENS), np.float32)
        for slot, rows in owned_chunks(chunk_slot, TOKENS):
            expected[:, rows] = float32(b[slot]) @ float32(gradient[rows]).T
        assert partial_sums.dtype == jnp.bfloat16
        error = 2**-8 * np.abs(float32(partial_sums)).sum(axis=0)
        assert np.all(np.abs(float32(partial_sums).sum(axis=0) - expected) <= error + 1e-3)
    expected = [np.array(each) for each in arguments["accumulators"]]
    for slot, rows in owned_chunks(chunk_slot, TOKENS):
        s_gate, s_up, ds_down = (float32(low[:, rows]) for low in arguments["lows"])
        expected[0][SLOTS + slot] += s_gate @ float32(gradients[0][rows])
        expected[1][SLOTS + slot] += s_up @ float32(gradients[1][rows])
        expected[2][SLOTS + slot] += float32(h[rows]).T @ ds_down.T
    for result, reference in zip(accumulators, expected, strict=True):
        np.testing.assert_allclose(result, reference, rtol=1e-5, atol=1e-3)


@pytest.mark.long
def test_rounded_partial_sums_add_up_to_a_sum_rounded_once(interpret):
    rng, (rows, width) = np.random.default_rng(8), (64, 1024)
    db, da = normals(rng, 1, RANK, width), normals(rng, 1, width, RANK)
    b = tuple(normals(rng, 1, RANK, width) for _ in range(2))
    index = jnp.zeros(1, jnp.int32)
    gradients, sums, _ = gated_backward(
        *(normals(rng, rows, width) for _ in range(3)),
        *(b, tuple(normals(rng, RANK, rows) for _ in range(3))),
        tuple(each.astype(jnp.float32) for each in (db, db, da)),
        *(index, index),
    )
    for gradient, partial_sums, factor in zip(gradients, sums, b, strict=True):
        exact = np.float64(factor[0]) @ np.float64(gradient).T
        once = np.float64(jnp.asarray(exact, jnp.bfloat16)) - exact
        result = partial_sums.sum(axis=0, dtype=jnp.float32).astype(jnp.bfloat16)
        # The sum of the rounded partial sums is rounded too, like `once`.
        assert np.std(np.float64(result) - exact) < 1.6 * np.std(once)


@pytest.mark.long
def test_splits_of_the_columns_add_up(interpret):
    arguments = forward_arguments(np.random.default_rng(3))
    h, sums = forward(arguments, (0, 2, -1, 1))
    same_h, split_sums = forward(arguments, (0, 2, -1, 1), splits=2)
    np.testing.assert_array_equal(h, same_h)
    assert split_sums.shape == (2, RANK, TOKENS)
    np.testing.assert_allclose(np.sum(split_sums, axis=0), sums[0], rtol=1e-5, atol=1e-3)


@pytest.mark.long
def test_long_loads_give_the_same(interpret):
    arguments = forward_arguments(np.random.default_rng(9), 2 * WIDTH)
    h, sums = forward(arguments, (0, 2, -1, 1))
    same_h, same_sums = forward(arguments, (0, 2, -1, 1), tile_k=128)
    np.testing.assert_array_equal(h, same_h)
    np.testing.assert_allclose(sums, same_sums, rtol=1e-5, atol=1e-3)


def test_loads_are_long_where_the_width_is_a_multiple_and_three_fit():
    assert [forward_tiling(14336, rank).tile_k for rank in (16, 32, 48, 64)] == [128, 128, 64, 64]
    assert forward_tiling(256 + 128, RANK).tile_k == 64


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_extreme_gates_give_no_nan(interpret):
    rng, chunk_slot = np.random.default_rng(4), (0, 1, 2, 0)
    gates = np.array([0.0, -0.0, 1e-38, 20, 200, 3e38], np.float32)
    gates = jnp.asarray(np.r_[gates, -gates], jnp.bfloat16)
    gate = jnp.resize(gates, (TOKENS, STRIPE))
    arguments = backward_arguments(rng) | dict(gate=gate)
    gradients, _, _ = backward(arguments, chunk_slot)
    h, _ = forward(dict(gate=gate, up=arguments["up"], a=arguments["b"][0]), chunk_slot)
    up, dh = float32(arguments["up"]), float32(arguments["dh"])
    on, off = float32(gate) >= 20, float32(gate) <= -100
    for result, where_on in zip(
        (h, *gradients), (float32(gate) * up, dh * up, float32(gate) * dh), strict=True
    ):
        assert not np.isnan(result).any()
        np.testing.assert_allclose(float32(result)[on], where_on[on], rtol=2**-8)
        np.testing.assert_array_equal(float32(result)[off], 0)


@pytest.mark.long
def test_nan_of_one_task_and_of_empty_chunks_reaches_no_other(interpret):
    rng, chunk_slot = np.random.default_rng(5), (0, 1, -1, 1)
    size = TOKENS // CHUNKS
    poisoned = np.r_[0:size, 2 * size : 3 * size]
    arguments = backward_arguments(rng)
    for name in ("gate", "up", "dh"):
        arguments[name] = arguments[name].at[poisoned].set(jnp.nan)
    arguments["b"] = tuple(b.at[0].set(jnp.nan) for b in arguments["b"])
    arguments["lows"] = tuple(low.at[:, poisoned].set(jnp.nan) for low in arguments["lows"])
    h, h_sums = forward(
        dict(gate=arguments["gate"], up=arguments["up"], a=arguments["b"][0]), chunk_slot
    )
    gradients, sums, accumulators = backward(arguments, chunk_slot)
    all_sums = (each.T for each in (*h_sums, *sums[0], *sums[1]))
    for rows in (h, *gradients, *all_sums):
        by_chunk = np.isnan(float32(rows)).reshape(CHUNKS, -1)
        assert by_chunk.all(axis=1).tolist() == [True, False, False, False]
        assert by_chunk.any(axis=1).tolist() == [True, False, False, False]
    for accumulator in accumulators:
        has_nan = np.isnan(accumulator).any(axis=(1, 2))
        assert has_nan.tolist() == [False] * SLOTS + [True, False, False]


def test_slot_without_chunks_keeps_its_bits(interpret):
    arguments = backward_arguments(np.random.default_rng(6))
    bits = [np.array(each).view(np.uint32) for each in arguments["accumulators"]]
    for each in bits:
        each[SLOTS + 2, 0, :4] = 0x80000000, 0x7FC12345, 0xFF800000, 0x00000001
    arguments["accumulators"] = tuple(jnp.asarray(each.view(np.float32)) for each in bits)
    _, _, accumulators = backward(arguments, (0, 1, -1, 0))
    for result, before in zip(accumulators, bits, strict=True):
        idle = np.r_[0:SLOTS, SLOTS + 2]
        np.testing.assert_array_equal(np.asarray(result).view(np.uint32)[idle], before[idle])


def test_bits_of_a_tasks_sum_do_not_depend_on_its_neighbours(interpret):
    arguments = backward_arguments(np.random.default_rng(7))
    *_, alone = backward(arguments, (-1, 1, -1, 1))
    *_, shared = backward(arguments, (0, 1, 2, 1))
    for one, other in zip(alone, shared, strict=True):
        np.testing.assert_array_equal(one[SLOTS + 1], other[SLOTS + 1])


def test_shapes_that_do_not_fit_are_refused():
    slots = jnp.zeros(CHUNKS, jnp.int32)

    def forward_of(width, rank):
        z, a = jnp.zeros((TOKENS, width), jnp.bfloat16), jnp.zeros((SLOTS, rank, width))
        gated_forward(z, z, a.astype(z.dtype), slots)

    with pytest.raises(ValueError, match="192 columns"):
        forward_of(192, RANK)
    with pytest.raises(ValueError, match="rank 8"):
        forward_of(WIDTH, 8)
    with pytest.raises(ValueError, match="512 rows in 8 chunks"):
        z = jnp.zeros((TOKENS, WIDTH), jnp.bfloat16)
        a = jnp.zeros((SLOTS, RANK, WIDTH), jnp.bfloat16)
        gated_forward(z, z, a, jnp.zeros(8, jnp.int32))


REAL = [
    (48, 16),
    *(pytest.param(*own, marks=pytest.mark.slow) for own in ((16, 1), (32, 4), (64, 4))),
]


@pytest.mark.long
@pytest.mark.parametrize(("rank", "slots"), REAL)
def test_real_shapes_lower(rank, slots, lowered):
    rows, width = 8192, 14336
    z, factor, low = abstract(rows, width), abstract(slots, rank, width), abstract(rank, rows)
    index = abstract(64, dtype=jnp.int32)
    lowered(gated_forward, z, z, factor, index)
    db = abstract(2 * slots, rank, width, dtype=jnp.float32)
    da = abstract(2 * slots, width, rank, dtype=jnp.float32)
    text = lowered(
        gated_backward, *(z, z, z, (factor,) * 2, (low,) * 3, (db, db, da)), index, index
    )
    assert "output_operand_aliases = [#stablehlo.output_operand_alias<" in text
