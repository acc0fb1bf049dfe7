"""Keys and values of earlier tokens, so that a program computes only the new tokens.

Row b of a cache belongs to one sequence, whose tokens fill the positions from 0 on. Each layer has
separate arrays, not a slice of a stack. A program to which the arrays are donated can therefore
write a token's keys and values in place, and reads only the arrays of this layer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .adapter_ops import float32_sums
from .architectures import BackboneConfig
from .attention import AttentionOptions, Segments, attend


class KeysValues(NamedTuple):
    """The cache of one layer, in the compute dtype: rotated keys and values of K heads, for each of
    `places` positions. Entries after a sequence's last token are not read."""

    keys: Float[Array, "B K places D"]
    values: Float[Array, "B K places D"]


class CachedTokens(NamedTuple):
    """A layer's cache, and `place`, the int32 position in it of the one new token of each sequence.
    `place` is None if the rows hold whole prompts, whose tokens fill the positions from 0 on."""

    cache: KeysValues
    place: Int[Array, " B"] | None


def empty_cache(
    config: BackboneConfig, sequences: int, places: int, dtype: jnp.dtype
) -> tuple[KeysValues, ...]:
    """A cache without tokens, with an entry for each layer. `sequences` is the number of sequences
    B, and `places` the largest number of tokens of a sequence, virtual tokens included. `dtype` is
    the compute dtype."""
    shape = sequences, config.num_kv_heads, places, config.head_dim
    return tuple(
        KeysValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
        for _ in range(config.num_layers)
    )


def cache_bytes(config: BackboneConfig, places: int, dtype: jnp.dtype) -> int:
    """Bytes of one sequence in a cache; arguments as for `empty_cache`."""
    size = config.num_layers * 2 * config.num_kv_heads * config.head_dim
    return size * places * jnp.dtype(dtype).itemsize


def attend_cached(
    q: Float[Array, "B row_len H D"],
    k: Float[Array, "B row_len K D"],
    v: Float[Array, "B row_len K D"],
    tokens: CachedTokens,
    segments: Segments,
    options: AttentionOptions,
) -> tuple[Float[Array, "B row_len H D"], KeysValues]:
    """Causal grouped-query attention of new tokens, where each row holds tokens of one sequence.
    Also returns the cache with the new keys and values. `segments` are the sequences of whole
    prompts; they are not read for single tokens. Other arguments are as for `attend`."""
    if tokens.place is None:
        out, _ = attend(q, k, v, segments, options)
        start = (0, 0, 0, 0)
        new = (jnp.swapaxes(x, 1, 2) for x in (k, v))
        written = map(jax.lax.dynamic_update_slice, tokens.cache, new, (start, start))
        return out, KeysValues(*written)
    rows = jnp.arange(len(q))
    keys, values = (
        # Each row has one token, so no two tokens are written to the same position.
        held.at[rows, :, tokens.place].set(x[:, 0], unique_indices=True, indices_are_sorted=True)
        for held, x in zip(tokens.cache, (k, v), strict=True)
    )
    seen = _seen(tokens.place, keys.shape[2], options.window)
    return _attend_to_places(q, keys, values, seen), KeysValues(keys, values)


def _seen(place: Int[Array, " B"], places: int, window: int | None) -> Bool[Array, "B places"]:
    """Whether the new token of a row, at position `place`, attends to each position."""
    distance = place[:, None] - jnp.arange(places)
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def _attend_to_places(q, keys, values, seen):
    """Computes the softmax in float32. One product has all query heads of a key head, so that keys
    and values are read once."""
    sequences, heads = keys.shape[:2]
    grouped = q.reshape(sequences, heads, -1, q.shape[-1])
    scores = float32_sums("bkgd,bksd->bkgs", grouped, keys) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1)
    out = float32_sums("bkgs,bksd->bkgd", weights.astype(values.dtype), values)
    return out.astype(q.dtype).reshape(q.shape)
