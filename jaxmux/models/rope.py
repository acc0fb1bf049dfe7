"""Rotary position embeddings, half-split as in Hugging Face, with Llama 3.1's frequency scaling."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .architectures import BackboneConfig


def rotary_angles(
    config: BackboneConfig, positions: Int[Array, "*tokens"]
) -> tuple[Float[Array, "*tokens half"], Float[Array, "*tokens half"]]:
    """Cosines and sines of the rotary angles, float32: for each token, half = head_dim / 2 of each.
    `positions` is int32, the position of each token in its sequence."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(_frequencies(config))
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "*tokens heads head_dim"],
    cos: Float[Array, "*tokens half"],
    sin: Float[Array, "*tokens half"],
) -> Float[Array, "*tokens heads head_dim"]:
    """Rotates queries or keys by their positions (RoFormer, arXiv 2104.09864, equation 34). The
    result has the dtype of `x` and is computed in float32. `cos` and `sin` come from
    `rotary_angles`."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def _frequencies(config: BackboneConfig) -> Float[np.ndarray, " half"]:
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = (1.0 / config.rope_theta**exponents).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    # Frequencies of long wavelengths are divided by `factor`, those of short wavelengths are kept,
    # and those in between are interpolated linearly.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return (kept * frequencies + (1 - kept) * frequencies / scaling.factor).astype(np.float32)
