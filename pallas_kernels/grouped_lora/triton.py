"""The Triton implementation of the grouped LoRA linear, for Ampere, Ada and Hopper GPUs:
LoRAFusion's split graph (section 5.1).

The frozen product and the product with B share one accumulator, and so do all products of the input
gradient; the rank-r intermediates S and dS are written to memory. Every tile of rows belongs to one
slot, so routing takes no extra work and values of two tasks never enter one sum.
"""

from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, UInt32

from ..counter_dropout import Dropout
from ..frozen_weight import FLOAT8, FrozenWeight, plain_weights, unknown_format
from .base import LOW_RANK, module_counters, with_residual

_MAX_MODULES = 3
_MAX_RANK = 128
_DTYPES = ("bfloat16", "float16", "float32")


class Device(NamedTuple):
    """Limits and tile sizes for a compute capability: the bytes of shared memory that one program
    may use; the depth of one step of the large products, in half precision; and the largest number
    of steps whose loads are in flight."""

    shared_bytes: int
    tile_k: int
    stages: int


DEVICES = {
    80: Device(shared_bytes=166_912, tile_k=64, stages=3),
    86: Device(shared_bytes=101_376, tile_k=32, stages=3),
    89: Device(shared_bytes=101_376, tile_k=32, stages=3),
    90: Device(shared_bytes=232_448, tile_k=64, stages=4),
}


class _Term(NamedTuple):
    """One product and the low-rank product that belongs to it: `lhs W[layer] + low F[t]`, or with W
    and F transposed.

    K is k, or n for the transposed weight. The weight is stored in the dtype of `lhs`. The factor F
    is [T, r, n]; or [T, k, r], if it will be transposed.
    """

    lhs: Float[Array, "N K"]
    weight: FrozenWeight
    low: Float[Array, "N r"]
    factor: Float[Array, "T _ _"]


class _Masks(NamedTuple):
    """Dropout of modules that share their input: counters of the tokens, and rates of the slots."""

    counters: UInt32[Array, "modules N"]
    rate: Float[Array, " T"]


