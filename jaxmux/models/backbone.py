"""Loads and saves backbones in Hugging Face's format: config.json and safetensors files. Pickle
files are never read.
"""

import dataclasses
import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file

from jaxmux.pallas_kernels.frozen_weight import FrozenWeight

from .architectures import BackboneConfig, BackboneError, to_hf_config
from .checkpoint_files import shards
from .fingerprint import backbone_fingerprint
from .modules import Weights, abstract_weights, compute_dtype, random_weights


@dataclasses.dataclass(frozen=True)
class Backbone:
    """A frozen model, on which all tasks train their adapters. `load_backbone` makes it.

    Attributes:
      config: configuration of the model.
      weights: nested dict of the parameters, with the names of Hugging Face: embed_tokens, layers,
        norm and, if it is not tied to the embedding, lm_head. The parameters of all L layers are
        stacked along a leading axis, so that layers.mlp.up_proj.kernel is a `FrozenWeight` [L, k,
        n] (input and output width).
      name_or_path: where the model came from; `fine_tune` records it as the base model of exported
        adapters.
      fingerprint: hash of the model's folder, from `backbone_fingerprint`; empty if it has none.
    """

    config: BackboneConfig
    weights: Weights
    name_or_path: str
    fingerprint: str = ""

    @property
    def compute_dtype(self) -> jnp.dtype:
        """The dtype of the residual stream, of all activations and of their gradients."""
        return compute_dtype(self.weights)

    @classmethod
    def random(
        cls, config: BackboneConfig, seed: int = 0, dtype: jnp.dtype = jnp.float32
    ) -> "Backbone":
        """A backbone with the weights of `modules.random_weights`, for benchmarks and tests."""
        return cls(config, random_weights(config, seed, dtype), f"random-{config.architecture}")


def load_backbone(
    folder: str | Path, dtype: jnp.dtype | str = "auto", backbone_format: str | None = None
) -> Backbone:
    """Loads a Hugging Face checkpoint folder onto the default device.

    Tensors are loaded one at a time: host memory stays below the model's size in `dtype` plus the
    size of the largest parameter stacked over all layers. Linears that are stored in another format
    are encoded on the device, tensor by tensor.

    Args:
      folder: contains config.json and model.safetensors, or shards with
        model.safetensors.index.json.
      dtype: dtype to which all parameters are converted: bfloat16, float16 or float32. "auto" is
        bfloat16 on an accelerator and float32 on CPU.
      backbone_format: format in which the linears of the layers are stored, one of
        `BACKBONE_FORMATS`; None for `dtype`.

    Returns:
      The backbone.

    Raises:
      BackboneError: an unknown architecture, a missing, extra or misshapen tensor, or an unreadable
        file; the message names it.
      ValueError: weights cannot be stored in `dtype`.
    """
    folder = Path(folder)
    config = BackboneConfig.from_folder(folder, backbone_format)
    with CheckpointReader(folder, config) as reader:
        weights = reader.read(abstract_weights(config, backbone_dtype(dtype)))
    return Backbone(config, weights, str(folder), backbone_fingerprint(folder))


def check_backbone(folder: str | Path) -> None:
    """Checks that a checkpoint folder can be loaded, without reading the tensors' values.

    Args:
      folder: the folder, as for `load_backbone`.

    Raises:
      BackboneError: as `load_backbone`.
    """
    with CheckpointReader(Path(folder), BackboneConfig.from_folder(folder)):
        pass


def backbone_dtype(dtype: jnp.dtype | str) -> jnp.dtype:
    """The dtype of a backbone.

    Args:
      dtype: a dtype, or "auto" for bfloat16 on an accelerator and float32 on CPU.
    """
    if dtype == "auto":
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    return jnp.dtype(dtype)


