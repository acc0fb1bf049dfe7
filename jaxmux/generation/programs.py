"""The programs of generation: one reads prompts, one puts them into free rows of a batch, and one
writes several tokens.

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
    """The sequences of a batch, a row each.

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
    """The adapters, and whose rows are whose.

    Attributes:
      outside: by kind, the arrays of all slots at points outside the layers.
      of_layers: the same in each layer.
      scale: float32 [T], see `SlotTable`.
      chunk_slot: int32, the slot of each of the equal parts of the rows.
    """

    outside: dict[str, Any]
    of_layers: tuple[dict[str, Any], ...]
    scale: Float[Array, " T"]
    chunk_slot: Int[Array, " chunks"]


class Choices(NamedTuple):
    """How tokens are chosen, and which one is the last of a sequence.

    Attributes:
      sampling: how tokens are chosen.
      ends: int32, the place behind the last token that a sequence may have.
      stops: int32, by row the tokens that end its sequence; -1 where it has no more.
    """

    sampling: SamplingNumbers
    ends: Int[Array, " B"]
    stops: Int[Array, "B stops"]


def no_sequences(config: BackboneConfig, rows: int, places: int, dtype: jnp.dtype) -> Sequences:
    """A batch of free rows; arguments as for `empty_cache`."""
    zeros = jnp.zeros(rows, jnp.int32)
    cache = empty_cache(config, rows, places, dtype)
    return Sequences(cache, zeros, jnp.zeros_like(zeros), jnp.zeros(rows, bool))


@partial(jax.jit, static_argnums=(0, 1))
def read_prompts(
    config: BackboneConfig,
    options: ForwardOptions,
    weights: Weights,
    served: Served,
    tokens: Int[Array, "R row_len"],
    lengths: Int[Array, " R"],
) -> tuple[KeysValues, ...]:
    """Keys and values of prompts.

    Args:
      config: configuration of the backbone.
      options: static choices.
      weights: weights of the backbone.
      served: the adapters.
      tokens: the prompts, as in `Microbatch.tokens`, and padding behind them.
      lengths: the tokens of each prompt; 0 for a row without one.
    """
    cache = empty_cache(config, *tokens.shape, compute_dtype(weights))
    microbatch = prompts_in_rows(tokens, lengths, served.chunk_slot)
    zeros = jnp.zeros_like(lengths)
    return next_logits(config, options, weights, served, cache, None, microbatch, zeros)[1]


@partial(jax.jit, donate_argnums=(0,))
def begin_sequences(
    sequences: Sequences,
    prompts: tuple[KeysValues, ...],
    rows: Int[Array, " R"],
    last: Int[Array, " R"],
    place: Int[Array, " R"],
) -> Sequences:
    """Puts prompts into free rows.

    Args:
      sequences: the sequences; their arrays are overwritten.
      prompts: keys and values of all tokens but the last of each prompt.
      rows: the row of each prompt; of those behind the last row, nothing is put anywhere.
      last: the last token of each prompt.
      place: its place.
    """

    def put(held: Array, new: Array | bool) -> Array:
        return held.at[rows].set(new, mode="drop", unique_indices=True)

    def put_cache(held: Array, new: Array) -> Array:
        places = held.shape[2]
        # What the row's last sequence has left might not be finite, and is overwritten, too.
        new = jnp.pad(new[:, :, :places], _behind(max(0, places - new.shape[2])))
        return put(held, new)

    cache, *others, live = sequences
    others = map(put, others, (last, place))
    return Sequences(jax.tree.map(put_cache, cache, prompts), *others, put(live, True))


def _behind(places: int) -> list[tuple[int, int]]:
    return [(0, 0), (0, 0), (0, places), (0, 0)]


def with_places(sequences: Sequences, places: int) -> Sequences:
    """The sequences with a cache of fewer places, enough for all that go on. Arrays are replaced
    one by one, so that few of them are there twice.

    Args:
      sequences: the sequences; their arrays are deleted.
      places: the number of places.
    """

    def cut(held: Array) -> Array:
        new = jax.block_until_ready(held[:, :, :places])
        held.delete()
        return new

    return sequences._replace(cache=jax.tree.map(cut, sequences.cache))


@partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=(6,))
def write_tokens(
    config: BackboneConfig,
    options: ForwardOptions,
    form: SamplingForm,
    most_steps: int,
    weights: Weights,
    served: Served,
    sequences: Sequences,
    choices: Choices,
    steps: Int[Array, ""],
    fewest: Int[Array, ""],
) -> tuple[Int[Array, "most_steps B"], Sequences]:
    """Writes tokens of every sequence that goes on.

    Args:
      config, options, weights, served: as for `read_prompts`.
      form: static choices of `choices.sampling`.
      most_steps: most steps.
      sequences: the sequences; their arrays are overwritten.
      choices: how tokens are chosen.
      steps: number of steps.
      fewest: no step begins when this number of sequences goes on, or fewer.

    Returns:
      int32, the new tokens; -1 where there is none. And the sequences with them.
    """

    def step(carry):
        number, written, sequences = carry
        cache, last, place, live = sequences
        microbatch = single_tokens(last, place, served.chunk_slot)
        given = served, cache, place, microbatch, jnp.zeros_like(place)
        logits, cache = next_logits(config, options, weights, *given)
        token = next_tokens(form, choices.sampling, logits, place + 1)
        written = written.at[number].set(jnp.where(live, token, -1))
        # A sequence that has ended computes the same token again and again.
        last, place = jnp.where(live, token, last), place + live
        stops = (token[:, None] == choices.stops).any(axis=-1)
        live &= (place + 1 < choices.ends) & ~stops
        return number + 1, written, Sequences(cache, last, place, live)

    def goes_on(carry):
        number, _, sequences = carry
        return (number < steps) & (sequences.live.sum() > fewest)

    written = jnp.full((most_steps, len(sequences.last)), -1, jnp.int32)
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
    at_head, _ = head_adapters(options.adapter_ops, served.outside, None, microbatch.chunk_slot)
    given = weights, served.outside, served.of_layers, cache, place, microbatch, slots, options
    hidden, cache = cached_hidden_states(config, *given, at_head)
    rows, row_len = microbatch.tokens.shape
    hidden = hidden.reshape(rows, row_len, -1)[jnp.arange(rows), last]
    return logits_of(weights, hidden, at_head), cache
