"""The two programs of generation: one reads whole prompts, one writes several tokens.

All sequences of a batch take part in every step. A step computes one token of each, so it reads the
weights once, whatever the number of sequences.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmux.data import Microbatch
from jaxmux.models import (
    BackboneConfig,
    ForwardOptions,
    SlotTable,
    Weights,
    cached_hidden_states,
    compute_dtype,
    empty_cache,
    logits_of,
)
from jaxmux.models.attention_cache import KeysValues
from jaxmux.models.head_adapters import head_adapters

from .sampling import SamplingForm, SamplingNumbers, next_tokens


class Sequences(NamedTuple):
    """What changes while tokens are written.

    Attributes:
      cache: keys and values of all tokens but the last of each sequence.
      last: int32, the last token of each sequence.
      place: int32, its place.
      live: whether the sequence goes on.
    """

    cache: tuple[KeysValues, ...]
    last: Int[Array, " B"]
    place: Int[Array, " B"]
    live: Bool[Array, " B"]


class Served(NamedTuple):
    """What stays while tokens are written.

    Attributes:
      adapters: by kind, the arrays of all slots at points outside the layers.
      of_layers: the same in each layer.
      scale: float32 [T], see `SlotTable`.
      chunk_slot: int32, the slot of each of the equal parts of the batch.
      ends: int32, the place behind the last token that a sequence may have.
      stops: int32, by row the tokens that end its sequence; -1 where it has no more.
      sampling: how tokens are chosen.
    """

    adapters: dict[str, Any]
    of_layers: tuple[dict[str, Any], ...]
    scale: Float[Array, " T"]
    chunk_slot: Int[Array, " chunks"]
    ends: Int[Array, " B"]
    stops: Int[Array, "B stops"]
    sampling: SamplingNumbers


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def read_prompts(
    config: BackboneConfig,
    options: ForwardOptions,
    form: SamplingForm,
    places: int,
    weights: Weights,
    served: Served,
    tokens: Int[Array, "B row_len"],
    lengths: Int[Array, " B"],
) -> Sequences:
    """Reads all prompts, and chooses the first new token of each.

    Args:
      config: configuration of the backbone.
      options: static choices.
      form: how tokens are chosen.
      places: most tokens of a sequence, at least row_len.
      weights: weights of the backbone.
      served: what stays.
      tokens: the prompts, as in `Microbatch.tokens`, and padding behind them.
      lengths: the tokens of each prompt; 0 for a row without a sequence.

    Returns:
      The sequences with their first new token. The cache holds the prompts.
    """
    cache = empty_cache(config, len(tokens), places, compute_dtype(weights))
    microbatch = prompts_in_rows(tokens, lengths, served.chunk_slot)
    logits, cache = next_logits(
        config, options, weights, served, cache, None, microbatch, jnp.maximum(lengths - 1, 0)
    )
    first = next_tokens(form, served.sampling, logits, lengths)
    live = (lengths > 0) & (lengths + 1 < served.ends) & ~_stops(served, first)
    return Sequences(cache, first, lengths, live)


@partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=(6,))
def write_tokens(
    config: BackboneConfig,
    options: ForwardOptions,
    form: SamplingForm,
    steps: int,
    weights: Weights,
    served: Served,
    sequences: Sequences,
) -> tuple[Int[Array, "steps B"], Sequences]:
    """Writes up to `steps` tokens of every sequence that goes on; fewer if all end before.

    Args:
      config, options, form, weights, served: as for `read_prompts`.
      steps: number of steps.
      sequences: the sequences; their arrays are overwritten.

    Returns:
      int32, the new tokens; -1 where a sequence had ended. And the sequences with them.
    """

    def step(carry):
        number, written, sequences = carry
        cache, last, place, live = sequences
        microbatch = single_tokens(last, place, served.chunk_slot)
        given = served, cache, place, microbatch, jnp.zeros_like(place)
        logits, cache = next_logits(config, options, weights, *given)
        token = next_tokens(form, served.sampling, logits, place + 1)
        written = written.at[number].set(jnp.where(live, token, -1))
        # A sequence that has ended computes the same token again and again.
        last, place = jnp.where(live, token, last), place + live
        live &= (place + 1 < served.ends) & ~_stops(served, token)
        return number + 1, written, Sequences(cache, last, place, live)

    def goes_on(carry):
        number, _, sequences = carry
        return (number < steps) & sequences.live.any()

    written = jnp.full((steps, len(sequences.last)), -1, jnp.int32)
    _, written, sequences = jax.lax.while_loop(goes_on, step, (0, written, sequences))
    return written, sequences


def prompts_in_rows(
    tokens: Int[Array, "rows row_len"],
    lengths: Int[Array, " rows"],
    chunk_slot: Int[Array, " chunks"] | None = None,
) -> Microbatch:
    """A microbatch without labels, with one sequence a row.

    Args:
      tokens: int32 [rows, row_len], the tokens of each sequence, and padding behind them.
      lengths: int32 [rows], the tokens of each sequence.
      chunk_slot: int32, the slot of each chunk, which has one or several rows. None for row i in
        slot i.
    """
    rows, row_len = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(row_len, dtype=jnp.int32), tokens.shape)
    segment_ids = jnp.where(positions < lengths[:, None], 0, -1)
    slots = jnp.arange(rows, dtype=jnp.int32) if chunk_slot is None else chunk_slot
    return _microbatch(tokens, positions, segment_ids, slots)


def single_tokens(last, place, chunk_slot) -> Microbatch:
    """A microbatch of one token a row, at its place; arguments as for `prompts_in_rows`."""
    segment_ids = jnp.zeros((len(last), 1), jnp.int32)
    return _microbatch(last[:, None], place[:, None], segment_ids, chunk_slot)


def _microbatch(tokens, positions, segment_ids, chunk_slot) -> Microbatch:
    return Microbatch(
        tokens=tokens,
        targets=tokens,
        loss_weight=jnp.zeros(tokens.shape),
        positions=positions,
        segment_ids=segment_ids,
        sample_id=jnp.zeros(tokens.shape, jnp.uint32),
        chunk_slot=chunk_slot,
    )


def next_logits(
    config: BackboneConfig,
    options: ForwardOptions,
    weights: Weights,
    served: Served,
    cache: tuple[KeysValues, ...],
    place: Int[Array, " B"] | None,
    microbatch: Microbatch,
    last: Int[Array, " B"],
) -> tuple[Float[Array, "B vocab"], tuple[KeysValues, ...]]:
    """The logits behind one token of each row; and the cache with the tokens of the microbatch.

    Args:
      config, options, weights, served: as for `read_prompts`.
      cache, place, microbatch: as for `cached_hidden_states`.
      last: index in its row of the token.
    """
    zeros = jnp.zeros_like(served.scale)
    slots = SlotTable(served.scale, zeros, zeros.astype(jnp.uint32))
    at_head, _ = head_adapters(options.adapter_ops, served.adapters, None, microbatch.chunk_slot)
    given = weights, served.adapters, served.of_layers, cache, place, microbatch, slots, options
    hidden, cache = cached_hidden_states(config, *given, at_head)
    rows, row_len = microbatch.tokens.shape
    hidden = hidden.reshape(rows, row_len, -1)[jnp.arange(rows), last]
    return logits_of(weights, hidden, at_head), cache


def _stops(served: Served, tokens: Int[Array, " B"]) -> Bool[Array, " B"]:
    return (tokens[:, None] == served.stops).any(axis=-1)
