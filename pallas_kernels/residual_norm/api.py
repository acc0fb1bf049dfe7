"""The public function of the RMS norm of a residual stream, and the choice of its
implementation."""

from jaxtyping import Array, Float

from ..implementations import Implementations, choose
from . import base, mosaic_gpu

_IMPLEMENTATIONS: Implementations = {
    "mosaic_gpu": (mosaic_gpu.residual_norm_mosaic_gpu, mosaic_gpu.refusal),
    "xla": (base.residual_norm_xla, base.refusal),
}
IMPLEMENTATIONS = tuple(_IMPLEMENTATIONS)


def residual_norm(
    x: Float[Array, "*N d"],
    weight: Float[Array, " d"],
    eps: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "*N d"], Float[Array, "*N d"]]:
    """RMS norm at a residual stream; returns the stream and its norm.

    `normed = weight * (x / sqrt(mean(x^2) + eps))`, with the mean over the last axis in float32
    (RMSNorm, arXiv 1910.07467, equation 4). The quotient is rounded to the dtype of `x` before the
    weight multiplies it.

    Continue the residual path with the returned `x`, not with the argument. The gradient `d_x` of
    that path then arrives in the backward pass of the norm, which adds it in the same pass over
    memory: `dx = d_x + vjp_of_norm(d_normed)`. The weight is frozen and gets a zero cotangent.

    Args:
      x: [..., d], the residual stream. Only "xla" supports more than one leading axis.
      weight: [d], the norm's weight.
      eps: number added to the mean; static.
      implementation: "mosaic_gpu" for Hopper GPUs, "xla" for every device. None takes "mosaic_gpu"
        if it can serve the call, else "xla", and logs which one and why.

    Returns:
      A pair: `x`, unchanged, and `normed`, with the shape and dtype of `x`.

    Raises:
      ValueError: there is no such implementation, or it cannot serve these arguments.
    """
    function = choose(
        "residual_norm",
        _IMPLEMENTATIONS,
        implementation,
        (x, weight),
        f"residual norm, {x.dtype} {x.shape[0]}x{x.shape[1]}",
    )
    return function(x, weight, eps)
