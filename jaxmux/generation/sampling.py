"""How the next token is chosen from the logits."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32
from pydantic import Field

from jaxmux.field_checks import EXACT, Natural, checked_dataclass


@checked_dataclass
class Sampling:
    """How tokens are chosen. The logits are divided by `temperature`. The `top_k` most likely
    tokens are kept, then those of them that `top_p` admits, and one of the kept tokens is drawn.

    What is drawn for a sequence depends on its own seed and on the places of its tokens, not on
    other sequences or on their number.

    Attributes:
      temperature: 0 takes the most likely token.
      top_p: the most likely tokens are kept, up to the token at which the sum of their
        probabilities reaches this number (nucleus sampling, Holtzman et al. 2020); 1 keeps all.
      top_k: number of tokens that are kept; 0 keeps all. Tokens as likely as the last are kept too.
      seed: seed of the first request's draws; request i has the seed `seed + i`, modulo 2^32.

    Raises:
      ValueError: a value is outside its range.
    """

    temperature: Annotated[float, Field(ge=0), EXACT] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1), EXACT] = 1.0
    top_k: Natural = 0
    seed: Natural = 0


class SamplingForm(NamedTuple):
    """The part of a `Sampling` that is compiled into the program.

    Attributes:
      greedy: whether the most likely token is taken.
      nucleus: whether `top_p` is below 1, which needs a sort of the vocabulary.
    """

    greedy: bool
    top_k: int
    nucleus: bool

    @classmethod
    def of(cls, sampling: Sampling) -> "SamplingForm":
        if sampling.temperature == 0:
            return cls(True, 0, False)
        return cls(False, sampling.top_k, sampling.top_p < 1)


class SamplingNumbers(NamedTuple):
    """The part of a `Sampling` that a program takes as data.

    Attributes:
      temperature: as in `Sampling`; any number for greedy forms.
      seeds: uint32, the seed of every sequence.
    """

    temperature: Float[Array, ""]
    top_p: Float[Array, ""]
    seeds: UInt32[Array, " B"]


def next_tokens(
    form: SamplingForm,
    numbers: SamplingNumbers,
    logits: Float[Array, "B vocab"],
    place: Int[Array, " B"],
) -> Int[Array, " B"]:
    """The next token of every sequence, int32, from float32 logits. `place` is the position that
    each new token gets in its sequence."""
    if form.greedy:
        return logits.argmax(axis=-1).astype(jnp.int32)
    logits = logits / numbers.temperature
    if 0 < form.top_k < logits.shape[-1]:
        logits = _at_least(logits, jax.lax.top_k(logits, form.top_k)[0][:, -1])
    if form.nucleus:
        logits = _at_least(logits, _nucleus_end(logits, numbers.top_p))
    draw = jax.vmap(
        lambda seed, place, logits_of_one: jax.random.categorical(_key(seed, place), logits_of_one)
    )
    return draw(numbers.seeds, place, logits).astype(jnp.int32)


def _key(seed: UInt32[Array, ""], place: Int[Array, ""]) -> Array:
    return jax.random.fold_in(jax.random.key(seed), place)


def _at_least(logits: Float[Array, "B vocab"], least: Float[Array, " B"]):
    return jnp.where(logits < least[:, None], -jnp.inf, logits)


def _nucleus_end(logits: Float[Array, "B vocab"], top_p) -> Float[Array, " B"]:
    """The smallest logit of the tokens that `Sampling.top_p` keeps."""
    falling = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
    probabilities = jax.nn.softmax(falling, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # The most likely token is always kept.
    kept = (before < top_p).at[:, 0].set(True)
    return jnp.where(kept, falling, jnp.inf).min(axis=-1)
