"""The kernel that transposes codes in float8: values in the interpreter, and lowering of real
shapes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_lora_cases import abstract, assert_same_bits

from jaxmux.pallas_kernels.grouped_lora.transposed_codes_sm90 import Tiling, transposed_codes

LAYERS, LAYER = 2, 1


def all_codes(n: int, k: int):
    """Every finite number of e4m3, in random places."""
    finite = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn)
    finite = finite[np.isfinite(finite.astype(np.float32))]
    return jnp.asarray(np.random.default_rng(0).choice(finite, (LAYERS, n, k)))


def assert_transposed(found, codes):
    assert found.dtype == codes.dtype
    # The sign of a zero may be lost.
    assert_same_bits(np.float32(found), np.float32(codes[LAYER].T))


@pytest.mark.parametrize(
    # A thread block with one tile less than another; more in flight than there are tiles.
    "tiling",
    [Tiling(stages=2, blocks=4), Tiling(stages=3, blocks=5)],
    ids=str,
)
def test_every_number_is_transposed_exactly(tiling, interpret):
    codes = all_codes(384, 256)
    assert_transposed(jax.block_until_ready(transposed_codes(codes, LAYER, tiling=tiling)), codes)


def test_tiles_have_to_divide_the_codes():
    with pytest.raises(ValueError, match=r"codes \[256, 192\]; expected multiples of 128"):
        transposed_codes(all_codes(256, 192), LAYER, tiling=Tiling(stages=2, blocks=1))


# The linears of Llama-3.1-8B and the largest one of 70B.
REAL = pytest.mark.parametrize(
    ("n", "k"), [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (28672, 8192)]
)
H200 = Tiling(stages=4, blocks=2 * 132)


@REAL
def test_real_shapes_lower(n, k, lowered):
    codes = abstract(LAYERS, n, k, dtype=jnp.float8_e4m3fn)
    program = lowered(partial(transposed_codes, tiling=H200), codes, abstract(dtype=jnp.int32))
    assert program.count("custom_call @mosaic_gpu") == 1


@pytest.mark.gpu
@REAL
def test_real_shapes_on_the_gpu(n, k):
    codes = all_codes(n, k)
    assert_transposed(transposed_codes(codes, LAYER, tiling=H200), codes)
