"""Rows of activations and gradients in float8, as the products of `routed_matmul` read them: the
plain-XLA reference, the kernel for Hopper GPUs, and the choice between them."""

from collections.abc import Sequence
from functools import reduce

import jax.numpy as jnp
from jaxtyping import Array, Float, Float8e4m3fn, Float32

from ..implementations import Implementations, choose
from ..number_formats import quantised_rows, row_scales
from .float8_rows_sm90 import COLUMNS_OF_THREAD, Tiling, encode_rows
from .tilings import is_hopper, multiprocessors

# Number of warpgroups, of one or several thread blocks, that share a multiprocessor.
_WARPGROUPS = 4
# Bytes of a multiprocessor's shared memory. Bytes of each thread block that hold no row: those that
# the hardware reserves, barriers, largest magnitudes, and memory of Pallas for reductions.
_SHARED_MEMORY = 228 * 1024
_RESERVED = 5 * 1024
# Number of rows in flight that hides the latency of memory.
_MAX_STAGES = 8
# Fewest columns that a warpgroup loads: a pair for each of its 128 threads.
_LEAST_COLUMNS = 256


def float8_rows(
    xs: Sequence[Float[Array, "N _"]],
    folds: Sequence[Float32[Array, " _"]] | None = None,
    implementation: str | None = None,
) -> tuple[tuple[Float8e4m3fn[Array, "N _"], ...], Float32[Array, " N"]]:
    """Encodes the rows of arrays in float8 (e4m3), with scales that all arrays share.

    `scales = max(max |x fold| / 448, 1e-30)`, with the maximum over the columns of all arrays, and
    the codes are `x fold / scales`, all in float32 (see `number_formats.row_scales` and
    `quantised_rows`). Implementations give the same bits. A row that holds a NaN or an infinity
    becomes NaN, and no other row is changed by it. The function is not differentiable.

    Args:
      xs: arrays with the same rows, [N, k_i].
      folds: factors of the columns of each array, [k_i]; None for none.
      implementation: "mosaic_gpu" for Hopper GPUs, "xla" for every device. None takes "mosaic_gpu"
        if it can serve the call, else "xla", and logs which one and why.

    Returns:
      A pair: the codes of every array, with its shape, and the scales of the rows.

    Raises:
      ValueError: there is no such implementation, or it cannot serve these arguments.
    """
    xs, folds = tuple(xs), None if folds is None else tuple(folds)
    function = choose(
        "float8_rows",
        _IMPLEMENTATIONS,
        implementation,
        (xs, folds),
        f"rows in float8, {xs[0].dtype} {len(xs[0])}x{'+'.join(map(str, _widths(xs)))}",
    )
    return function(xs, folds)


def float8_rows_xla(xs, folds):
    """`float8_rows` in plain XLA, for every device. This is the reference for the kernel."""
    if folds is not None:
        xs = tuple(x.astype(jnp.float32) * fold for x, fold in zip(xs, folds, strict=True))
    scales = reduce(jnp.maximum, map(row_scales, xs))
    return tuple(quantised_rows(x, scales) for x in xs), scales


def float8_rows_mosaic_gpu(xs, folds):
    return encode_rows(xs, folds, tiling=rows_tiling(_widths(xs)))


def refusal(xs, folds) -> str | None:
    if not is_hopper():
        return "it needs a Hopper GPU"
    dtypes = sorted({str(x.dtype) for x in xs})
    if dtypes not in (["bfloat16"], ["float16"]):
        return f"it reads bfloat16 or float16, found {', '.join(dtypes)}"
    widths = _widths(xs)
    if any(width % _LEAST_COLUMNS for width in widths):
        return f"rows of {widths} columns; expected multiples of {_LEAST_COLUMNS}"
    if _stages(widths, 1) < 1:
        return f"rows of {widths} columns, which do not fit into shared memory"
    return None


_IMPLEMENTATIONS: Implementations = {
    "mosaic_gpu": (float8_rows_mosaic_gpu, refusal),
    "xla": (float8_rows_xla, lambda xs, folds: None),
}


def rows_tiling(widths: tuple[int, ...]) -> Tiling:
    """The tiling for arrays of these widths. The fewest warpgroups whose registers can hold a row's
    folds share the row, and as many thread blocks as fit share a multiprocessor."""
    warpgroups = 1
    while warpgroups < _WARPGROUPS and sum(widths) > warpgroups * 128 * COLUMNS_OF_THREAD:
        if any(width % (2 * warpgroups * _LEAST_COLUMNS) for width in widths):
            break
        warpgroups *= 2
    share = next(s for s in (4, 2, 1) if s * warpgroups <= _WARPGROUPS and _stages(widths, s))
    stages = min(_MAX_STAGES, _stages(widths, share))
    return Tiling(warpgroups, stages=stages, blocks=share * multiprocessors())


def _widths(xs) -> tuple[int, ...]:
    return tuple(x.shape[1] for x in xs)


def _stages(widths: tuple[int, ...], share: int) -> int:
    """Number of rows for which a thread block has room, besides the codes of one row, if `share`
    blocks share a multiprocessor."""
    room = _SHARED_MEMORY // share - _RESERVED - sum(widths)
    return max(0, room // (2 * sum(widths)))
