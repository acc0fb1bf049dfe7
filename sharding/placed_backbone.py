"""A backbone whose layers and weights are divided among devices."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxmux.models import (
    Backbone,
    BackboneConfig,
    Progress,
    Weights,
    backbone_dtype,
    backbone_fingerprint,
    compute_dtype,
)
from jaxmux.models.modules import abstract_weights, random_weights
from jaxmux.models.quantised.writing import reader_of

from .stage_mesh import OneDevice, StageMesh


class Part(NamedTuple):
    """Consecutive layers of a backbone, from the index `first_layer` in the model on. The first
    part also has the embedding, and the last one the final norm and the language-model head."""

    first_layer: int
    layers: int
    is_first: bool
    is_last: bool

    @property
    def slice(self) -> slice:
        """The part's layers, as an index of an axis that has all layers of the model."""
        return slice(self.first_layer, self.first_layer + self.layers)


def consecutive_parts(layers: Sequence[int]) -> list[Part]:
    """The parts of a backbone, from the number of layers of each, at least 1."""
    last = len(layers) - 1
    return [Part(sum(layers[:i]), n, i == 0, i == last) for i, n in enumerate(layers)]


@dataclasses.dataclass(frozen=True)
class PlacedBackbone:
    """A frozen backbone in parts, each on the devices of a stage. `load_placed_backbone` makes it.

    Attributes:
      parts: the parts, which together have all layers.
      homes: the mesh of each part. A mesh that holds several parts occurs several times.
      weights: for each part, its weights like `Backbone.weights`: its own layers, stacked, and only
        those of embed_tokens, norm and lm_head that it uses. The last part also has embed_tokens if
        the head is tied to it. Parts on devices of other processes have shapes and dtypes in place
        of arrays.
      name_or_path, fingerprint: as in `Backbone`.
    """

    config: BackboneConfig
    parts: tuple[Part, ...]
    homes: tuple[StageMesh, ...]
    weights: tuple[Weights, ...]
    name_or_path: str
    fingerprint: str = ""

    @classmethod
    def on_one_device(cls, backbone: Backbone) -> "PlacedBackbone":
        """The backbone on the device on which it lies; on the default device if it has shapes and
        dtypes in place of arrays."""
        (part,) = consecutive_parts([backbone.config.num_layers])
        array = jax.tree.leaves(backbone.weights)[0]
        devices = array.devices() if isinstance(array, jax.Array) else jax.local_devices()
        device, *_ = devices
        return cls(
            backbone.config,
            (part,),
            (OneDevice.of_device(device),),
            (backbone.weights,),
            backbone.name_or_path,
            backbone.fingerprint,
        )

    @property
    def is_fused(self) -> bool:
        """Whether the forward and the backward pass of a microbatch are one program, because the
        backbone is one part on one device."""
        return len(self.parts) == 1 and isinstance(self.homes[0], OneDevice)

    @property
    def compute_dtype(self) -> jnp.dtype:
        return compute_dtype(self.weights[0])


def load_placed_backbone(
    folder: str | Path,
    dtype: jnp.dtype | str,
    parts: Sequence[Part],
    homes: Sequence[StageMesh],
    backbone_format: str | None = None,
    cache: str | Path | None = None,
    progress: Progress | None = None,
) -> PlacedBackbone:
    """Loads a Hugging Face checkpoint folder, each part onto its home. Together, the parts have all
    layers. Other arguments and errors are those of `load_backbone`.

    Of each tensor, this process reads only the rows that its devices keep, and copies them to the
    devices piece by piece. A linear in a format that is no dtype is read as a whole, one layer at a
    time, encoded on the default device, and then divided.
    """
    folder, dtype = Path(folder), backbone_dtype(dtype)
    config = BackboneConfig.from_folder(folder, backbone_format)
    with reader_of(folder, dtype, backbone_format, cache, progress) as reader:
        weights = []
        for part, home in zip(parts, homes, strict=True):
            shapes = _own_weights(config, part, dtype, home)
            shardings = home.shardings(home.weight_specs(shapes))
            read = partial(reader.read, shapes, part.first_layer, shardings)
            weights.append(read() if home.is_local else shapes)
    fingerprint = backbone_fingerprint(folder)
    return PlacedBackbone(
        config, tuple(parts), tuple(homes), tuple(weights), str(folder), fingerprint
    )


def place_backbone(
    backbone: Backbone, parts: Sequence[Part], homes: Sequence[StageMesh]
) -> PlacedBackbone:
    """Copies each part of a backbone to its mesh in `homes`. Together, the parts have all
    layers."""
    weights = []
    for part, home in zip(parts, homes, strict=True):
        of_part = home.divisible_weights(_part_of(backbone.weights, part))
        weights.append(home.put(of_part, home.weight_specs(of_part)))
    return PlacedBackbone(
        backbone.config,
        tuple(parts),
        tuple(homes),
        tuple(weights),
        backbone.name_or_path,
        backbone.fingerprint,
    )


def random_placed_backbone(
    config: BackboneConfig,
    dtype: jnp.dtype,
    parts: Sequence[Part],
    homes: Sequence[StageMesh],
    seed: int = 0,
) -> PlacedBackbone:
    """A backbone with random weights, all of one dtype, which no device and no host ever holds as a
    whole. The values depend on the seed and on how the layers are divided into parts."""
    weights = []
    for part, home in zip(parts, homes, strict=True):
        shardings = home.shardings(home.weight_specs(_own_weights(config, part, dtype, home)))
        part_config = dataclasses.replace(config, num_layers=part.layers)

        def make(key: int, part_config=part_config, part=part, home=home) -> Weights:
            whole = home.divisible_weights(random_weights(part_config, key, dtype))
            return {name: whole[name] for name in _names(whole, part)}

        program = jax.jit(make, out_shardings=shardings)
        weights.append(home.run(program, seed + part.first_layer))
    name = f"random-{config.architecture}"
    return PlacedBackbone(config, tuple(parts), tuple(homes), tuple(weights), name)


def _own_weights(config: BackboneConfig, part: Part, dtype: jnp.dtype, home: StageMesh) -> Weights:
    shapes = abstract_weights(dataclasses.replace(config, num_layers=part.layers), dtype)
    shapes = jax.eval_shape(home.divisible_weights, shapes)
    return {name: shapes[name] for name in _names(shapes, part)}


def _part_of(weights: Weights, part: Part) -> Weights:
    used = {name: weights[name] for name in _names(weights, part)}
    return used | {"layers": jax.tree.map(lambda leaf: leaf[part.slice], weights["layers"])}


def _names(weights: Weights, part: Part) -> list[str]:
    used = {"layers": True, "embed_tokens": part.is_first, "norm": part.is_last}
    if "lm_head" in weights:
        used["lm_head"] = part.is_last
    else:
        used["embed_tokens"] |= part.is_last
    return [name for name, is_used in used.items() if is_used]
