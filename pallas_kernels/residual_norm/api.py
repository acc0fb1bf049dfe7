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
    weight: Float[Array, "d"],
    eps: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "*N d"], Float[Array, "*N d"]]:
    """Normalises the rows of the residual stream by their root mean square, and returns both.

    `normed = weight * (x / sqrt(mean(x^2) + eps))`, with the mean over a row in float32 (RMSNorm,
    arXiv 1910.07467, equation 4). The quotient is rounded to the dtype of `x` before the weight
    multiplies it. Rows never mix.

    Continue the residual path with the returned `x`, not with the argument. Its gradient `d_x` then
    arrives in the backward pass of the norm, which adds it in the same pass over memory:
    `dx = d_x + vjp_of_norm(d_normed)`. The weight is frozen and gets a zero cotangent.

    Args:
      x: the stream, in the compute dtype. Only "xla" supports more than one leading axis.
      weight: the norm's weight.
      eps: added to the mean; static.
      implementation: "mosaic_gpu" for Hopper GPUs, "xla" for every device. None takes the first of
        them that can serve the call, and logs which one and why.

    Returns:
      `x`, unchanged, and `normed`, in the dtype of `x`.

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
