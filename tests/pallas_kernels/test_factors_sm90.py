"""The preparation of factors for Hopper GPUs: values in interpret mode, and lowering of real
shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmux.pallas_kernels.grouped_lora.factors_sm90 import rank_major_factors

LAYERS, SLOTS = 3, 5


def pools(rng, rank: int, *shapes):
    """Pools of a pair of factors for each pair of widths (k, n)."""

    def normal(*shape):
        return jnp.asarray(rng.standard_normal((LAYERS, SLOTS, *shape)), jnp.float32)

    return tuple((normal(k, rank), normal(rank, n)) for k, n in shapes)


def reference(pools, layer: int, rank: int, dtype):
    """The results by plain XLA."""

    def padded(factor):
        missing = rank - factor.shape[1]
        return jnp.pad(factor.astype(dtype), ((0, 0), (0, missing), (0, 0)))

    return tuple((padded(a[layer].swapaxes(1, 2)), padded(b[layer])) for a, b in pools)


def assert_same(found, wanted):
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize(
    ("rank", "padded"),
    [
        (8, 16),
        (72, 128),
        (128, 128),
        *(
            pytest.param(*ranks, marks=pytest.mark.slow)
            for ranks in ((16, 16), (24, 32), (40, 48), (64, 64))
        ),
    ],
)
def test_factors_are_transposed_cast_and_padded_with_zeros(rank, padded, interpret):
    arrays = pools(np.random.default_rng(rank), rank, (512, 256))
    found = rank_major_factors(arrays, 1, rank=padded, dtype=jnp.bfloat16)
    assert_same(found, reference(arrays, 1, padded, jnp.bfloat16))


@pytest.mark.long
def test_all_projections_of_a_traced_layer_in_one_launch(interpret):
    arrays = pools(np.random.default_rng(0), 16, (256, 512), (256, 256), (768, 256))
    prepare = jax.jit(lambda layer: rank_major_factors(arrays, layer, rank=16, dtype=jnp.float16))
    for layer in range(LAYERS):
        assert_same(prepare(jnp.int32(layer)), reference(arrays, layer, 16, jnp.float16))


def test_nan_of_another_layer_or_slot_is_not_read(interpret):
    [(a, b)] = pools(np.random.default_rng(0), 8, (256, 256))
    (a, b), clean = ((x.at[0].set(jnp.nan).at[1, 2].set(jnp.nan) for x in (a, b)), ((a, b),))
    found = rank_major_factors(((a, b),), 1, rank=16, dtype=jnp.bfloat16)
    others = np.arange(SLOTS) != 2
    for one, other in zip(
        *map(jax.tree.leaves, (found, reference(clean, 1, 16, jnp.bfloat16))), strict=True
    ):
        np.testing.assert_array_equal(one[others], other[others])
        assert np.isnan(one[2, :8]).all() and not np.any(one[2, 8:])


def test_widths_and_ranks_that_do_not_fit_are_refused():
    rng = np.random.default_rng(1)
    with pytest.raises(ValueError, match="width 192"):
        rank_major_factors(pools(rng, 16, (256, 192)), 0, rank=16, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="rank 16, padded to 8"):
        rank_major_factors(pools(rng, 16, (256, 256)), 0, rank=8, dtype=jnp.bfloat16)


@pytest.mark.long
@pytest.mark.parametrize(
    ("rank", "padded", "slots"),
    [
        (8, 16, 4),
        (64, 64, 64),
        pytest.param(16, 16, 1, marks=pytest.mark.slow),
        pytest.param(72, 128, 1, marks=pytest.mark.slow),
        pytest.param(128, 128, 64, marks=pytest.mark.slow),
    ],
)
def test_real_shapes_lower(rank, padded, slots, lowered):
    def factors(k, n):
        shapes = (32, slots, k, rank), (32, slots, rank, n)
        return tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)

    qkv = factors(4096, 4096), factors(4096, 1024), factors(4096, 1024)
    mlp = factors(4096, 14336), factors(4096, 14336), factors(14336, 4096)
    for arrays in (qkv, qkv[:1], mlp):
        text = lowered(
            lambda arrays, layer: rank_major_factors(
                arrays, layer, rank=padded, dtype=jnp.bfloat16
            ),
            arrays,
            jax.ShapeDtypeStruct((), jnp.int32),
        )
        assert text.count("stablehlo.custom_call") == 1 and "stablehlo.transpose" not in text