def refusal(x, projections, routing, dropout) -> str | None:
    missing = [name for name in ("triton", "jax_triton") if find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed (pip install jax-triton)"
    device = jax.local_devices()[0]
    if compute_capability(device) not in DEVICES:
        known = ", ".join(f"{c // 10}.{c % 10}" for c in DEVICES)
        return f"device {device.device_kind!r}; needs a CUDA GPU of compute capability {known}"
    if dropout is not None and dropout.first_column is not None:
        return "the columns of the input do not begin at 0 (dropout.first_column)"
    return _unsupported_stream(x, projections, routing) or next(
        filter(None, (_unsupported_projection(p, x) for p in projections)), None
    )


def compute_capability(device: jax.Device) -> int | None:
    """The compute capability times ten (90 for 9.0); None if the device is not a CUDA GPU."""
    version = str(getattr(device, "compute_capability", ""))
    major, dot, minor = version.partition(".")
    return int(major) * 10 + int(minor) if dot and device.platform == "gpu" else None


def _unsupported_stream(x, projections, routing) -> str | None:
    if x.dtype not in _DTYPES:
        return f"dtype {x.dtype}; needs one of {', '.join(_DTYPES)}"
    tokens, chunks = len(x), len(routing.chunk_slot)
    if tokens % (64 * chunks):
        return f"chunk length {tokens / chunks:g}; needs a multiple of 64"
    if len(projections) > _MAX_MODULES:
        return f"{len(projections)} projections of one input; at most {_MAX_MODULES}"
    if len({p.factors.a.shape[3] for p in projections}) > 1:
        return "projections of different ranks"
    return None


def _unsupported_projection(projection, x) -> str | None:
    weight = projection.weight
    if reason := unknown_format(weight.format):
        return reason
    if weight.format == FLOAT8:
        return "it has no products in float8"
    if weight.is_plain and weight.format != str(x.dtype):
        return f"weight stored as {weight.format} for a stream of {x.dtype}"
    k, n = weight.shape[1:]
    if k % 64 or n % 64:
        return f"weight [{k}, {n}]; needs multiples of 64"
    rank = projection.factors.a.shape[3]
    if rank % 8 or rank > _MAX_RANK:
        return f"rank {rank}; needs a multiple of 8, at most {_MAX_RANK}"
    return None


def _forward(modules, x, projections, accumulators, routing, dropout, layer):
    masks = _masks(modules, routing, dropout, layer, len(x))
    down, up = _factors(projections, layer, x.dtype)
    intermediates = tuple(
        checkpoint_name(s, LOW_RANK)
        for s in _low_rank(x, jnp.stack(down), routing, masks, transposed=False)
    )
    lhs, weights = plain_weights(x, [p.weight for p in projections], layer)
    outputs = tuple(
        _routed_matmul((_Term(lhs, weight, s, b),), layer, routing, None, transposed=False)
        for weight, s, b in zip(weights, intermediates, up, strict=True)
    )
    residuals = (x, projections, routing, dropout, layer, intermediates)
    return (outputs, accumulators), residuals


def _backward(modules, residuals, cotangents):
    x, projections, routing, dropout, layer, intermediates = residuals
    dys, accumulators = cotangents
    masks = _masks(modules, routing, dropout, layer, len(x))
    down, up = _factors(projections, layer, x.dtype)
    ds = tuple(
        _low_rank(dy, b[None], routing, None, transposed=True)[0]
        for dy, b in zip(dys, up, strict=True)
    )
    first, weights = plain_weights(dys[0], [p.weight for p in projections], layer)
    terms = tuple(map(_Term, (first, *dys[1:]), weights, ds, down))
    dx = _routed_matmul(terms, layer, routing, masks, transposed=True)
    add_gradients = partial(_add_gradients, layer, _chunks_by_slot(routing))
    new_a = add_gradients(masks, x, ds, tuple(f.a for f in accumulators), transposed=False)
    new_b = (
        add_gradients(None, dy, (s,), (f.b,), transposed=True)[0]
        for dy, s, f in zip(dys, intermediates, accumulators, strict=True)
    )
    new = (f._replace(a=a, b=b) for f, a, b in zip(accumulators, new_a, new_b, strict=True))
    return dx, None, tuple(new), None, None, None


grouped_lora_linear_triton = with_residual(_forward, _backward)


def _factors(
    projections, layer, dtype
) -> tuple[tuple[Float[Array, "T k R"], ...], tuple[Float[Array, "T R _"], ...]]:
    """The layer's factors A and B in the compute dtype, padded to a rank R that the kernels
    support."""
    down = tuple(_pad_rank(p.factors.a[layer].astype(dtype), 2) for p in projections)
    up = tuple(_pad_rank(p.factors.b[layer].astype(dtype), 1) for p in projections)
    return down, up


def _masks(modules, routing, dropout: Dropout | None, layer, tokens: int) -> _Masks | None:
    if dropout is None:
        return None
    counters = module_counters(modules, routing, dropout, layer, tokens)
    return _Masks(jnp.stack(counters), dropout.rate)


def _pad_rank(factors: Float[Array, "T _ _"], axis: int) -> Float[Array, "T _ _"]:
    """The factors with their rank, the size along `axis`, padded with zeros to a power of two of at
    least 16; tensor cores multiply no other sizes."""
    rank = factors.shape[axis]
    missing = max(16, 1 << (rank - 1).bit_length()) - rank
    widths = [(0, missing if i == axis else 0) for i in range(factors.ndim)]
    return jnp.pad(factors, widths) if missing else factors


class _ChunksBySlot(NamedTuple):
    """The chunks of each slot t, in stream order: order[starts[t] : starts[t + 1]]."""

    order: Int[Array, " chunks+1"]
    starts: Int[Array, " T+1"]


def _chunks_by_slot(routing) -> _ChunksBySlot:
    slots = jnp.arange(len(routing.scale) + 1)
    order = jnp.argsort(routing.chunk_slot, stable=True).astype(jnp.int32)
    starts = jnp.sum(routing.chunk_slot[None, :] < slots[:, None], axis=1, dtype=jnp.int32)
    return _ChunksBySlot(jnp.pad(order, (0, 1)), starts)


def _low_rank(
    x: Float[Array, "N w"],
    factors: Float[Array, "modules T _ _"],
    routing,
    masks: _Masks | None,
    transposed: bool,
) -> list[Float[Array, "N r"]]:
    """`scale[t] · dropout_m(x) F[m, t]` for each module m, in the dtype of x.

    The factors F are [modules, T, w, r], or [modules, T, r, w] if transposed.
    """
    modules, slots = factors.shape[:2]
    tokens, width = x.shape
    rank = factors.shape[2 if transposed else 3]
    tile_k = 32 if x.dtype == jnp.float32 else 128 if width % 128 == 0 and rank < 64 else 64
    step = (64 + modules * rank) * tile_k * x.dtype.itemsize
    return _call(
        "low_rank_kernel",
        x,
        routing.chunk_slot,
        routing.scale,
        factors,
        *_mask_arguments(masks),
        out_shape=[jax.ShapeDtypeStruct((tokens, rank), x.dtype)] * modules,
        grid=(tokens // 64,),
        num_warps=4,
        num_stages=_stages_that_fit(step, most=4),
        TOKENS=tokens,
        WIDTH=width,
        RANK=rank,
        SLOTS=slots,
        CHUNK_LEN=tokens // len(routing.chunk_slot),
        **_strides(width, rank, transposed),
        MODULES=modules,
        DROPOUT=masks is not None,
        TILE_M=64,
        TILE_K=tile_k,
        **_unused_pointers("out", modules),
    )


def _routed_matmul(
    terms: tuple[_Term, ...], layer, routing, masks: _Masks | None, transposed: bool
) -> Float[Array, "N columns"]:
    """`Σ_m lhs_m W_m[layer] + dropout_m(low_m F_m[t])`, or with W and F transposed; zeros on empty
    chunks."""
    tokens, rank = terms[0].low.shape
    columns = terms[0].weight.shape[1 if transposed else 2]
    chunk_len = tokens // len(routing.chunk_slot)
    tiles = _matmul_tiles(chunk_len, columns, terms[0].lhs.dtype)
    every = terms + terms[:1] * (_MAX_MODULES - len(terms))
    itemsize = terms[0].lhs.dtype.itemsize
    perimeter = (tiles["TILE_M"] + tiles["TILE_N"]) * itemsize
    (out,) = _call(
        "routed_matmul_kernel",
        _as_array(terms[0].weight.stack_index(layer)),
        routing.chunk_slot,
        *_mask_arguments(masks),
        *(leaf for t in every for leaf in (t.lhs, t.weight.values, t.low, t.factor)),
        out_shape=[jax.ShapeDtypeStruct((tokens, columns), terms[0].lhs.dtype)],
        grid=(tokens // tiles["TILE_M"] * (columns // tiles["TILE_N"]),),
        num_warps=8 if tiles["TILE_M"] * tiles["TILE_N"] >= 128 * 128 else 4,
        num_stages=_stages_that_fit(
            perimeter * tiles["TILE_K"], perimeter * rank, _device().stages
        ),
        TOKENS=tokens,
        COLUMNS=columns,
        **{f"DEPTH_{m}": term.lhs.shape[1] for m, term in enumerate(every)},
        RANK=rank,
        CHUNK_LEN=chunk_len,
        TRANSPOSED=transposed,
        MODULES=len(terms),
        DROPOUT=masks is not None,
        **tiles,
        SLICE_N=64,
        GROUP_M=8,
    )
    return out


def _add_gradients(
    layer,
    chunks_by_slot: _ChunksBySlot,
    masks: _Masks | None,
    x: Float[Array, "N w"],
    lows: tuple[Float[Array, "N R"], ...],
    accumulators: tuple[Float[Array, "L T _ _"], ...],
    transposed: bool,
) -> list[Float[Array, "L T _ _"]]:
    """`accumulator_m[layer, t] + dropout_m(x)^T low_m` over slot t's tokens, for each module m. The
    accumulators are [L, T, w, r], or [L, T, r, w] if transposed. They are updated in place, unless
    r differs from R, the rank padded by `_pad_rank`."""
    axis = 2 if transposed else 3
    rank = accumulators[0].shape[axis]
    if rank == lows[0].shape[1]:
        return _add_in_place(layer, chunks_by_slot, masks, x, lows, accumulators, transposed)
    padded = tuple(_pad_rank(a[layer], axis - 1)[None] for a in accumulators)
    summed = _add_in_place(0, chunks_by_slot, masks, x, lows, padded, transposed)
    return [
        a.at[layer].set(lax.slice_in_dim(new[0], 0, rank, axis=axis - 1))
        for a, new in zip(accumulators, summed, strict=True)
    ]


def _add_in_place(layer, chunks_by_slot, masks, x, lows, accumulators, transposed) -> list[Array]:
    modules, slots = len(lows), accumulators[0].shape[1]
    (tokens, width), rank = x.shape, lows[0].shape[1]
    chunk_len = tokens // (len(chunks_by_slot.order) - 1)
    tile_m = 32 if x.dtype == jnp.float32 else 64 if chunk_len % 128 else 128
    step = (64 + modules * rank) * tile_m * x.dtype.itemsize
    # Not an accumulator: XLA would copy an array that is both an operand and an alias.
    unused = lows[:1] * (_MAX_MODULES - modules)
    inputs = (_as_array(layer), x, *lows, *unused, *chunks_by_slot, *_mask_arguments(masks))
    return _call(
        "slot_gradient_kernel",
        *inputs,
        *accumulators,
        *unused,
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in accumulators],
        input_output_aliases={len(inputs) + m: m for m in range(modules)},
        grid=(width // 64, slots),
        num_warps=4,
        num_stages=_stages_that_fit(step, most=4),
        TOKENS=tokens,
        WIDTH=width,
        RANK=rank,
        CHUNK_LEN=chunk_len,
        **_strides(width, rank, transposed),
        MODULES=modules,
        DROPOUT=masks is not None,
        TILE_M=tile_m,
        TILE_K=64,
        **_unused_pointers("after", modules),
    )


def _call(kernel: str, *arrays, **options) -> list[Array]:
    # Imported here because neither package is installed on machines without a GPU.
    import jax_triton

    from . import triton_kernels

    return jax_triton.triton_call(
        *arrays,
        kernel=getattr(triton_kernels, kernel),
        name=kernel,
        compute_capability=compute_capability(jax.local_devices()[0]),
        # This matters for float32 inputs only: TF32 would round them to 10 bits.
        PRECISION="ieee",
        **options,
    )


def _as_array(layer) -> Int[Array, "1"]:
    return jnp.asarray(layer, jnp.int32).reshape(1)


def _mask_arguments(masks: _Masks | None) -> _Masks:
    return masks or _Masks(jnp.zeros((1, 1), jnp.uint32), jnp.zeros(1, jnp.float32))


def _unused_pointers(name: str, modules: int) -> dict[str, None]:
    """Constants for the outputs of absent modules. A kernel's outputs are its last arrays."""
    return {f"{name}_{m}_ptr": None for m in range(modules, _MAX_MODULES)}


def _strides(width: int, rank: int, transposed: bool) -> dict[str, int]:
    """The strides of factors [width, r], or [r, width] if transposed, in elements."""
    if transposed:
        return {"STRIDE_WIDTH": 1, "STRIDE_RANK": width}
    return {"STRIDE_WIDTH": rank, "STRIDE_RANK": 1}


def _matmul_tiles(chunk_len: int, columns: int, dtype) -> dict[str, int]:
    if dtype == jnp.float32:
        return {"TILE_M": 64, "TILE_N": 64, "TILE_K": 32}
    return {
        "TILE_M": 64 if chunk_len % 128 else 128,
        "TILE_N": next(n for n in (256, 128, 64) if columns % n == 0),
        "TILE_K": _device().tile_k,
    }


def _stages_that_fit(step_bytes: int, fixed_bytes: int = 0, most: int = 4) -> int:
    return max(1, min(most, (_device().shared_bytes - fixed_bytes) // step_bytes))


def _device() -> Device:
    return DEVICES[compute_capability(jax.local_devices()[0])]
