"""Rows in float8: the Hopper kernel against plain XLA, bit for bit, and lowering of real shapes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_lora_cases import abstract, normals

from jaxmux.pallas_kernels.frozen_weight import FrozenWeight
from jaxmux.pallas_kernels.grouped_lora import Routing
from jaxmux.pallas_kernels.grouped_lora import float8_rows as module
from jaxmux.pallas_kernels.grouped_lora.float8_rows import float8_rows, rows_tiling
from jaxmux.pallas_kernels.grouped_lora.float8_rows_sm90 import Tiling, encode_rows
from jaxmux.pallas_kernels.grouped_lora.mosaic_gpu import matmul
from jaxmux.pallas_kernels.grouped_lora.routed_matmul_sm90 import Term

ROWS = 8
# Rows with a NaN, an infinity, zeros only, and numbers too small for a scale of their own.
NAN, INFINITE, ZERO, TINY = 1, 2, 4, 5


def operands(widths, folded, dtype=jnp.bfloat16, rows=ROWS):
    """Arrays whose rows differ in size, with special rows in the last one, and folds."""
    rng = np.random.default_rng(sum(widths))
    size = np.logspace(-3, 3, rows)[:, None]
    xs = [jnp.asarray(size * rng.standard_normal((rows, w)), dtype) for w in widths]
    last = xs[-1].at[NAN, 3].set(jnp.nan).at[INFINITE, -1].set(-jnp.inf)
    xs = [x.at[ZERO].set(0).at[TINY].set(1e-37) for x in (*xs[:-1], last)]
    folds = [jnp.asarray(rng.uniform(0.01, 1, w), jnp.float32) for w in widths]
    return tuple(xs), tuple(folds) if folded else None


def assert_same_rows(found, wanted):
    """Equal bits but in the row with a NaN. There the code of the NaN is one; others are too if the
    maximum is, which may lose a NaN on CPU."""
    (codes, scales), (wanted_codes, wanted_scales) = jax.tree.map(np.asarray, (found, wanted))
    others = np.arange(len(scales)) != NAN
    np.testing.assert_array_equal(scales[others], wanted_scales[others])
    for one, other in zip(codes, wanted_codes, strict=True):
        assert one.dtype == jnp.float8_e4m3fn
        np.testing.assert_array_equal(*(c[others].view(np.uint8) for c in (one, other)))
    assert np.isnan(np.float32(codes[-1][NAN, 3]))
    assert np.isinf(scales[INFINITE]) and np.isnan(np.float32(codes[-1][INFINITE, -1]))


@pytest.mark.long
@pytest.mark.parametrize(
    ("widths", "folded", "tiling"),
    [
        # Lines in vectors of 2, 4 and 8 numbers; more rows in flight than a thread block has.
        ((256,), False, Tiling(warpgroups=1, stages=5, blocks=3)),
        ((512, 256, 1024), True, Tiling(warpgroups=1, stages=1, blocks=2)),
        pytest.param(
            (1024, 512),
            False,
            Tiling(warpgroups=2, stages=2, blocks=1),
            marks=pytest.mark.slow,
        ),
        # Too wide for registers to keep folds.
        ((7424,), True, Tiling(warpgroups=1, stages=2, blocks=3)),
    ],
    ids=str,
)
def test_kernel_has_the_bits_of_plain_xla(widths, folded, tiling, interpret):
    xs, folds = operands(widths, folded)
    found = jax.block_until_ready(encode_rows(xs, folds, tiling=tiling))
    assert_same_rows(found, float8_rows(xs, folds, "xla"))


@pytest.mark.long
def test_the_op_takes_the_kernel_on_hopper(monkeypatch, interpret):
    monkeypatch.setattr(module, "is_hopper", lambda: True)
    xs, folds = operands((256, 256), True, jnp.float16)
    found = jax.block_until_ready(float8_rows(xs, folds))
    monkeypatch.undo()
    assert_same_rows(found, float8_rows(xs, folds))


def test_codes_and_shared_scales_stand_for_the_folded_rows():
    rng = np.random.default_rng(0)
    xs = [normals(rng, ROWS, 64), 10 * normals(rng, ROWS, 32)]
    folds = [jnp.asarray(rng.uniform(0.5, 2, x.shape[1]), jnp.float32) for x in xs]
    codes, scales = float8_rows(xs, folds)
    folded = [np.float64(x) * np.float64(fold) for x, fold in zip(xs, folds, strict=True)]
    largest = np.max(np.abs(np.concatenate(folded, axis=1)), axis=1)
    np.testing.assert_allclose(scales, largest / 448, rtol=1e-6)
    for code, wanted in zip(codes, folded, strict=True):
        found = np.float64(code) * np.float64(scales)[:, None]
        # Three bits of mantissa, or the spacing of the smallest numbers.
        spacing = np.maximum(np.abs(wanted) / 16, np.float64(scales)[:, None] / 1024)
        assert np.all(np.abs(found - wanted) <= spacing * (1 + 1e-6))


@pytest.mark.parametrize(
    ("widths", "dtype", "reason"),
    [
        ((256, 512), jnp.bfloat16, None),
        ((256,), jnp.float32, "it reads bfloat16 or float16, found float32"),
        ((256, 320), jnp.bfloat16, r"\(256, 320\) columns; expected multiples of 256"),
        ((81920,), jnp.bfloat16, r"\(81920,\) columns, which do not fit"),
    ],
)
def test_kernel_refuses_what_it_cannot_serve(widths, dtype, reason, lowered):
    xs = [abstract(ROWS, width, dtype=dtype) for width in widths]
    folds = [abstract(width, dtype=jnp.float32) for width in widths]
    encode = partial(float8_rows, implementation="mosaic_gpu")
    if reason is None:
        assert "mosaic_gpu" in lowered(encode, xs, folds)
        return
    with pytest.raises(ValueError, match=f"mosaic_gpu cannot serve it: .*{reason}"):
        lowered(encode, xs, folds)


def test_errors_name_the_implementations():
    xs, _ = operands((256,), False)
    with pytest.raises(ValueError, match="unknown implementation 'cuda' of float8_rows"):
        float8_rows(xs, None, "cuda")
    with pytest.raises(ValueError, match="needs a Hopper GPU"):
        float8_rows(xs, None, "mosaic_gpu")
    with pytest.raises(ValueError, match=r"rows of \(256,\) columns; expected multiples of 512"):
        encode_rows(xs, None, tiling=Tiling(warpgroups=2, stages=2, blocks=1))


# The inputs and gradients of the linears of Llama-3.1-8B and 70B.
FORWARD = [(4096,), (14336,), (8192,), (28672,)]
BACKWARD = [
    *((4096,), (4096, 1024, 1024), (14336, 14336)),
    *((8192,), (8192, 1024, 1024), (28672, 28672)),
]


REAL = pytest.mark.parametrize(
    ("widths", "folded"),
    [*((widths, False) for widths in FORWARD), *((widths, True) for widths in BACKWARD)],
    ids=str,
)


@REAL
def test_real_shapes_lower(widths, folded, lowered):
    xs = [abstract(8192, width) for width in widths]
    folds = [abstract(width, dtype=jnp.float32) for width in widths] if folded else None
    encode = partial(float8_rows, implementation="mosaic_gpu")
    assert lowered(encode, xs, folds).count("custom_call @mosaic_gpu") == 1


@pytest.mark.gpu
@REAL
def test_real_shapes_on_the_gpu(widths, folded):
    # Thread blocks have unequal numbers of rows.
    arguments = operands(widths, folded, rows=1001)
    found, wanted = (
        jax.jit(partial(float8_rows, implementation=name))(*arguments)
        for name in ("mosaic_gpu", "xla")
    )
    assert_same_rows(found, wanted)


@pytest.mark.parametrize("widths", [*FORWARD, *BACKWARD], ids=str)
def test_a_multiprocessor_has_room_for_the_warpgroups_of_real_shapes(widths, h200):
    with jax.sharding.use_abstract_mesh(h200):
        tiling = rows_tiling(widths)
    share = tiling.blocks // 132
    assert tiling.warpgroups * share == 4
    # A row of codes, rows in flight, and what a thread block needs besides.
    assert share * ((2 * tiling.stages + 1) * sum(widths) + 5 * 1024) <= 228 * 1024


@pytest.mark.long
@pytest.mark.parametrize("transposed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_products_in_float8_encode_their_operands_by_the_kernel(transposed, lowered):
    tokens, size, rank = 128, 256, 16
    stack = jax.eval_shape(lambda: FrozenWeight.encoded(jnp.zeros((2, size, size)), "float8"))
    term = Term(abstract(tokens, size), stack, abstract(rank, tokens), abstract(3, rank, size))
    routing = Routing(abstract(1, dtype=jnp.int32), abstract(3, dtype=jnp.float32))
    terms = (term, term) if transposed else (term,)
    product = partial(matmul, layer=1, transposed=transposed)
    calls = [c for c in lowered(product, terms, routing).splitlines() if "@mosaic_gpu" in c]
    # Of codes: the rows of all terms, and for gradients the transposed layer of each.
    made = [2, 1, 1, 0] if transposed else [1, 0]
    assert [call.split("->")[-1].count("f8E4M3FN") for call in calls] == made
