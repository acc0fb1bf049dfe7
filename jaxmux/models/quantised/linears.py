"""The linears of quantised checkpoints, whichever library has written them."""

from collections.abc import Mapping
from functools import cache, partial

import jax
import jax.numpy as jnp

from jaxmux.pallas_kernels.frozen_weight import FrozenWeight

from ..checkpoint_files import CheckpointTensors
from . import bitsandbytes
from .scaled import SCALES, stored_in_words, stored_with_scales
from .settings import Quantisation
from .stored_linear import LinearTensors, StoredLinear

_ABSMAX = "weight.absmax"
# Endings of names that occur only in quantised checkpoints, including unsupported ones.
_ONLY_QUANTISED = (
    *(f".{scale}" for scale in SCALES),
    *(".SCB", f".{_ABSMAX}", ".weight_packed", ".qweight", ".qzeros"),
)


def stored_linear(
    files: CheckpointTensors, name: str, size: tuple[int, int], quantisation: Quantisation
) -> StoredLinear | None:
    """How the weight of a linear is stored; None if it is not quantised.

    Args:
      name: name of the linear, for example "model.layers.0.mlp.up_proj".
      size: n and k, its output and input width.

    Raises:
      BackboneError: a tensor is missing, has another dtype or shape than the others imply, or is
        not supported; the message names it.
    """
    tensors = LinearTensors(files, name, size)
    parts = tensors.parts
    if "weight_packed" in parts:
        return stored_in_words(tensors, quantisation)
    if _ABSMAX in parts or any(part.startswith(bitsandbytes.STATE) for part in parts):
        return bitsandbytes.stored_in_4_bits(tensors)
    if "SCB" in parts:
        return bitsandbytes.stored_in_8_bits(tensors)
    if not parts.isdisjoint(SCALES):
        return stored_with_scales(tensors, quantisation)
    return None


def quantised_tensors(files: CheckpointTensors) -> list[str]:
    """The names of tensors that show that a checkpoint is quantised."""
    return [name for name in files.names if name.endswith(_ONLY_QUANTISED)]


def weights_of(
    files: CheckpointTensors, name: str, stored: StoredLinear
) -> tuple[FrozenWeight, ...]:
    """Reads the weight [k, n] of a linear in each format in which it can be kept (see
    `StoredLinear.weights`)."""
    tensors = LinearTensors(files, name, stored.size)
    arrays = {part: tensors.read(part) for part in stored.parts}
    if _ABSMAX in arrays:
        arrays |= bitsandbytes.numbers_of(tensors)
    return _weights(arrays, stored)


def kept_linears(
    files: CheckpointTensors,
    quantisation: Quantisation,
    sizes: Mapping[str, tuple[int, int]],
    layers: int,
    backbone_format: str | None,
) -> dict[str, FrozenWeight]:
    """The linears that keep their stored format, which must be the same in all layers. By name, the
    shapes, dtypes and format of the weight in one layer.

    Args:
      sizes: n and k, output and input width of each linear of a layer, by its name.
      backbone_format: the format that a linear must have to be kept; None means any format whose
        products decode the weights.
    """
    kept = {}
    for module, size in sizes.items():
        first, *others = (
            _formats(files, layer_name(module, layer), size, quantisation)
            for layer in range(layers)
        )
        if any(other != first for other in others):
            continue
        wanted = [each for each in first if each.format == backbone_format]
        if backbone_format is None:
            wanted = [each for each in first[:1] if not each.is_plain]
        if wanted:
            kept[module] = wanted[0]
    return kept


def layer_name(module: str, layer: int) -> str:
    """The name in checkpoints of a linear of a layer, for example "mlp.up_proj"."""
    return f"model.layers.{layer}.{module}"


def _formats(
    files: CheckpointTensors, name: str, size: tuple[int, int], quantisation: Quantisation
) -> tuple[FrozenWeight, ...]:
    """The shapes and dtypes of the result of `weights_of`; empty if the linear is not quantised."""
    stored = stored_linear(files, name, size, quantisation)
    if stored is None:
        return ()
    tensors = LinearTensors(files, name, size)
    shapes = tuple((part, tensors.shape(part), tensors.dtype(part)) for part in stored.parts)
    return _abstract_weights(stored, shapes)


@cache
def _abstract_weights(stored: StoredLinear, shapes: tuple) -> tuple[FrozenWeight, ...]:
    arrays = {part: jax.ShapeDtypeStruct(shape, dtype) for part, shape, dtype in shapes}
    arrays["offset"] = jax.ShapeDtypeStruct((), jnp.float32)
    return jax.eval_shape(partial(_weights, stored=stored), arrays)


@partial(jax.jit, static_argnames="stored")
def _weights(arrays: dict[str, jax.Array], stored: StoredLinear) -> tuple[FrozenWeight, ...]:
    return stored.weights(arrays, stored)