def save_backbone(backbone: Backbone, folder: str | Path) -> None:
    """Writes a checkpoint folder that Hugging Face transformers and `load_backbone` can load.

    Args:
      backbone: the backbone; its parameters are written in their own dtypes, those in formats that
        are no dtype of activations in the compute dtype.
      folder: folder for config.json and model.safetensors; it is created if necessary.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config, tensors = backbone.config, {}
    for key_path, leaf in jax.tree.leaves_with_path(backbone.weights, is_leaf=_is_weight):
        path = _module_path(key_path)
        if _is_weight(leaf):
            leaf = leaf.decoded(None if leaf.is_plain else backbone.compute_dtype)
        tensor = leaf.mT if path[-1] == "kernel" else leaf
        if path[0] == "layers":
            tensors |= {_hf_name(path, layer): tensor[layer] for layer in range(config.num_layers)}
        else:
            tensors[_hf_name(path)] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(to_hf_config(config, str(backbone.compute_dtype)), indent=2)
    (folder / "config.json").write_text(text + "\n")


class CheckpointReader:
    """Reads weights from a Hugging Face checkpoint folder, whole or in parts. A context manager."""

    def __init__(self, folder: Path, config: BackboneConfig):
        """Creates a reader; its files are opened on entering the context.

        Args:
          folder: the folder.
          config: the configuration in the folder.
        """
        self._folder, self._config = folder, config
        # By name of the tensor, the open file that holds it.
        self._owner: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "CheckpointReader":
        """Opens the files. BackboneError if one cannot be read, or if a tensor is missing, has
        another shape than config.json implies, or belongs to no parameter."""
        with ExitStack() as stack:
            for path in shards(self._folder):
                try:
                    shard = stack.enter_context(safe_open(path, framework="numpy"))
                except (SafetensorError, OSError) as e:
                    raise BackboneError(
                        f"{path}: cannot be read as safetensors ({e}); truncated download?"
                    ) from None
                self._owner |= dict.fromkeys(shard.keys(), shard)
            self._check()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def _check(self) -> None:
        shapes = _hf_shapes(self._config)
        for name, shape in shapes.items():
            if name not in self._owner:
                raise BackboneError(f"{self._folder}: tensor {name} is missing")
            found = self._owner[name].get_slice(name).get_shape()
            if tuple(found) != shape:
                raise BackboneError(
                    f"{self._folder}: tensor {name} has shape {list(found)}, "
                    f"config.json implies {list(shape)}"
                )
        # Old checkpoints have this constant; those with a tied head may have it a second time.
        ignored = {name for name in self._owner if name.endswith("rotary_emb.inv_freq")}
        if extra := sorted(self._owner.keys() - shapes.keys() - ignored - {"lm_head.weight"}):
            shown = ", ".join(extra[:3]) + (f" and {len(extra) - 3} more" if len(extra) > 3 else "")
            raise BackboneError(
                f"{self._folder}: tensors that config.json does not account for: {shown}"
            )

    def read(
        self, wanted: Weights, first_layer: int = 0, shardings: Weights | None = None
    ) -> Weights:
        """Reads weights, one parameter after the other, and of each only what devices keep.

        Args:
          wanted: shapes, dtypes and formats of the weights; its layers are consecutive layers of
            the model.
          first_layer: index in the model of the first of these layers.
          shardings: a tree like `wanted` with the sharding of every array; None puts all weights on
            the default device. Weights in formats that are no dtype are not divided.
        """

        def load(
            key_path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct, sharding: Any = None
        ) -> jax.Array:
            path = _module_path(key_path)

            def part(index: tuple[slice, ...]) -> np.ndarray:
                if path[0] != "layers":
                    return self._parameter(path, leaf, index)
                layers, *sizes = map(_selected, leaf.shape, index)
                value = np.empty((len(layers), *map(len, sizes)), leaf.dtype)
                for i, layer in enumerate(layers):
                    value[i] = self._parameter(path, leaf, index[1:], first_layer + layer)
                return value

            if sharding is None:
                return jax.device_put(part((slice(None),) * len(leaf.shape)))
            # Devices that keep the same part share what was read.
            by_index = {}
            for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
                selected = tuple(map(_selected, leaf.shape, index))
                by_index.setdefault(selected, []).append((device, index))
            shards = []
            for places in by_index.values():
                value = part(places[0][1])
                shards += [jax.device_put(value, device) for device, _ in places]
            return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)

        def load_weight(
            key_path: jax.tree_util.KeyPath, leaf: Any, sharding: Any = None
        ) -> jax.Array | FrozenWeight:
            if not _is_weight(leaf):
                return load(key_path, leaf, sharding)
            if leaf.is_plain:
                own = None if sharding is None else sharding.values
                return FrozenWeight.of(load(key_path, leaf.values, own))
            assert sharding is None, "weights in formats that are no dtype are not divided"
            names = (
                _hf_name(_module_path(key_path), first_layer + layer)
                for layer in range(leaf.shape[0])
            )
            encoded = [_encoded(self._owner[n].get_tensor(n), leaf.format) for n in names]
            return jax.tree.map(lambda *leaves: jnp.stack(leaves), *encoded)

        return jax.tree.map_with_path(
            load_weight, wanted, *([] if shardings is None else [shardings]), is_leaf=_is_weight
        )

    def _parameter(
        self,
        path: tuple[str, ...],
        wanted: jax.ShapeDtypeStruct,
        index: tuple[slice, ...],
        layer: int | None = None,
    ) -> np.ndarray:
        """A part of a parameter of one layer, or of one that belongs to no layer."""
        name, transposed = _hf_name(path, layer), path[-1] == "kernel"
        values = self._owner[name].get_slice(name)[index[::-1] if transposed else index]
        return (values.T if transposed else values).astype(wanted.dtype)


def weights_of_tensors(wanted: Weights, tensors: Callable[[str], Array]) -> Weights:
    """Weights made of the tensors of a Hugging Face checkpoint.

    Args:
      wanted: shapes and dtypes of the weights, from `abstract_weights` or some of its parameters;
        its layers are those from the first one on.
      tensors: function of a tensor's name that returns its values.
    """

    def parameter(path: tuple[str, ...], layer: int | None = None) -> Array:
        tensor = jnp.asarray(tensors(_hf_name(path, layer)))
        return tensor.T if path[-1] == "kernel" else tensor

    def load(key_path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct) -> Array:
        path = _module_path(key_path)
        if path[0] != "layers":
            return parameter(path).astype(leaf.dtype)
        layers = [parameter(path, layer) for layer in range(leaf.shape[0])]
        return jnp.stack(layers).astype(leaf.dtype)

    return jax.tree.map_with_path(load, wanted)


@cache
def tensor_names(config: BackboneConfig) -> tuple[str, ...]:
    """The names of the tensors of a Hugging Face checkpoint.

    Args:
      config: configuration of the backbone.
    """
    return tuple(_hf_shapes(config))


def _is_weight(node: Any) -> bool:
    return isinstance(node, FrozenWeight)


@partial(jax.jit, static_argnames="format")
def _encoded(tensor: Float[Array, "n k"], format: str) -> FrozenWeight:
    return FrozenWeight.encoded(tensor.T, format)


def _selected(size: int, index: slice) -> range:
    return range(size)[index]


def _module_path(key_path: jax.tree_util.KeyPath) -> tuple[str, ...]:
    """The keys of the nested dict that lead to a leaf; "values" of a `FrozenWeight` is left out."""
    return tuple(key.key for key in key_path if isinstance(key, jax.tree_util.DictKey))


def _hf_shapes(config: BackboneConfig) -> dict[str, tuple[int, ...]]:
    """By name, the shapes of the tensors of a checkpoint."""
    shapes = {}
    config = dataclasses.replace(config, backbone_format=None)
    for key_path, leaf in jax.tree.leaves_with_path(abstract_weights(config, jnp.float32)):
        path = _module_path(key_path)
        layers = range(config.num_layers) if path[0] == "layers" else [None]
        shape = leaf.shape if layers == [None] else leaf.shape[1:]
        shape = shape[::-1] if path[-1] == "kernel" else shape
        shapes |= {_hf_name(path, layer): shape for layer in layers}
    return shapes


def _hf_name(path: tuple[str, ...], layer: int | None = None) -> str:
    """`("layers", "self_attn", "q_proj", "kernel")`, 3 →
    `model.layers.3.self_attn.q_proj.weight`."""
    *modules, leaf = path
    if modules[0] == "layers":
        modules = ["layers", str(layer), *modules[1:]]
    prefix = [] if modules[0] == "lm_head" else ["model"]
    return ".".join([*prefix, *modules, "weight" if leaf == "kernel" else leaf])
