"""The plain-XLA implementation: it runs everywhere and defines what is right."""

import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

# Under this name a rematerialisation policy can keep the sum of stream and branch.
STREAM = "residual_stream"


def refusal(x, branch, weight) -> str | None:
    """Why this implementation cannot serve a call; None if it can. It serves all."""
    del x, branch, weight
    return None


def residual_norm_xla(
    eps: float,
    x: Float[Array, "N d"],
    branch: Float[Array, "N d"] | None,
    weight: Float[Array, "d"],
) -> tuple[Float[Array, "N d"], Float[Array, "N d"]]:
    """See `api.residual_norm`."""
    stream = x if branch is None else checkpoint_name(x + branch, STREAM)
    wide = stream.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return stream, lax.stop_gradient(weight) * normed.astype(stream.dtype)
