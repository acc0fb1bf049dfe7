"""A backbone whose layers are divided among devices."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxmux.models import (
    Backbone,
    BackboneConfig,
    CheckpointReader,
    Weights,
    backbone_dtype,
    backbone_fingerprint,
    compute_dtype,
)
from jaxmux.models.modules import abstract_weights


class Part(NamedTuple):
    """Consecutive layers of a backbone, with the embedding or the head if they are at its ends.

    Attributes:
      first_layer: index in the model of the part's first layer.
      layers: number of layers of the part.
      is_first: whether the part has the embedding.
      is_last: whether the part has the final norm and the language-model head.
    """

    first_layer: int
    layers: int
    is_first: bool
    is_last: bool

    @property
    def slice(self) -> slice:
        """The part's layers, as an index of an axis of all layers."""
        return slice(self.first_layer, self.first_layer + self.layers)


def consecutive_parts(layers: Sequence[int]) -> list[Part]:
    """The parts of a backbone with these numbers of layers.

    Args:
      layers: number of layers of each part, each at least 1.
    """
    last = len(layers) - 1
    return [Part(sum(layers[:i]), n, i == 0, i == last) for i, n in enumerate(layers)]


@dataclasses.dataclass(frozen=True)
class PlacedBackbone:
    """A frozen backbone in parts, each on a device. `load_placed_backbone` makes it.

    Attributes:
      config: configuration of the model.
      parts: the layers of each part, together all layers.
      devices: the device of each part. A device that holds several parts occurs several times.
      weights: for each part, its weights like `Backbone.weights`: its own layers, stacked, and only
        those of embed_tokens, norm and lm_head that it uses. The last part also has embed_tokens if
        the head is tied to it.
      name_or_path: where the model came from, as in `Backbone`.
      fingerprint: hash of the model's folder, as in `Backbone`.
    """

    config: BackboneConfig
    parts: tuple[Part, ...]
    devices: tuple[jax.Device, ...]
    weights: tuple[Weights, ...]
    name_or_path: str
    fingerprint: str = ""

    @property
    def compute_dtype(self) -> jnp.dtype:
        """The dtype of the residual stream, of all activations and of their gradients."""
        return compute_dtype(self.weights[0])


def load_placed_backbone(
    folder: str | Path,
    dtype: jnp.dtype | str,
    parts: Sequence[Part],
    devices: Sequence[jax.Device],
) -> PlacedBackbone:
    """Loads a Hugging Face checkpoint folder, each part onto its device.

    Only one parameter, stacked over the layers of a part, is in the host's memory at a time.

    Args:
      folder: the folder, as for `load_backbone`.
      dtype: dtype to which all parameters are converted, as for `load_backbone`.
      parts: the parts, together all layers.
      devices: the device of each part.

    Raises:
      BackboneError: as `load_backbone`.
    """
    config = BackboneConfig.from_folder(folder)
    with CheckpointReader(Path(folder)) as reader:
        weights = [
            reader.read(_own_weights(config, part, backbone_dtype(dtype)), part.first_layer, device)
            for part, device in zip(parts, devices, strict=True)
        ]
        reader.refuse_unread()
    fingerprint = backbone_fingerprint(folder)
    return PlacedBackbone(
        config, tuple(parts), tuple(devices), tuple(weights), str(folder), fingerprint
    )


def place_backbone(
    backbone: Backbone, parts: Sequence[Part], devices: Sequence[jax.Device]
) -> PlacedBackbone:
    """Copies the parts of a backbone to their devices.

    Args:
      backbone: the whole backbone.
      parts: the parts, together all layers.
      devices: the device of each part.
    """
    weights = tuple(
        jax.device_put(_part_of(backbone.weights, part), device)
        for part, device in zip(parts, devices, strict=True)
    )
    return PlacedBackbone(
        backbone.config,
        tuple(parts),
        tuple(devices),
        weights,
        backbone.name_or_path,
        backbone.fingerprint,
    )


def _own_weights(config: BackboneConfig, part: Part, dtype: jnp.dtype) -> Weights:
    """Shapes and dtypes of a part's weights."""
    own = abstract_weights(dataclasses.replace(config, num_layers=part.layers), dtype)
    return {name: own[name] for name in _names(own, part)}


def _part_of(weights: Weights, part: Part) -> Weights:
    own = {name: weights[name] for name in _names(weights, part)}
    return own | {"layers": jax.tree.map(lambda leaf: leaf[part.slice], weights["layers"])}


def _names(weights: Weights, part: Part) -> list[str]:
    """The names of the weights that a part uses."""
    used = {"layers": True, "embed_tokens": part.is_first, "norm": part.is_last}
    if "lm_head" in weights:
        used["lm_head"] = part.is_last
    else:
        used["embed_tokens"] |= part.is_last
    return [name for name, is_used in used.items() if is_used]
