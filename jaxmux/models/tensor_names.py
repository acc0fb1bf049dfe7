"""The names and shapes that parameters of a backbone have in Hugging Face checkpoints."""

from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .architectures import BackboneConfig
from .modules import Weights, abstract_weights

HEAD = "lm_head"


def weights_of_tensors(wanted: Weights, tensors: Callable[[str], Array]) -> Weights:
    """Weights made from the tensors of a Hugging Face checkpoint, which `tensors` returns by name.
    `wanted` are shapes and dtypes from `abstract_weights`, or some of its parameters. It may have
    fewer layers than the checkpoint; these are the first layers."""

    def parameter(path: tuple[str, ...], layer: int | None = None) -> Array:
        tensor = jnp.asarray(tensors(hf_name(path, layer)))
        return tensor.T if path[-1] == "kernel" else tensor

    def load(key_path: jax.tree_util.KeyPath, leaf: jax.ShapeDtypeStruct) -> Array:
        path = module_path(key_path)
        if path[0] != "layers":
            return parameter(path).astype(leaf.dtype)
        layers = [parameter(path, layer) for layer in range(leaf.shape[0])]
        return jnp.stack(layers).astype(leaf.dtype)

    return jax.tree.map_with_path(load, wanted)


@cache
def tensor_names(config: BackboneConfig) -> tuple[str, ...]:
    """The names of the tensors of a Hugging Face checkpoint that is not quantised."""
    return tuple(tensor_shapes(config))


def module_path(key_path: jax.tree_util.KeyPath) -> tuple[str, ...]:
    """The keys of the nested dict that lead to a leaf, without "values" of a `FrozenWeight`."""
    return tuple(key.key for key in key_path if isinstance(key, jax.tree_util.DictKey))


def hf_name(path: tuple[str, ...], layer: int | None = None) -> str:
    """The name of a parameter in checkpoints: ("layers", "self_attn", "q_proj", "kernel") in layer
    3 is `model.layers.3.self_attn.q_proj.weight`."""
    *modules, leaf = path
    if modules[0] == "layers":
        modules = ["layers", str(layer), *modules[1:]]
    prefix = [] if modules[0] == HEAD else ["model"]
    return ".".join([*prefix, *modules, "weight" if leaf == "kernel" else leaf])


def tensor_shapes(config: BackboneConfig) -> dict[str, tuple[int, ...]]:
    """By name, the shapes of the tensors of a Hugging Face checkpoint that is not quantised."""
    shapes = {}
    for key_path, leaf in jax.tree.leaves_with_path(abstract_weights(config.plain, jnp.float32)):
        path = module_path(key_path)
        layers = range(config.num_layers) if path[0] == "layers" else [None]
        shape = leaf.shape if layers == [None] else leaf.shape[1:]
        shape = shape[::-1] if path[-1] == "kernel" else shape
        shapes |= {hf_name(path, layer): shape for layer in layers}
    return shapes
