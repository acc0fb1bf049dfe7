"""The RMS norm at a residual stream: its public function, and the choice of implementation."""

import functools
import logging

from jaxtyping import Array, Float

from . import base, mosaic_gpu

# By name, the function and its refusal: why it cannot serve a call. The first that can is picked.
_IMPLEMENTATIONS = {
    "mosaic_gpu": (mosaic_gpu.residual_norm_mosaic_gpu, mosaic_gpu.refusal),
    "xla": (base.residual_norm_xla, base.refusal),
}
IMPLEMENTATIONS = tuple(_IMPLEMENTATIONS)


def residual_norm(
    x: Float[Array, "N d"],
    weight: Float[Array, "d"],
    eps: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "N d"], Float[Array, "N d"]]:
    """Normalises the residual stream by its root mean square, and hands it through.

    `normed = weight * (x / sqrt(mean(x^2) + eps))`, the mean over a row in float32 (RMSNorm, arXiv
    1910.07467, equation 4). The quotient is rounded to the dtype of `x` before the weight
    multiplies it. Rows never mix.

    Let the residual path go on from the returned `x`, not from the argument: its gradient `d_x`
    then reaches the backward pass of the norm, which adds it in the same pass over memory,
    `dx = d_x + vjp_of_norm(d_normed)`. The weight is frozen and gets a zero cotangent.

    Args:
      x: the stream, in the compute dtype. "xla" takes any number of leading axes.
      weight: of the norm.
      eps: static.
      implementation: "mosaic_gpu" on Hopper GPUs, "xla" anywhere. None picks the first of them that
        can serve the call, and logs which and why.

    Returns:
      `x`, unchanged, and `normed`, in the dtype of `x`.

    Raises:
      ValueError: no such implementation, or it cannot serve these arguments.
    """
    if implementation is not None and implementation not in _IMPLEMENTATIONS:
        known = ", ".join(_IMPLEMENTATIONS)
        raise ValueError(
            f"unknown implementation {implementation!r} of residual_norm; known: {known}"
        )
    candidates = [implementation] if implementation else list(_IMPLEMENTATIONS)
    refusals = {}
    for name in candidates:
        function, refusal = _IMPLEMENTATIONS[name]
        refusals[name] = refusal(x, weight)
        if refusals[name] is None:
            break
    else:
        raise ValueError(f"residual_norm: {_reasons(refusals)}")
    if implementation is None:
        _log_choice(f"{x.dtype} {x.shape[0]}x{x.shape[1]}", name, _reasons(refusals))
    return function(x, weight, eps)


def _reasons(refusals: dict[str, str | None]) -> str:
    found = [f"{name} cannot serve it: {reason}" for name, reason in refusals.items() if reason]
    return "; ".join(found)


@functools.cache  # A choice is worth one line, not one per layer.
def _log_choice(call: str, name: str, reasons: str) -> None:
    logging.getLogger("jaxmux").info(
        "residual norm, %s: %s%s", call, name, f" ({reasons})" if reasons else ""
    )
