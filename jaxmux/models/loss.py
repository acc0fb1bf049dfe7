"""Cross entropy and log-probabilities over the frozen head, in blocks of tokens, so that the
float32 logits of the whole stream are never in memory.

The head gets no gradient, so the backward pass only needs the gradients of the hidden states, and
of adapters at the head if there are any. They are computed together with the loss, from the same
logits.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxmux.objectives.token_losses import (
    SUMS,
    AnswerSums,
    TokenRule,
    TokenTerms,
    pair_losses,
    token_losses,
    token_parts,
)
from jaxmux.pallas_kernels.frozen_weight import FrozenWeight

from .adapter_ops import AdapterOps
from .head_adapters import changed_logits, differentiable, with_others

# Maximum number of tokens in a block. The float32 logits of 1024 tokens take 0.5 GB for a
# vocabulary of 128k.
_BLOCK_TOKENS = 1024
# Fewer tokens in a block would make its products slow.
_LEAST_BLOCK_TOKENS = 128


def block_bytes(vocab_size: int, chunk_len: int = 1) -> int:
    """Bytes that `chunk_losses` needs for its largest temporary arrays, the float32 logits of one
    block of tokens and their gradient. A block has at most 1024 tokens, or one chunk (consecutive
    tokens of one task) of `chunk_len` tokens if that is longer and adapters change its logits."""
    return 2 * 4 * max(_BLOCK_TOKENS, chunk_len) * vocab_size


def _pieces(chunk_len: int) -> int:
    """The number of equal pieces into which a chunk is cut so that no piece exceeds a block; 1 if
    it cannot be cut."""
    most = chunk_len // _LEAST_BLOCK_TOKENS
    for pieces in range(-(-chunk_len // _BLOCK_TOKENS), most + 1):
        if chunk_len % pieces == 0:
            return pieces
    return 1


class TokenLosses(NamedTuple):
    """The losses of tokens in the place of their cross entropy.

    Attributes:
      terms: arrays [N].
      rules: arrays [N], the numbers of each token's task.
      of_pairs: [N], what the losses of pairs add to the weights of their tokens; 0 of others.
    """

    terms: TokenTerms
    rules: TokenRule
    of_pairs: Float[Array, " N"]

    @classmethod
    def cross_entropy(cls, weight: Float[Array, " N"]) -> "TokenLosses":
        """The cross entropy with this weight of each token."""
        zeros = jnp.zeros_like(weight)
        rules = TokenRule.table({}, len(weight))
        return cls(TokenTerms(weight, zeros, zeros, zeros), rules, zeros)


class PairLosses(NamedTuple):
    """The losses of pairs.

    Attributes:
      weight: what they add to the weights of tokens in the cross entropy.
      sums: what they add to `PAIR_SUMS`, each pair at its first token.
    """

    weight: Float[Array, "rows row_len"]
    sums: Float[Array, "rows row_len sums"]

    @classmethod
    def none(cls, rows: int, row_len: int) -> "PairLosses":
        return cls(jnp.zeros((rows, row_len)), jnp.zeros((rows, row_len, SUMS)))

    @classmethod
    def of(
        cls,
        log_probs: Float[Array, "rows row_len"],
        terms: TokenTerms,
        rules: TokenRule,
        spans: Int[Array, "rows pairs 2"],
    ) -> "PairLosses":
        """Arrays of `terms` and `rules` are [rows, row_len], and `spans` are
        `Microbatch.pair_spans`. The bits of a pair's numbers do not depend on its place."""
        rows, row_len = log_probs.shape
        begin, length = spans[..., 0, None], spans[..., 1, None]
        within = jnp.arange(row_len)
        places = jnp.minimum(begin + within, row_len - 1).reshape(rows, -1)

        def aligned(of_tokens):
            # [rows, pairs, row_len]: each pair begins at 0, so that the order of sums is the same.
            found = jnp.take_along_axis(of_tokens, places, axis=1).reshape(*spans.shape[:2], -1)
            return jnp.where(within < length, found, 0)

        chosen, rejected = (
            AnswerSums(*(aligned(x).sum(axis=-1) for x in token_parts(jnp, log_probs, terms, side)))
            for side in (False, True)
        )
        first = jnp.minimum(begin[..., 0], row_len - 1)
        rule = TokenRule(*(jnp.take_along_axis(x, first, axis=1) for x in rules))
        share = aligned(terms.sampled).max(axis=-1)
        of_pairs, of_chosen, of_rejected = pair_losses(jnp, rule, share, chosen, rejected)
        # [rows, pairs, row_len]. One of the summands at most is not 0.
        is_inside = (within >= begin) & (within < begin + length)
        slopes = jnp.where(
            terms.advantage[:, None] > 0, of_chosen[..., None], of_rejected[..., None]
        )
        is_counted = is_inside & (terms.advantage[:, None] != 0)
        slope = jnp.where(is_counted, slopes, 0).sum(axis=1)
        weight = jnp.where(terms.advantage != 0, slope * terms.advantage, 0)
        is_first = is_inside & (within == begin)
        sums = jnp.where(is_first[..., None], of_pairs[:, :, None], 0).sum(axis=1)
        return cls(weight, sums)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def chunk_losses(
    hidden: Float[Array, "N d"],
    head: FrozenWeight,
    targets: Int[Array, " N"],
    losses: TokenLosses,
    chunk_slot: Int[Array, " chunks"],
    vocabulary_axis: str | None = None,
    ops: AdapterOps = (),
    own: Any = None,
) -> Float[Array, "chunks sums"]:
    """The sums of `TOKEN_SUMS` over the tokens of every chunk, without the losses of pairs. The
    first is the loss: for cross entropy, Σ weight · (log Σ exp(logits) − logit of the target).

    A chunk is a number of consecutive tokens that belong to one task; N tokens are divided into
    chunks of equal length. The logits are computed in blocks, so they are never all in memory. The
    function is differentiable only with respect to `hidden` and `own`, and only the loss has a
    gradient. A token of weight 0 adds exactly 0, even if its hidden state is not finite.

    Args:
      hidden: [N, d], hidden states after the final norm, from `hidden_states`.
      head: the language-model head [d, vocab], from `head_kernel`.
      targets: int32 [N], the token to predict at each position.
      losses: a negative weight makes the target less probable. NaN reaches the loss and the
        gradient of its chunk.
      chunk_slot: `Microbatch.chunk_slot`. Only its length is used, the number of chunks.
      vocabulary_axis: name of a mesh axis, inside `jax.shard_map`: each device along it has the
        head for some tokens of the vocabulary, in order, and computes a summand of the gradient of
        `hidden` and `own`. None if `head` has all tokens.
      ops: operations of the kinds that change logits, by name of the kind; empty if none does.
      own: `LayerAdapters.own` of the head, arrays [chunks, ...]; None without `ops`.

    Returns:
      float32 [chunks, sums]; the loss is in nats times weight.
    """
    chunks = len(chunk_slot)

    def block_losses(*block):
        return _block_losses(vocabulary_axis, ops, head, *block)[0]

    sums = _per_block(block_losses, (hidden, targets, losses), chunks, own)
    return _of_chunks(sums, chunks)


