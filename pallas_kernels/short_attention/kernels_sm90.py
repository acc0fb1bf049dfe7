"""Causal attention of rows so short that a thread block holds one whole, for Hopper: forward and
backward.

A thread block serves one row and one key/value head: keys and values stay in shared memory while
its query heads pass through a ring of buffers. Warpgroup w owns the row's w-th block of 64 tokens.
Nothing is read twice, and the probabilities are computed again for the backward pass: it works at
the speed of memory, where kernels made for long rows wait for their pipelines.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from ..compilation import traced_once
from ..grouped_lora.tiles_sm90 import swizzled

BLOCK = 64
_COMPILER_PARAMS = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True
)
_ROWS = plgpu.Layout.WGMMA.reduce(1)
# Query heads in flight.
_STAGES = 2


class Heads(NamedTuple):
    """Static sizes.

    Attributes:
      row_len: tokens of a row, 64 or 128.
      groups: key/value heads.
      per_group: query heads that share one.
      size: of a head, a multiple of 64.
    """

    row_len: int
    groups: int
    per_group: int
    size: int

    @property
    def blocks(self) -> int:
        return self.row_len // BLOCK

    @property
    def scale(self) -> float:
        return self.size**-0.5


@traced_once("heads", "interpret")
def forward(
    q: Float[Array, "N H*D"],
    k: Float[Array, "N K*D"],
    v: Float[Array, "N K*D"],
    firsts: Int[Array, "N"] | None,
    heads: Heads,
    *,
    interpret: Any = None,
) -> tuple[Float[Array, "N H*D"], Float[Array, "H N"]]:
    """The outputs, and the base-2 logarithm of every softmax's denominator, float32.

    Args:
      q, k, v: in half precision, the heads side by side; rows of `heads.row_len` tokens lie one
        after the other.
      firsts: int32, the first token of its row that each token sees; None where all see from their
        row's first on.
      interpret: see `plgpu.kernel`.
    """
    tokens, width = q.shape
    block = (heads.row_len, heads.size)
    return _kernel(
        partial(_forward_body, heads),
        "short_attention",
        heads,
        tokens,
        (
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((width // heads.size, tokens), jnp.float32),
        ),
        {
            "q_smem": _tiles((_STAGES, *block), q.dtype),
            "kv_smem": [_tiles(block, q.dtype)] * 2,
            "p_smem": [_tiles((BLOCK, (i + 1) * BLOCK), q.dtype) for i in range(heads.blocks)],
            "loaded": plgpu.Barrier(num_arrivals=1, num_barriers=_STAGES * heads.blocks),
            "kv_loaded": plgpu.Barrier(num_arrivals=2 * heads.blocks),
        },
        interpret,
    )(q, k, v, firsts)


@traced_once("heads", "interpret")
def backward(
    q: Float[Array, "N H*D"],
    k: Float[Array, "N K*D"],
    v: Float[Array, "N K*D"],
    firsts: Int[Array, "N"] | None,
    log_total: Float[Array, "H N"],
    d_out: Float[Array, "N H*D"],
    heads: Heads,
    *,
    interpret: Any = None,
) -> tuple[Float[Array, "N H*D"], Float[Array, "N K*D"], Float[Array, "N K*D"]]:
    """The gradients of q, k and v. `log_total` is the second result of `forward`."""
    block = (heads.row_len, heads.size)
    pair = (BLOCK, BLOCK)
    return _kernel(
        partial(_backward_body, heads),
        "short_attention_backward",
        heads,
        q.shape[0],
        tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)),
        {
            "q_smem": _tiles((_STAGES, *block), q.dtype),
            "do_smem": _tiles((_STAGES, *block), q.dtype),
            "kv_smem": [_tiles(block, q.dtype)] * 2,
            # Of the probabilities, then of their gradients, by block of queries and of keys.
            "pairs": [_tiles(pair, q.dtype)] * (heads.blocks * (heads.blocks + 1) // 2),
            "delta_smem": plgpu.SMEM((BLOCK,), jnp.float32),
            "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES * heads.blocks),
            "kv_loaded": plgpu.Barrier(num_arrivals=2 * heads.blocks),
            "delta_ready": plgpu.Barrier(num_arrivals=1),
            "delta_read": plgpu.Barrier(num_arrivals=1),
            "pair_ready": plgpu.Barrier(num_arrivals=1),
            "pair_read": plgpu.Barrier(num_arrivals=1),
        },
        interpret,
    )(q, k, v, firsts, log_total, d_out)


def _kernel(body, name: str, heads: Heads, tokens: int, out_type, scratch, interpret):
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(heads.groups, tokens // heads.row_len),
        grid_names=("group", "row"),
        num_threads=heads.blocks,
        thread_name="wg",
        scratch_types=scratch,
        kernel_name=name,
        compiler_params=_COMPILER_PARAMS,
        interpret=interpret,
    )


def _tiles(shape, dtype):
    return plgpu.SMEM(shape, dtype, transforms=swizzled(dtype))


class _Place(NamedTuple):
    """The thread block's row and key/value head, and a warpgroup's block of the row."""

    heads: Heads
    block: int

    @property
    def own(self):
        """The warpgroup's tokens within the row."""
        return pl.ds(self.block * BLOCK, BLOCK)

    @property
    def tokens(self):
        """The warpgroup's tokens in the stream."""
        return pl.ds(lax.axis_index("row") * self.heads.row_len + self.block * BLOCK, BLOCK)

    @property
    def group_columns(self):
        return pl.ds(lax.axis_index("group") * self.heads.size, self.heads.size)

    def head(self, i):
        return lax.axis_index("group") * self.heads.per_group + i

    def columns(self, i):
        return pl.ds(self.head(i) * self.heads.size, self.heads.size)

    def barrier(self, barriers, i):
        return barriers.at[_stage(i) * self.heads.blocks + self.block]

    def load_heads(self, i, arrays, buffers, loaded):
        """Starts the copies of query head i, of the warpgroup's tokens, if there is such a head."""

        @pl.when(i < self.heads.per_group)
        def _():
            for array, buffer in zip(arrays, buffers, strict=True):
                plgpu.copy_gmem_to_smem(
                    array.at[self.tokens, self.columns(i)],
                    buffer.at[_stage(i)].at[self.own],
                    self.barrier(loaded, i),
                )

    def store_head(self, i, value, buffer, array):
        """Starts the copy of query head i's result through its place in the buffer, and waits until
        the place is free again."""
        mine = buffer.at[_stage(i)].at[self.own]
        mine[...] = value.astype(array.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mine, array.at[self.tokens, self.columns(i)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def load_keys(self, arrays, buffers, loaded):
        for array, buffer in zip(arrays, buffers, strict=True):
            source = array.at[self.tokens, self.group_columns]
            plgpu.copy_gmem_to_smem(source, buffer.at[self.own], loaded)


def _for_own_block(heads: Heads, body):
    """Runs `body(place)` for each warpgroup's block: the code differs, as the blocks see different
    numbers of keys."""
    for block in range(heads.blocks):
        pl.when(lax.axis_index("wg") == block)(partial(body, _Place(heads, block)))


def _forward_body(
    heads: Heads, q, k, v, firsts, out, log_total, *, q_smem, kv_smem, p_smem, loaded, kv_loaded
):
    def attend(place: _Place):
        place.load_keys((k, v), kv_smem, kv_loaded)
        for i in range(_STAGES):
            place.load_heads(jnp.int32(i), (q,), (q_smem,), loaded)
        plgpu.barrier_wait(kv_loaded)
        first = None if firsts is None else _load_rows(firsts.at[place.tokens])

        @pl.loop(0, heads.per_group)
        def _head(i):
            plgpu.barrier_wait(place.barrier(loaded, i))
            mine = q_smem.at[_stage(i)].at[place.own]
            value, total = _attend(place, first, mine, *kv_smem, p_smem[place.block])
            log_total.at[place.head(i), place.tokens][...] = total
            place.store_head(i, value, q_smem, out)
            place.load_heads(i + _STAGES, (q,), (q_smem,), loaded)

        plgpu.wait_smem_to_gmem(0)

    _for_own_block(heads, attend)


def _attend(place: _Place, first, q_smem, k_smem, v_smem, p_smem):
    """One head's outputs for the warpgroup's queries, float32, and the logarithms of the totals."""
    seen = pl.ds(0, (place.block + 1) * BLOCK)
    scores = _product(seen.size, (q_smem, k_smem.at[seen].transpose((1, 0))))
    factor = place.heads.scale * math.log2(math.e)
    scores = jnp.where(_seen(scores.shape, place.block * BLOCK, first), scores, -jnp.inf)
    most = jnp.max(scores, axis=1) * factor
    p = jnp.exp2(scores * factor - _across(most, scores.shape))
    total = jnp.sum(p, axis=1)
    p_smem[...] = p.astype(p_smem.dtype)
    plgpu.commit_smem()
    value = _product(place.heads.size, (p_smem, v_smem.at[seen]))
    value *= _across(1 / total, value.shape)
    return value, most + jnp.log(total) * math.log2(math.e)


def _backward_body(
    heads: Heads,
    q,
    k,
    v,
    firsts,
    log_total,
    d_out,
    dq,
    dk,
    dv,
    *,
    q_smem,
    do_smem,
    kv_smem,
    pairs,
    **scratch,
):
    shared = _Shared(heads, q_smem, do_smem, *kv_smem, pairs, **scratch)

    def differentiate(place: _Place, dk_acc, dv_acc):
        load = partial(place.load_heads, arrays=(q, d_out), buffers=(q_smem, do_smem))
        place.load_keys((k, v), kv_smem, shared.kv_loaded)
        for i in range(_STAGES):
            load(jnp.int32(i), loaded=shared.loaded)
        plgpu.barrier_wait(shared.kv_loaded)

        @pl.loop(0, heads.per_group)
        def _head(i):
            plgpu.barrier_wait(place.barrier(shared.loaded, i))
            gradient = _head_gradient(place, shared, firsts, log_total, i, dk_acc, dv_acc)
            place.store_head(i, gradient, q_smem, dq)
            load(i + _STAGES, loaded=shared.loaded)

        _store_keys(place, shared, (dk_acc, dv_acc), (dk, dv))

    def with_sums(place: _Place):
        sums = [plgpu.ACC((BLOCK, heads.size), jnp.float32)] * 2
        pl.run_scoped(partial(differentiate, place), *sums)

    _for_own_block(heads, with_sums)


class _Shared(NamedTuple):
    """What the warpgroups of a thread block share in the backward pass."""

    heads: Heads
    q: Any
    do: Any
    k: Any
    v: Any
    pairs: Any
    delta_smem: Any
    loaded: Any
    kv_loaded: Any
    delta_ready: Any
    delta_read: Any
    pair_ready: Any
    pair_read: Any


def _head_gradient(place: _Place, shared: _Shared, firsts, log_total, i, dk_acc, dv_acc):
    """Adds one query head's part to dk and dv of the warpgroup's keys; returns dq of its queries,
    float32.

    Block 1 also sees the keys of block 0. Its warpgroup sums up what the softmax's gradient
    subtracts; that of block 0, which owns those keys, then computes the pair's gradient, of which
    both need a product.
    """
    stage, own, factor = _stage(i), place.block, shared.heads.scale
    last = i == shared.heads.per_group - 1

    def operands(queries: int):
        rows = pl.ds(queries * BLOCK, BLOCK)
        return shared.q.at[stage].at[rows], shared.do.at[stage].at[rows]

    def probabilities(queries: int, keys: int):
        q_smem, do_smem = operands(queries)
        rows = pl.ds(keys * BLOCK, BLOCK)
        first_query = lax.axis_index("row") * shared.heads.row_len + queries * BLOCK
        tokens = pl.ds(first_query, BLOCK)
        log_totals = _load_rows(log_total.at[place.head(i), tokens])
        scores = _product(BLOCK, (q_smem, shared.k.at[rows].transpose((1, 0))))
        p = jnp.exp2(scores * (factor * math.log2(math.e)) - _across(log_totals, scores.shape))
        dp = _product(BLOCK, (do_smem, shared.v.at[rows].transpose((1, 0))))
        if firsts is None:
            return (jnp.where(_seen(p.shape, 0, None), p, 0.0) if queries == keys else p), dp
        # What a query does not see may belong to another task, and be infinite.
        seen = _seen(p.shape, queries * BLOCK, _load_rows(firsts.at[tokens]), keys * BLOCK)
        return jnp.where(seen, p, 0.0), jnp.where(seen, dp, 0.0)

    def add(queries: int, pair: int, p, dp, delta):
        """Adds the pair's products to the sums; leaves the gradient of its scores in `pairs`."""
        q_smem, do_smem = operands(queries)
        pair_smem = shared.pairs[pair]
        pair_smem[...] = p.astype(pair_smem.dtype)
        plgpu.commit_smem()
        plgpu.wgmma(dv_acc, pair_smem.transpose((1, 0)), do_smem)
        ds = p * (dp - _across(delta, p.shape)) * factor
        if firsts is not None:
            ds = jnp.where(p == 0, 0.0, ds)
        plgpu.wgmma_wait(0)
        pair_smem[...] = ds.astype(pair_smem.dtype)
        plgpu.commit_smem()
        plgpu.wgmma(dk_acc, pair_smem.transpose((1, 0)), q_smem)
        plgpu.wgmma_wait(0)

    def delta_of(p, dp):
        return jnp.sum(p * dp, axis=1)

    # Pairs 0 and 1 are the blocks' own; pair 2 is that of queries 1 and keys 0.
    if own == 1:
        delta = delta_of(*probabilities(1, 0))
        p, dp = probabilities(1, 1)
        delta += delta_of(p, dp)
        pl.when(i > 0)(lambda: plgpu.barrier_wait(shared.delta_read))
        shared.delta_smem[...] = delta
        plgpu.barrier_arrive(shared.delta_ready)
        add(1, 1, p, dp, delta)
        plgpu.barrier_wait(shared.pair_ready)
        gradient = _product(
            shared.heads.size,
            (shared.pairs[1], shared.k.at[place.own]),
            (shared.pairs[2], shared.k.at[pl.ds(0, BLOCK)]),
        )
        pl.when(~last)(lambda: plgpu.barrier_arrive(shared.pair_read))
        return gradient

    p, dp = probabilities(0, 0)
    add(0, 0, p, dp, delta_of(p, dp))
    if shared.heads.blocks == 2:
        plgpu.barrier_wait(_Place(shared.heads, 1).barrier(shared.loaded, i))
        p, dp = probabilities(1, 0)
        plgpu.barrier_wait(shared.delta_ready)
        delta = plgpu.load(shared.delta_smem, layout=_ROWS, optimized=False)
        pl.when(~last)(lambda: plgpu.barrier_arrive(shared.delta_read))
        pl.when(i > 0)(lambda: plgpu.barrier_wait(shared.pair_read))
        add(1, 2, p, dp, delta)
        plgpu.barrier_arrive(shared.pair_ready)
    return _product(shared.heads.size, (shared.pairs[0], shared.k.at[place.own]))


def _store_keys(place: _Place, shared: _Shared, sums, gradients):
    """Stores dk and dv of the warpgroup's keys."""
    # Not in the place of keys and values, which the other warpgroup may still read.
    buffers = (shared.q, shared.do)
    last = (shared.heads.per_group - 1) % _STAGES
    for acc, buffer, gradient in zip(sums, buffers, gradients, strict=True):
        mine = buffer.at[last].at[place.own]
        mine[...] = acc[...].astype(gradient.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mine, gradient.at[place.tokens, place.group_columns])
    plgpu.wait_smem_to_gmem(0)


def _product(columns: int, *operands):
    """The sum of matrix products, each of a left operand with a warpgroup's 64 rows and a right
    one, float32, in registers."""

    def multiply(acc):
        for left, right in operands:
            plgpu.wgmma(acc, left, right)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((BLOCK, columns), jnp.float32))


def _seen(shape, query: int, first, key: int = 0):
    """Which keys of the row, from `key` on, are seen by its queries from `query` on, each of which
    sees none before its own of `first`, if there is one."""
    queries, keys = (
        plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1)
    )
    causal = queries + query >= keys + key
    return causal if first is None else causal & (keys + key >= _across(first, shape))


def _load_rows(gmem):
    """A value for each of a warpgroup's rows."""
    return plgpu.load(gmem, layout=_ROWS, optimized=False)


def _stage(i):
    return lax.rem(i, jnp.int32(_STAGES))


def _across(values, shape):
    return lax.broadcast_in_dim(values, shape, (0,))
