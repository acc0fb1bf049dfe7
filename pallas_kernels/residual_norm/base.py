"""The plain-XLA implementation of the residual norm: it runs on every device and is the reference
for the other implementation."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def refusal(x, weight) -> str | None:
    del x, weight
    return None


def residual_norm_xla(
    x: Float[Array, "*N d"], weight: Float[Array, " d"], eps: float
) -> tuple[Float[Array, "*N d"], Float[Array, "*N d"]]:
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return x, lax.stop_gradient(weight) * normed.astype(x.dtype)
