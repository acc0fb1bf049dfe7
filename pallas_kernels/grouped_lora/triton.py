"""The Triton implementation, for Ampere, Ada and Hopper: LoRAFusion's split graph (section 5.1).

The frozen product and the product with B share one accumulator, and so do all products of the input
gradient; the rank-r intermediates S and dS pass through memory. Every tile of rows belongs to one
slot, so that routing costs nothing and values of two tasks never enter one sum.
"""

from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from ..counter_dropout import Dropout, token_counters

_MAX_MODULES = 3
_MAX_RANK = 128
_DTYPES = ("bfloat16", "float16", "float32")


class Device(NamedTuple):
    """What the kernels need to know of a compute capability.

    Attributes:
      shared_bytes: shared memory that one program may use.
      tile_k: depth of one step of the large products, in half precision.
      stages: most steps whose loads are in flight.
    """

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
    """One product and its low-rank companion: lhs [N, K], W, low [N, r], factors [T, ...]."""

    lhs: Float[Array, "N K"]
    weight: Float[Array, "_ _"]
    low: Float[Array, "N r"]
    factor: Float[Array, "T _ _"]


class _Masks(NamedTuple):
    """Dropout of one group of modules: counters [modules, N], rate [T]."""

    counters: UInt32[Array, "modules N"]
    rate: Float[Array, "T"]


