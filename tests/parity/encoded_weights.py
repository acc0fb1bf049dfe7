"""Weights in the number formats of bitsandbytes, as jaxmux stores them; part of jaxmux_side.py."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmux.pallas_kernels import number_formats
from jaxmux.pallas_kernels.number_formats import FORMATS


def encoded_weights(
    weights: np.ndarray, dtype: str, offset: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Encodes weights and decodes them again, in compiled functions.

    Args:
      weights: W^T [L, n, k] of a stack, in float32.
      dtype: of the weights that are encoded.
      offset: what is subtracted from the scales of nf4 [L]; None for their mean.

    Returns:
      What is stored and what is decoded, by name; weights as [L, n, k].
    """
    stack = jnp.asarray(weights).swapaxes(1, 2).astype(dtype)
    nf4, int8 = FORMATS["nf4"], FORMATS["int8"]
    values, scales = jax.jit(nf4.encode)(stack)
    blocks, absmax = jax.jit(number_formats.encode_blocks)(stack)
    if offset is not None:
        scales = jax.jit(number_formats.encode_absmax)(absmax, offset)
    codes, channel_absmax = jax.jit(int8.encode)(stack)
    decode = jax.jit(nf4.decode)
    decoded = {
        "nf4.plain.decoded": decode(blocks, absmax),
        "nf4.decoded": decode(values, scales),
        "int8": codes,
        "int8.decoded": jax.jit(int8.decode)(codes, channel_absmax),
    }
    stored = {
        "nf4.plain": blocks,
        "nf4.plain.absmax": absmax,
        "nf4": values,
        "nf4.absmax": scales.absmax,
        "nf4.nested_absmax": scales.nested,
        "nf4.offset": scales.offset,
        "int8.absmax": channel_absmax,
    }
    turned = {name: np.swapaxes(array, 1, 2) for name, array in decoded.items()}
    return turned | {name: np.asarray(array) for name, array in stored.items()}


def number_tables() -> Mapping[str, Any]:
    """The numbers that codes stand for."""
    return {"nf4": number_formats.NF4_TABLE, "dynamic": number_formats.DYNAMIC_MAP}