def _of_chunks(sums: Float[Array, "pieces sums"], chunks: int) -> Float[Array, "chunks sums"]:
    return sums.reshape(chunks, -1, SUMS).sum(axis=1)


def _forward(hidden, head, targets, losses, chunk_slot, vocabulary_axis, ops, arrays):
    block_losses, chunks = partial(_block_losses, vocabulary_axis, ops, head), len(chunk_slot)
    sums, d_hidden, d_arrays = _per_block(block_losses, (hidden, targets, losses), chunks, arrays)
    return _of_chunks(sums, chunks), (d_hidden.reshape(hidden.shape), d_arrays)


def _backward(vocabulary_axis, ops, gradients, cotangent):
    d_hidden, d_arrays = gradients
    cotangent = cotangent[:, 0]
    per_token = jnp.repeat(cotangent, len(d_hidden) // len(cotangent))
    d_hidden *= per_token[:, None].astype(d_hidden.dtype)
    d_arrays = jax.tree.map(lambda x: x * cotangent.reshape(-1, *[1] * (x.ndim - 1)), d_arrays)
    return d_hidden, None, None, None, None, d_arrays


chunk_losses.defvjp(_forward, _backward)


def log_probs(
    hidden: Float[Array, "N d"],
    head: FrozenWeight,
    targets: Int[Array, " N"],
    chunk_slot: Int[Array, " chunks"],
    vocabulary_axis: str | None = None,
    ops: AdapterOps = (),
    own: Any = None,
    with_squares: bool = True,
) -> Float[Array, "N scores"]:
    """At each position, the log-probability of the target in nats, at temperature 1; and
    `with_squares`, log Σ p² over the probabilities p of all tokens. Other arguments are those of
    `chunk_losses`."""

    def block_log_probs(hidden, targets, arrays):
        found = _logits(vocabulary_axis, ops, head, hidden, targets, arrays)
        if not with_squares:
            return (found.of_target - found.log_total).reshape(*targets.shape, 1)
        total = jax.nn.logsumexp(2 * found.logits, axis=-1, keepdims=True)
        if vocabulary_axis is not None:
            total = jax.nn.logsumexp(lax.all_gather(total, vocabulary_axis), axis=0)
        log_probs = found.of_target - found.log_total, total - 2 * found.log_total
        return jnp.concatenate(log_probs, axis=-1).reshape(*targets.shape, 2)

    found = _per_block(block_log_probs, (hidden, targets), len(chunk_slot), own)
    return found.reshape(*targets.shape, -1)


def _per_block(block_function, streams, whole_chunks, arrays):
    """Applies `block_function` to blocks of whole chunks, one after another, and concatenates its
    results, whose first axis is that of chunks. A chunk that is longer than a block is cut into
    pieces, so there may be several entries for each of the `whole_chunks`.

    Args:
      block_function: gets the arrays [chunks, chunk_len, ...] of `streams` and the arrays [chunks,
        ...] of `arrays`.
      streams: trees of arrays [N, ...], the hidden states first.
    """
    tokens = len(streams[0])
    # Adapters at the head have arrays for whole chunks.
    chunks = whole_chunks * (_pieces(tokens // whole_chunks) if arrays is None else 1)
    chunk_len = tokens // chunks
    chunks_per_block = min(chunks, max(1, _BLOCK_TOKENS // chunk_len))
    missing = -chunks % chunks_per_block

    def blocks(x):
        x = jnp.pad(x, [(0, missing * chunk_len)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(-1, chunks_per_block, chunk_len, *x.shape[1:])

    def blocks_of_chunks(x):
        x = jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(-1, chunks_per_block, *x.shape[1:])

    result = jax.lax.map(
        lambda block: block_function(*block),
        [*jax.tree.map(blocks, streams), jax.tree.map(blocks_of_chunks, arrays)],
    )
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:chunks], result)


class _Logits(NamedTuple):
    """The logits of a block, the logarithm of the sum of their exponentials, and the target's
    logit. With a divided vocabulary, `target` is an index among this device's tokens, or outside
    of their range. `change_backward` is that of `_changed`, if adapters change logits."""

    logits: Float[Array, "N vocab"]
    log_total: Float[Array, "N 1"]
    of_target: Float[Array, "N 1"]
    target: Int[Array, "N 1"]
    change_backward: Callable[..., Any] | None


def _logits(vocabulary_axis, ops, head, hidden, targets, arrays) -> _Logits:
    logits, change_backward = head.matmul(hidden.reshape(-1, hidden.shape[-1]), jnp.float32), None
    if ops:
        logits, change_backward = _changed(vocabulary_axis, ops, arrays, hidden, logits)
    target = targets.reshape(-1, 1)
    if vocabulary_axis is None:
        log_total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        of_target = jnp.take_along_axis(logits, target, axis=-1)
    else:
        target -= lax.axis_index(vocabulary_axis) * logits.shape[1]
        log_total, of_target = _over_vocabulary(logits, target, vocabulary_axis)
    return _Logits(logits, log_total, of_target, target, change_backward)


def _block_losses(vocabulary_axis, ops, head, hidden, targets, losses, arrays):
    """Sums [chunks, sums] of a block of hidden states [chunks, chunk_len, d], and the gradients of
    the loss with respect to `hidden` and `arrays`, or this device's summands of the gradients."""
    found = _logits(vocabulary_axis, ops, head, hidden, targets, arrays)
    terms, rules, of_pairs = jax.tree.map(lambda x: x.reshape(-1), losses)
    log_probs = (found.of_target - found.log_total)[:, 0]
    of_tokens, weight = token_losses(jnp, rules, log_probs, terms)
    weight += of_pairs
    sums = of_tokens.reshape(*targets.shape, -1).sum(axis=1)

    is_target = jnp.arange(found.logits.shape[1]) == found.target
    d_logits = weight[:, None] * (jnp.exp(found.logits - found.log_total) - is_target)
    d_logits = jnp.where(weight[:, None] != 0, d_logits, 0)
    d_arrays, d_added = None, 0
    if ops:
        d_arrays, d_added, d_logits = found.change_backward(d_logits)
    d_hidden = head.matmul_transposed(d_logits.astype(hidden.dtype)).reshape(hidden.shape)
    return sums, d_hidden + d_added if ops else d_hidden, d_arrays


def _changed(vocabulary_axis, ops, arrays, hidden, logits):
    """The logits [N, vocab] with the changes of adapters; and a function that computes from their
    gradient the gradients of `arrays`, of `hidden` and of the unchanged logits."""

    def change(floats, hidden, logits):
        by_chunk = logits.reshape(*hidden.shape[:2], -1)
        first = lax.axis_index(vocabulary_axis) * logits.shape[1] if vocabulary_axis else 0
        changed = changed_logits(ops, with_others(floats, arrays), hidden, by_chunk, first)
        return changed.reshape(logits.shape)

    return jax.vjp(change, differentiable(arrays), hidden, logits)


def _over_vocabulary(
    logits: Float[Array, "N device_vocab"], target: Int[Array, "N 1"], axis: str
) -> tuple[Float[Array, "N 1"], Float[Array, "N 1"]]:
    """The logarithm of the sum of exponentials over the whole vocabulary, and the target's logit.
    A device has the logits of some tokens. `target` is an index among these tokens, or outside of
    their range if another device has the target."""
    largest = lax.pmax(logits.max(axis=-1, keepdims=True), axis)
    # As in `logsumexp`, so that the exponents of infinite logits are not NaN.
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    total = lax.psum(jnp.exp(logits - largest).sum(axis=-1, keepdims=True), axis)
    is_here = (target >= 0) & (target < logits.shape[1])
    logit = jnp.take_along_axis(logits, jnp.where(is_here, target, 0), axis=-1)
    return jnp.log(total) + largest, lax.psum(jnp.where(is_here, logit, 0), axis)
