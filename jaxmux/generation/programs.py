"""The programs of generation: one reads prompts, one puts them into free rows of a batch, and one
writes several tokens.

All sequences of a batch take part in every step. A step computes one token of each sequence, so it
reads the weights only once.
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
    """The sequences of a batch, one in each row.

    Attributes:
      cache: keys and values of all tokens of each sequence except the last one.
      last: int32, the last token of each sequence.
      place: int32, the position of this token.
      live: whether the sequence continues.
    """

    cache: tuple[KeysValues, ...]
    last: Int[Array, " B"]
    place: Int[Array, " B"]
    live: Bool[Array, " B"]


class Served(NamedTuple):
    """The adapters of T slots, and the slots of the rows.

    Attributes:
      outside: the arrays of all slots at points outside the layers, by kind.
      of_layers: the arrays of all slots in each layer, by kind.
      scale: float32, see `SlotTable`.
      chunk_slot: int32, the slot of each chunk; all chunks have the same number of rows.
    """

    outside: dict[str, Any]
    of_layers: tuple[dict[str, Any], ...]
    scale: Float[Array, " T"]
    chunk_slot: Int[Array, " chunks"]


class Choices(NamedTuple):
    """How tokens are chosen, and where sequences end.

    Attributes:
      ends: int32, the position behind the last token that a sequence may have.
      stops: int32, the tokens that end the sequence of each row, filled up with -1.
    """

    sampling: SamplingNumbers
    ends: Int[Array, " B"]
    stops: Int[Array, "B stops"]


def no_sequences(config: BackboneConfig, rows: int, places: int, dtype: jnp.dtype) -> Sequences:
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
    """Computes the keys and values of prompts.

    Args:
      tokens: the prompts, as in `Microbatch.tokens`, with padding behind them.
      lengths: number of tokens of each prompt; 0 for a row without one.
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
      prompts: keys and values of all tokens of each prompt except the last one.
      rows: the row of each prompt; a prompt whose number is behind the last row is ignored.
      last: the last token of each prompt.
      place: the position of this token.
    """

    def put(held: Array, new: Array | bool) -> Array:
        return held.at[rows].set(new, mode="drop", unique_indices=True)

    def put_cache(held: Array, new: Array) -> Array:
        places = held.shape[2]
        # The row's last sequence may have left values that are not finite, so all are overwritten.
        new = jnp.pad(new[:, :, :places], _behind(max(0, places - new.shape[2])))
        return put(held, new)

    cache, *others, live = sequences
    others = map(put, others, (last, place))
    return Sequences(jax.tree.map(put_cache, cache, prompts), *others, put(live, True))


def _behind(places: int) -> list[tuple[int, int]]:
    return [(0, 0), (0, 0), (0, places), (0, 0)]


def with_places(sequences: Sequences, places: int) -> Sequences:
    """Replaces the cache by one with fewer positions, enough for all sequences that continue.
    Arrays are replaced one by one and the old ones deleted, which needs little additional
    memory."""

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
    """Writes tokens of every sequence that continues.

    Args:
      form: static choices of `choices.sampling`.
      most_steps: most steps, which is a size in the compiled program.
      sequences: the sequences; their arrays are overwritten.
      steps: number of steps.
      fewest: no step begins when at most this number of sequences continue.

    Returns:
      The new tokens, int32, -1 where there is none; and the sequences with these tokens.
    """

    def step(carry):
        number, written, sequences = carry
        cache, last, place, live = sequences
        microbatch = single_tokens(last, place, served.chunk_slot)
        logits, cache = next_logits(
            config,
            options=options,
            weights=weights,
            served=served,
            cache=cache,
            place=place,
            microbatch=microbatch,
            last=jnp.zeros_like(place),
        )
        token = next_tokens(form, choices.sampling, logits, place + 1)
        written = written.at[number].set(jnp.where(live, token, -1))
        # A sequence that has ended computes the same token repeatedly.
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
    """A microbatch without labels, with one sequence in each row.

    Args:
      tokens: int32, the tokens of each sequence, with padding behind them.
      lengths: int32, number of tokens of each sequence.
      chunk_slot: int32, the slot of each chunk of one or several rows; None for row i in slot i.
    """
    rows, row_len = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(row_len, dtype=jnp.int32), tokens.shape)
    segment_ids = jnp.where(positions < lengths[:, None], 0, -1)
    slots = jnp.arange(rows, dtype=jnp.int32) if chunk_slot is None else chunk_slot
    return _microbatch(tokens, positions, segment_ids, slots)


def single_tokens(last, place, chunk_slot) -> Microbatch:
    """A microbatch with one token in each row, at position `place`."""
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
    """The logits for the token behind index `last` of each row of the microbatch, and the cache
    with the microbatch's tokens. `cache` and `place` are as for `cached_hidden_states`."""
    zeros = jnp.zeros_like(served.scale)
    slots = SlotTable(served.scale, zeros, zeros.astype(jnp.uint32))
    at_head, _ = head_adapters(options.adapter_ops, served.outside, None, microbatch.chunk_slot)
    hidden, cache = cached_hidden_states(
        config,
        weights,
        served.outside,
        served.of_layers,
        cache=cache,
        place=place,
        microbatch=microbatch,
        slots=slots,
        options=options,
        at_head=at_head,
    )
    rows, row_len = microbatch.tokens.shape
    hidden = hidden.reshape(rows, row_len, -1)[jnp.arange(rows), last]
    return logits_of(weights, hidden, at_head), cache
