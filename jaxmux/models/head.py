"""The language-model head: losses, log-probabilities and logits of hidden states."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxmux.data.batches import Microbatch
from jaxmux.objectives.token_losses import TokenRule, TokenTerms
from jaxmux.pallas_kernels.frozen_weight import FrozenWeight

from .adapter_ops import AdapterOps, LayerAdapters
from .head_adapters import changed_logits, enter_head
from .loss import PairLosses, TokenLosses, chunk_losses, log_probs
from .modules import Weights
from .weight_sharding import TP, UNDIVIDED, WeightSharding, enter, gathered


def microbatch_losses(
    weights: Weights,
    hidden: Float[Array, "N d"],
    finite: Bool[Array, " chunks"],
    microbatch: Microbatch,
    sharding: WeightSharding = UNDIVIDED,
    at_head: LayerAdapters | None = None,
    *,
    rules: TokenRule,
) -> Float[Array, "chunks sums"]:
    """The loss of every chunk and the other sums of `TOKEN_SUMS`, or of `PAIR_SUMS`, from the
    results of `hidden_states` or `finish`; NaN for chunks that are not `finite`.

    Args:
      weights: those of the backbone, of which only the head is read.
      at_head: the adapters of the head; None if there are none.
      rules: `SlotTable.rules`.
    """
    hidden, axis, ops, arrays = _at_head(hidden, sharding, at_head)
    m, head = microbatch, head_kernel(weights, sharding)
    terms = TokenTerms(m.loss_weight, m.sampled, m.advantage, m.reference)
    slots = jnp.repeat(m.chunk_slot, len(hidden) // len(m.chunk_slot))
    rules = jax.tree.map(lambda x: x[slots], rules)

    def no_pairs():
        return PairLosses.none(*m.targets.shape)

    def pairs():
        constant = jax.tree.map(lax.stop_gradient, (hidden, head, arrays))
        found = log_probs(
            constant[0],
            constant[1],
            m.targets.reshape(-1),
            m.chunk_slot,
            axis,
            ops,
            constant[2],
            with_squares=False,
        )
        of_tokens = jax.tree.map(lambda x: x.reshape(m.targets.shape), rules)
        return PairLosses.of(found.reshape(m.targets.shape), terms, of_tokens, m.pair_spans)

    if m.pair_spans is None:
        of_pairs = no_pairs()
    else:
        # Another product with the head, which microbatches without pairs need not pay for.
        of_pairs = lax.cond((m.pair_spans[..., 1] > 0).any(), pairs, no_pairs)
    sums = chunk_losses(
        hidden,
        head,
        m.targets.reshape(-1),
        TokenLosses(
            jax.tree.map(lambda x: x.reshape(-1), terms), rules, of_pairs.weight.reshape(-1)
        ),
        m.chunk_slot,
        axis,
        ops,
        arrays,
    )
    sums += of_pairs.sums.reshape(len(finite), -1, sums.shape[-1]).sum(axis=1)
    return jnp.where(finite[:, None], sums, jnp.nan)


def microbatch_log_probs(
    weights: Weights,
    hidden: Float[Array, "N d"],
    finite: Bool[Array, " chunks"],
    microbatch: Microbatch,
    sharding: WeightSharding = UNDIVIDED,
    at_head: LayerAdapters | None = None,
) -> Float[Array, "rows row_len 2"]:
    """The results of `log_probs` at every position, and NaN in chunks that are not `finite`. On
    padding, the values mean nothing. Arguments are those of `microbatch_losses`."""
    hidden, axis, ops, arrays = _at_head(hidden, sharding, at_head)
    found = log_probs(
        hidden,
        head_kernel(weights, sharding),
        microbatch.targets.reshape(-1),
        microbatch.chunk_slot,
        axis,
        ops,
        arrays,
    )
    by_chunk = jnp.where(finite[:, None], found.reshape(len(finite), -1), jnp.nan)
    return by_chunk.reshape(*microbatch.targets.shape, 2)


def _at_head(
    hidden: Array, sharding: WeightSharding, at_head: LayerAdapters | None
) -> tuple[Array, str | None, AdapterOps, Any]:
    """The hidden states, and the last three arguments of `chunk_losses`. With a divided vocabulary,
    the gradients of hidden states and adapters are sums over devices."""
    divided, ops, arrays = sharding.split_vocabulary, (), None
    if at_head:
        ops, arrays = at_head.ops, at_head.own
        arrays = enter_head(arrays, sharding) if divided else arrays
    return enter(hidden, sharding) if divided else hidden, TP if divided else None, ops, arrays


def logits_of(
    weights: Weights, hidden: Float[Array, "N d"], at_head: LayerAdapters | None = None
) -> Float[Array, "N vocab"]:
    """The float32 logits of hidden states after the final norm, on one device. Of the backbone's
    weights, only the head is read. `at_head` are the adapters of the head, for the chunks of equal
    length into which the N tokens are divided; None if there are none."""
    logits = head_kernel(weights).matmul(hidden, jnp.float32)
    if at_head is None:
        return logits

    def by_chunk(x: Array) -> Array:
        return x.reshape(at_head.chunks, -1, x.shape[-1])

    changed = changed_logits(
        at_head.ops, at_head.own, by_chunk(hidden), by_chunk(logits), first_token=0
    )
    return changed.reshape(logits.shape)


def head_kernel(weights: Weights, sharding: WeightSharding = UNDIVIDED) -> FrozenWeight:
    """The weight [d, vocab] of the language-model head, for `chunk_losses` or to compute logits. If
    the head is tied to the embedding, it is the transposed embedding. If `sharding` divides the
    vocabulary, it has only the tokens of this device."""
    if "lm_head" in weights:
        return gathered(weights["lm_head"]["kernel"], 0, sharding)
    return FrozenWeight.of(gathered(weights["embed_tokens"]["weight"], 1, sharding).T)
