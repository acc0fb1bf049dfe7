"""The tensors of adapter folders, by the names of Hugging Face PEFT."""

from collections.abc import Mapping

import numpy as np

from .targets import LayerMask, full_name

PREFIX = "base_model.model."


def layer_tensors(
    module: str, mask: LayerMask, name: str, values: np.ndarray
) -> dict[str, np.ndarray]:
    """The tensors of one parameter of a module, for example "lora_A.weight", in all layers in which
    the module is adapted, from values [L, ...] of all layers."""
    return {
        f"{PREFIX}{full_name(module, layer)}.{name}": np.ascontiguousarray(values[layer])
        for layer in np.flatnonzero(mask)
    }


def take_layers(
    tensors: dict[str, np.ndarray], module: str, mask: LayerMask, names: Mapping[str, tuple]
) -> dict[str, dict[int, np.ndarray]]:
    """Removes the tensors of a module from those of a folder and returns them, by name and layer.
    `names` gives the shape in one layer of each parameter. ValueError if a tensor is missing or has
    another shape.

    All are checked before anything is allocated for all layers, because the file determines sizes.
    """
    taken: dict[str, dict[int, np.ndarray]] = {name: {} for name in names}
    for layer in np.flatnonzero(mask):
        for name, shape in names.items():
            full = f"{PREFIX}{full_name(module, layer)}.{name}"
            taken[name][int(layer)] = take_tensor(tensors, full, shape)
    return taken


def take_tensor(tensors: dict[str, np.ndarray], name: str, shape: tuple) -> np.ndarray:
    """Removes one tensor from those of a folder and returns it. ValueError if it is missing or has
    another shape."""
    if name not in tensors:
        raise ValueError(f"tensor {name} is missing")
    tensor = tensors.pop(name)
    if tensor.shape != shape:
        raise ValueError(
            f"tensor {name} has shape {list(tensor.shape)}, rank and backbone imply {list(shape)}"
        )
    return tensor


def stacked(by_layer: Mapping[int, np.ndarray], layers: int, empty: np.ndarray) -> np.ndarray:
    """Stacks arrays of some layers to one float32 array [L, ...]; other layers get `empty`."""
    values = np.repeat(np.asarray(empty, np.float32)[None], layers, axis=0)
    for layer, value in by_layer.items():
        values[layer] = value
    return values
