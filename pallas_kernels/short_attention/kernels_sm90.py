"""Causal attention, forward and backward, for Hopper GPUs and rows so short that one thread block
holds a whole row.

A thread block computes one row and one key/value head. Keys and values stay in shared memory while
the query heads that share them pass through a ring of stages. Warpgroup w computes the row's w-th
block of 64 tokens. Every input is read once, and the backward pass recomputes the probabilities, so
the kernels are limited by memory bandwidth. Kernels for long rows spend most of their time on such
rows waiting for their pipelines.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from .. import plgpu
from ..compilation import traced_once
from ..grouped_lora.tiles_sm90 import load_unoptimized, product, smem_tiles, warpgroups

BLOCK = 64
# Number of query heads in flight.
_STAGES = 2


class Heads(NamedTuple):
    """Static sizes.

    Attributes:
      row_len: number of tokens in a row, 64 or 128.
      groups: number of key/value heads.
      per_group: number of query heads that share a key/value head.
      size: size of a head, a multiple of 64.
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


@traced_once("heads")
def forward(
    q: Float[Array, "N HD"],
    k: Float[Array, "N KD"],
    v: Float[Array, "N KD"],
    firsts: Int[Array, " N"] | None,
    heads: Heads,
) -> tuple[Float[Array, "N HD"], Float[Array, "H N"]]:
    """The outputs, and the base-2 logarithm of every softmax's denominator, float32.

    Args:
      q, k, v: half precision, with the heads side by side: HD and KD are the numbers of query heads
        and of key/value heads times the size of a head. Rows of `heads.row_len` tokens lie one
        after another.
      firsts: int32, for each token the index in its row of the first token that it attends to; None
        if every token attends to its row from the first token on.
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
            "q_smem": smem_tiles((_STAGES, *block), q.dtype),
            "kv_smem": [smem_tiles(block, q.dtype)] * 2,
            "p_smem": [smem_tiles((BLOCK, (i + 1) * BLOCK), q.dtype) for i in range(heads.blocks)],
            "loaded": plgpu.Barrier(num_arrivals=1, num_barriers=_STAGES * heads.blocks),
            "kv_loaded": plgpu.Barrier(num_arrivals=2 * heads.blocks),
        },
    )(q, k, v, firsts)


@traced_once("heads")
def backward(
    q: Float[Array, "N HD"],
    k: Float[Array, "N KD"],
    v: Float[Array, "N KD"],
    firsts: Int[Array, " N"] | None,
    log_total: Float[Array, "H N"],
    d_out: Float[Array, "N HD"],
    heads: Heads,
) -> tuple[Float[Array, "N HD"], Float[Array, "N KD"], Float[Array, "N KD"]]:
    """The gradients of q, k and v. `log_total` is the second result of `forward`, and `d_out` the
    gradient of the outputs, in the dtype of `q`; other arguments are as for `forward`."""
    block = (heads.row_len, heads.size)
    pair = (BLOCK, BLOCK)
    return _kernel(
        partial(_backward_body, heads),
        "short_attention_backward",
        heads,
        q.shape[0],
        tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)),
        {
            "q_smem": smem_tiles((_STAGES, *block), q.dtype),
            "do_smem": smem_tiles((_STAGES, *block), q.dtype),
            "kv_smem": [smem_tiles(block, q.dtype)] * 2,
            # One tile for each pair of a query block and a key block. It holds the probabilities,
            # and later the gradients of the scores.
            "pairs": [smem_tiles(pair, q.dtype)] * (heads.blocks * (heads.blocks + 1) // 2),
            "delta_smem": plgpu.SMEM((BLOCK,), jnp.float32),
            "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES * heads.blocks),
            "kv_loaded": plgpu.Barrier(num_arrivals=2 * heads.blocks),
            "delta_ready": plgpu.Barrier(num_arrivals=1),
            "delta_read": plgpu.Barrier(num_arrivals=1),
            "pair_ready": plgpu.Barrier(num_arrivals=1),
            "pair_read": plgpu.Barrier(num_arrivals=1),
        },
    )(q, k, v, firsts, log_total, d_out)


def _kernel(body, name: str, heads: Heads, tokens: int, out_type, scratch):
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(heads.groups, tokens // heads.row_len),
        grid_names=("group", "row"),
        scratch_types=scratch,
        kernel_name=name,
        **warpgroups(heads.blocks, approx_math=True),
    )


class _Place(NamedTuple):
    """The thread block's row and key/value head, and a warpgroup's block of the row."""

    heads: Heads
    block: int

    @property
    def own(self):
        """The warpgroup's tokens, as indices in the row."""
        return pl.ds(self.block * BLOCK, BLOCK)

    @property
    def tokens(self):
        """The warpgroup's tokens, as indices in the stream."""
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

    def load_heads(self, i, arrays, stages, loaded):
        """Starts to load the warpgroup's tokens of query head i, if there is such a head."""

        @pl.when(i < self.heads.per_group)
        def _():
            for array, smem in zip(arrays, stages, strict=True):
                plgpu.copy_gmem_to_smem(
                    array.at[self.tokens, self.columns(i)],
                    smem.at[_stage(i)].at[self.own],
                    self.barrier(loaded, i),
                )

    def store_head(self, i, value, stages, array):
        """Stores the result of query head i through its stage in shared memory, and waits until the
        stage may be overwritten."""
        mine = stages.at[_stage(i)].at[self.own]
        mine[...] = value.astype(array.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mine, array.at[self.tokens, self.columns(i)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def load_keys(self, arrays, places, loaded):
        for array, smem in zip(arrays, places, strict=True):
            source = array.at[self.tokens, self.group_columns]
            plgpu.copy_gmem_to_smem(source, smem.at[self.own], loaded)


def _for_own_block(heads: Heads, body):
    """Runs `body(place)` for each warpgroup's block. Each block has different code, because the
    blocks attend to different numbers of keys."""
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
    """One head's outputs for the warpgroup's queries, float32, and the base-2 logarithms of the
    softmax's denominators."""
    keys = pl.ds(0, (place.block + 1) * BLOCK)
    scores = product((BLOCK, keys.size), [(q_smem, k_smem.at[keys].transpose((1, 0)))])
    factor = place.heads.scale * math.log2(math.e)
    scores = jnp.where(_attention_mask(scores.shape, place.block * BLOCK, first), scores, -jnp.inf)
    most = jnp.max(scores, axis=1) * factor
    p = jnp.exp2(scores * factor - _across(most, scores.shape))
    total = jnp.sum(p, axis=1)
    p_smem[...] = p.astype(p_smem.dtype)
    plgpu.commit_smem()
    value = product((BLOCK, place.heads.size), [(p_smem, v_smem.at[keys])])
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
        load = partial(place.load_heads, arrays=(q, d_out), stages=(q_smem, do_smem))
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

    def with_accumulators(place: _Place):
        accs = [plgpu.ACC((BLOCK, heads.size), jnp.float32)] * 2
        pl.run_scoped(partial(differentiate, place), *accs)

    _for_own_block(heads, with_accumulators)


class _Shared(NamedTuple):
    """Shared memory and barriers of a thread block in the backward pass."""

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

    The gradient of a softmax with probabilities p is `p (dp - delta)`, where delta is the sum of
    `p dp` over all keys of a query. Queries of block 1 also attend to the keys of block 0. The
    warpgroup of block 1 computes delta of its queries. With it, the warpgroup of block 0, which
    owns those keys, computes the gradient for this pair of blocks; both warpgroups multiply by it.
    """
    stage, block, factor = _stage(i), place.block, shared.heads.scale
    tile, last = (BLOCK, shared.heads.size), i == shared.heads.per_group - 1

    def operands(queries: int):
        rows = pl.ds(queries * BLOCK, BLOCK)
        return shared.q.at[stage].at[rows], shared.do.at[stage].at[rows]

    def probabilities(queries: int, keys: int):
        q_smem, do_smem = operands(queries)
        rows = pl.ds(keys * BLOCK, BLOCK)
        first_query = lax.axis_index("row") * shared.heads.row_len + queries * BLOCK
        tokens = pl.ds(first_query, BLOCK)
        log_totals = _load_rows(log_total.at[place.head(i), tokens])
        scores = product((BLOCK, BLOCK), [(q_smem, shared.k.at[rows].transpose((1, 0)))])
        p = jnp.exp2(scores * (factor * math.log2(math.e)) - _across(log_totals, scores.shape))
        dp = product((BLOCK, BLOCK), [(do_smem, shared.v.at[rows].transpose((1, 0)))])
        if firsts is None:
            return (
                jnp.where(_attention_mask(p.shape, 0, None), p, 0.0) if queries == keys else p
            ), dp
        # Keys outside a query's sequence may belong to another task and have infinite values.
        first = _load_rows(firsts.at[tokens])
        mask = _attention_mask(p.shape, queries * BLOCK, first, keys * BLOCK)
        return jnp.where(mask, p, 0.0), jnp.where(mask, dp, 0.0)

    def add(queries: int, pair: int, p, dp, delta):
        """Adds the pair's products to dk and dv, and writes the gradient of its scores to
        `pairs`."""
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

    # Pairs 0 and 1 are the queries and keys of blocks 0 and 1; pair 2 is queries 1 and keys 0.
    if block == 1:
        delta = delta_of(*probabilities(1, 0))
        p, dp = probabilities(1, 1)
        delta += delta_of(p, dp)
        pl.when(i > 0)(lambda: plgpu.barrier_wait(shared.delta_read))
        shared.delta_smem[...] = delta
        plgpu.barrier_arrive(shared.delta_ready)
        add(1, 1, p, dp, delta)
        plgpu.barrier_wait(shared.pair_ready)
        keys = shared.k.at[place.own], shared.k.at[pl.ds(0, BLOCK)]
        gradient = product(tile, zip(shared.pairs[1:], keys, strict=True))
        pl.when(~last)(lambda: plgpu.barrier_arrive(shared.pair_read))
        return gradient

    p, dp = probabilities(0, 0)
    add(0, 0, p, dp, delta_of(p, dp))
    if shared.heads.blocks == 2:
        plgpu.barrier_wait(_Place(shared.heads, 1).barrier(shared.loaded, i))
        p, dp = probabilities(1, 0)
        plgpu.barrier_wait(shared.delta_ready)
        delta = _load_rows(shared.delta_smem)
        pl.when(~last)(lambda: plgpu.barrier_arrive(shared.delta_read))
        pl.when(i > 0)(lambda: plgpu.barrier_wait(shared.pair_read))
        add(1, 2, p, dp, delta)
        plgpu.barrier_arrive(shared.pair_ready)
    return product(tile, [(shared.pairs[0], shared.k.at[place.own])])


def _store_keys(place: _Place, shared: _Shared, accs, gradients):
    # Stored through the stages of queries, because the other warpgroup may still read keys and
    # values.
    stages = (shared.q, shared.do)
    last = (shared.heads.per_group - 1) % _STAGES
    for acc, smem, gradient in zip(accs, stages, gradients, strict=True):
        mine = smem.at[last].at[place.own]
        mine[...] = acc[...].astype(gradient.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mine, gradient.at[place.tokens, place.group_columns])
    plgpu.wait_smem_to_gmem(0)


def _attention_mask(shape, query: int, first, key: int = 0):
    """The attention mask of a tile, whose queries start at `query` in the row and whose keys start
    at `key`. If `first` is given, it has each query's first key."""
    queries, keys = (
        plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1)
    )
    causal = queries + query >= keys + key
    return causal if first is None else causal & (keys + key >= _across(first, shape))


def _load_rows(ref):
    return load_unoptimized(ref, plgpu.Layout.WGMMA.reduce(1))


def _stage(i):
    return lax.rem(i, jnp.int32(_STAGES))


def _across(values, shape):
    return lax.broadcast_in_dim(values, shape, (0,))
