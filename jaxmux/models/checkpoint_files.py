"""The files of a checkpoint folder of Hugging Face."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array, Float
from safetensors import safe_open

from jaxmux.pallas_kernels.frozen_weight import FrozenWeight

from .architectures import BackboneError
from .host import on_host


def shards(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder.

    Args:
      folder: the folder, with model.safetensors or model.safetensors.index.json.

    Raises:
      BackboneError: a file is missing, or the index is damaged or names files of other folders.
    """
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if whole.exists():
        return [whole]
    if not index.exists():
        raise BackboneError(
            f"{folder}: neither {whole.name} nor {index.name} found (only safetensors are read)"
        )
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if not all(isinstance(name, str) for name in names):
            raise ValueError("a shard is no file name")
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise BackboneError(f"{index}: not an index of safetensors shards ({e!r})") from None
    if outside := [name for name in names if Path(name).name != name]:
        raise BackboneError(f"{index}: shard {outside[0]!r} should be a file of the same folder")
    if missing := [name for name in names if not (folder / name).exists()]:
        raise BackboneError(f"{index}: shard {missing[0]} is missing")
    return [folder / name for name in names]


def checkpoint_tensors(
    folder: str | Path, dtype: np.dtype, backbone_format: str | None = None
) -> Callable[[str], np.ndarray]:
    """A function that reads a tensor of a checkpoint folder by its name, with the values that the
    backbone computes with.

    Args:
      folder: the folder, as for `shards`; it is read when the function is called.
      dtype: dtype of the backbone, to which values are rounded.
      backbone_format: format in which the backbone stores the linears of its layers; None for
        `dtype`.

    Returns:
      A function of a name. It returns float32 values, and raises BackboneError if there is no such
      tensor.
    """

    def read(name: str) -> np.ndarray:
        for path in shards(Path(folder)):
            with safe_open(path, framework="numpy") as file:
                if name in file.keys():
                    values = file.get_tensor(name)
                    if backbone_format and _is_linear(name):
                        values = on_host(_stored, values, backbone_format)
                    return np.asarray(values).astype(dtype).astype(np.float32)
        raise BackboneError(f"{folder}: tensor {name} is missing")

    return read


def _is_linear(name: str) -> bool:
    """Whether a tensor is the weight matrix of a linear of a decoder layer."""
    return ".layers." in name and name.endswith("_proj.weight")


@partial(jax.jit, static_argnames="backbone_format")
def _stored(tensor: Float[Array, "n k"], backbone_format: str) -> Float[Array, "n k"]:
    """The float32 values that a weight matrix has in a format."""
    return FrozenWeight.encoded(tensor.T, backbone_format).decoded().T