def refusal(x: Float[Array, "N k"], projections, routing) -> str | None:
    """Why this implementation cannot serve these arguments on this machine; None if it can."""
    missing = [name for name in ("triton", "jax_triton") if find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed (pip install 'jaxmux[triton]')"
    device = jax.local_devices()[0]
    if compute_capability(device) not in DEVICES:
        known = ", ".join(f"{c // 10}.{c % 10}" for c in DEVICES)
        return f"device {device.device_kind!r}: needs a CUDA GPU of compute capability {known}"
    return _unsupported_shape(x, projections, routing)


def compute_capability(device: jax.Device) -> int | None:
    """90 for compute capability 9.0; None for what is no CUDA GPU."""
    version = str(getattr(device, "compute_capability", ""))
    major, dot, minor = version.partition(".")
    return int(major) * 10 + int(minor) if dot and device.platform == "gpu" else None


def _unsupported_shape(x, projections, routing) -> str | None:
    if len(projections) > _MAX_MODULES:
        return f"{len(projections)} projections of one input; at most {_MAX_MODULES}"
    if x.dtype not in _DTYPES:
        return f"dtype {x.dtype}; needs one of {', '.join(_DTYPES)}"
    tokens, chunks = x.shape[0], len(routing.chunk_slot)
    if tokens % chunks or tokens // chunks % 64:
        return f"chunk length {tokens / chunks:g}; needs a multiple of 64"
    for p in projections:
        dtypes = {str(leaf.dtype) for leaf in (p.kernel, p.a, p.b)}
        if dtypes != {str(x.dtype)}:
            return f"kernel, a, b of {', '.join(sorted(dtypes))} beside x of {x.dtype}"
        if p.kernel.shape[0] % 64 or p.kernel.shape[1] % 64:
            return f"kernel of shape {p.kernel.shape}; needs multiples of 64"
        rank = p.a.shape[2]
        if rank % 8 or rank > _MAX_RANK or p.a.shape[2] != projections[0].a.shape[2]:
            return f"rank {rank}; needs one multiple of 8 up to {_MAX_RANK} for the whole group"
    return None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_lora_linear_triton(modules, x, projections, routing, dropout, layer):
    """See `api.grouped_lora_linear`; `modules` is static.

    Raises:
      NotImplementedError: `refusal` has a reason.
    """
    return _forward(modules, x, projections, routing, dropout, layer)[0]


def _forward(modules, x, projections, routing, dropout, layer):
    reason = refusal(x, projections, routing)
    if reason:
        raise NotImplementedError(f"implementation 'triton' of grouped_lora_linear: {reason}")
    masks = _masks(modules, routing, dropout, layer, len(x))
    down = jnp.stack([_pad_rank(p.a, 2) for p in projections])
    intermediates = _low_rank(x, down, routing, masks, transposed=False)
    outputs = tuple(
        _routed_matmul((_Term(x, p.kernel, s, _pad_rank(p.b, 1)),), routing, None, transposed=False)
        for p, s in zip(projections, intermediates, strict=True)
    )
    return outputs, (x, projections, routing, dropout, layer, intermediates)


def _backward(modules, residuals, cotangents):
    x, projections, routing, dropout, layer, intermediates = residuals
    masks = _masks(modules, routing, dropout, layer, len(x))
    walk = _chunks_by_slot(routing)
    terms, grads_b = [], []
    for p, s, dy in zip(projections, intermediates, cotangents, strict=True):
        up = _pad_rank(p.b, 1)
        (ds,) = _low_rank(dy, up[None], routing, None, transposed=True)
        terms.append(_Term(dy, p.kernel, ds, _pad_rank(p.a, 2)))
        grads_b += _add_gradients(dy, (s,), (_pad_rank(p.grad_b, 1),), walk, None, transposed=True)
    dx = _routed_matmul(tuple(terms), routing, masks, transposed=True)
    accumulators = tuple(_pad_rank(p.grad_a, 2) for p in projections)
    lows = tuple(term.low for term in terms)
    grads_a = _add_gradients(x, lows, accumulators, walk, masks, transposed=False)
    rank = projections[0].a.shape[2]
    gradients = tuple(
        p._replace(kernel=None, a=None, b=None, grad_a=a[:, :, :rank], grad_b=b[:, :rank])
        for p, a, b in zip(projections, grads_a, grads_b, strict=True)
    )
    return dx, gradients, None, None, None


grouped_lora_linear_triton.defvjp(_forward, _backward)


def _masks(modules, routing, dropout: Dropout | None, layer, tokens: int) -> _Masks | None:
    if dropout is None:
        return None
    owner = jnp.repeat(
        jnp.maximum(routing.chunk_slot, 0),
        tokens // len(routing.chunk_slot),
        total_repeat_length=tokens,
    )
    counters = [token_counters(dropout, owner, layer, module) for module in modules]
    return _Masks(jnp.stack(counters), dropout.rate)


def _pad_rank(factors: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """Zero columns up to a power of two, at least 16: what a tensor core multiplies."""
    rank = factors.shape[axis]
    missing = max(16, 1 << (rank - 1).bit_length()) - rank
    widths = [(0, missing if i == axis else 0) for i in range(factors.ndim)]
    return jnp.pad(factors, widths) if missing else factors


class _Walk(NamedTuple):
    """The chunks of each slot, in stream order: order[starts[t] : starts[t + 1]]."""

    order: Int[Array, "C+1"]
    starts: Int[Array, "T+1"]


def _chunks_by_slot(routing) -> _Walk:
    slots = jnp.arange(len(routing.scale) + 1)
    order = jnp.argsort(routing.chunk_slot, stable=True).astype(jnp.int32)
    starts = jnp.sum(routing.chunk_slot[None, :] < slots[:, None], axis=1, dtype=jnp.int32)
    return _Walk(jnp.pad(order, (0, 1)), starts)


def _low_rank(x, factors, routing, masks: _Masks | None, transposed: bool) -> list[Array]:
    """`scale[t] · dropout_m(x) F[m, t]` for each module m: [N, r] arrays in the dtype of x.

    `factors` is [modules, T, width, r], or [modules, T, r, width] if transposed.
    """
    from . import triton_kernels

    modules, slots = factors.shape[:2]
    tokens, width = x.shape
    rank = factors.shape[2 if transposed else 3]
    tile_k = 32 if x.dtype == jnp.float32 else 128 if width % 128 == 0 and rank < 64 else 64
    step = (64 + modules * rank) * tile_k * x.dtype.itemsize
    return _call(
        triton_kernels.low_rank_kernel,
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
    terms: tuple[_Term, ...], routing, masks: _Masks | None, transposed: bool
) -> Float[Array, "N columns"]:
    """`Σ_m lhs_m W_m + dropout_m(low_m F_m[t])`; W and F are transposed if `transposed`."""
    from . import triton_kernels

    tokens, rank = terms[0].low.shape
    columns = terms[0].weight.shape[0 if transposed else 1]
    chunk_len = tokens // len(routing.chunk_slot)
    tiles = _matmul_tiles(chunk_len, columns, terms[0].lhs.dtype)
    every = terms + terms[:1] * (_MAX_MODULES - len(terms))
    itemsize = terms[0].lhs.dtype.itemsize
    perimeter = (tiles["TILE_M"] + tiles["TILE_N"]) * itemsize
    (out,) = _call(
        triton_kernels.routed_matmul_kernel,
        routing.chunk_slot,
        *_mask_arguments(masks),
        *(leaf for term in every for leaf in term),
        out_shape=[jax.ShapeDtypeStruct((tokens, columns), terms[0].lhs.dtype)],
        grid=(tokens // tiles["TILE_M"] * (columns // tiles["TILE_N"]),),
        num_warps=8 if tiles["TILE_M"] * tiles["TILE_N"] >= 128 * 128 else 4,
        num_stages=_stages_that_fit(perimeter * tiles["TILE_K"], perimeter * rank, _stages()),
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
    x,
    lows: tuple[Array, ...],
    accumulators: tuple[Array, ...],
    walk: _Walk,
    masks: _Masks | None,
    transposed: bool,
) -> list[Array]:
    """`accumulator_m[t] + dropout_m(x)^T low_m` over the tokens of slot t, for each module m.

    The accumulators are [T, width, r], or [T, r, width] if transposed; they are updated in place.
    """
    from . import triton_kernels

    modules, slots = len(lows), accumulators[0].shape[0]
    (tokens, width), rank = x.shape, lows[0].shape[1]
    chunk_len = tokens // (len(walk.order) - 1)
    tile_m = 64 if chunk_len % 128 or x.dtype == jnp.float32 else 128
    step = (64 + modules * rank) * tile_m * x.dtype.itemsize
    # An accumulator in a second, unaliased place would cost a copy of it.
    spare = _MAX_MODULES - modules
    first_accumulator = 1 + _MAX_MODULES + len(walk) + len(_Masks._fields)
    return _call(
        triton_kernels.slot_gradient_kernel,
        x,
        *lows,
        *lows[:1] * spare,
        *walk,
        *_mask_arguments(masks),
        *accumulators,
        *lows[:1] * spare,
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in accumulators],
        input_output_aliases={first_accumulator + m: m for m in range(modules)},
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


def _call(kernel, *arrays, **options) -> list[Array]:
    import jax_triton

    # Float32 products are exact to float32; tensor cores would round their inputs to 10 bits.
    return jax_triton.triton_call(
        *arrays,
        kernel=kernel,
        name=kernel.__name__,
        compute_capability=compute_capability(jax.local_devices()[0]),
        PRECISION="ieee",
        **options,
    )


def _mask_arguments(masks: _Masks | None) -> _Masks:
    return masks or _Masks(jnp.zeros((1, 1), jnp.uint32), jnp.zeros(1, jnp.float32))


def _unused_pointers(name: str, modules: int) -> dict[str, None]:
    """Outputs come last among a kernel's arrays, so those of absent modules can be constants."""
    return {f"{name}_{m}_ptr": None for m in range(modules, _MAX_MODULES)}


def _strides(width: int, rank: int, transposed: bool) -> dict[str, int]:
    """Of [width, r] factors, or of [r, width] ones if transposed."""
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


def _stages() -> int:
    return _device().stages


def _device() -> Device:
    return DEVICES[compute_capability(jax.local_devices()[0])]
