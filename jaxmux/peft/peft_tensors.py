"""The tensors of adapter folders, by the names of Hugging Face PEFT."""

from collections.abc import Mapping

import numpy as np

from .targets import LayerMask, full_name

PREFIX = "base_model.model."


def layer_tensors(
    module: str, mask: LayerMask, name: str, values: np.ndarray
) -> dict[str, np.ndarray]:
    """The tensors of one parameter in all layers in which it is adapted.

    Args:
      module: path of the adapted module within a layer.
      mask: the layers.
      name: name of the parameter below the module, for example "lora_A.weight".
      values: [L, ...], one array for each layer of the backbone.
    """
    return {
        f"{PREFIX}{full_name(module, layer)}.{name}": np.ascontiguousarray(values[layer])
        for layer in np.flatnonzero(mask)
    }


def take_layers(
    tensors: dict[str, np.ndarray], module: str, mask: LayerMask, names: Mapping[str, tuple]
) -> dict[str, dict[int, np.ndarray]]:
    """Takes the tensors of a module out of those of a folder. All are checked before arrays of all
    layers are made, because their sizes are the file's.

    Args:
      tensors: the tensors; those that are taken are removed.
      module: path of the adapted module within a layer.
      mask: the layers in which it is adapted.
      names: by name of a parameter below the module, its shape in one layer.

    Returns:
      By name and layer, the tensors.

    Raises:
      ValueError: a tensor is missing or has another shape.
    """
    found: dict[str, dict[int, np.ndarray]] = {name: {} for name in names}
    for layer in np.flatnonzero(mask):
        for name, shape in names.items():
            full = f"{PREFIX}{full_name(module, layer)}.{name}"
            found[name][int(layer)] = take_tensor(tensors, full, shape)
    return found


def take_tensor(tensors: dict[str, np.ndarray], name: str, shape: tuple) -> np.ndarray:
    """Takes a tensor out of those of a folder.

    Args:
      tensors: the tensors; this one is removed.
      name: its name.
      shape: its shape.

    Raises:
      ValueError: it is missing or has another shape.
    """
    if name not in tensors:
        raise ValueError(f"tensor {name} is missing")
    tensor = tensors.pop(name)
    if tensor.shape != shape:
        raise ValueError(
            f"tensor {name} has shape {list(tensor.shape)}, rank and backbone imply {list(shape)}"
        )
    return tensor


def stacked(found: Mapping[int, np.ndarray], layers: int, empty: np.ndarray) -> np.ndarray:
    """The arrays of some layers as one array [L, ...], float32.

    Args:
      found: by layer, the array.
      layers: number of layers L.
      empty: the array of the other layers.
    """
    values = np.repeat(np.asarray(empty, np.float32)[None], layers, axis=0)
    for layer, value in found.items():
        values[layer] = value
    return values
