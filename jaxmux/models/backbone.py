"""Finds, loads and saves backbones in Hugging Face's format: config.json and safetensors files.
Pickle files are never read."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
from safetensors.flax import save_file

from jaxmux.atomic_files import share_like_folder
from jaxmux.installation import resolve_path

from .architectures import BackboneConfig, to_hf_config
from .checkpoint_reader import CheckpointReader, Progress
from .errors import BackboneError
from .fingerprint import backbone_fingerprint
from .modules import Weights, abstract_weights, compute_dtype, is_weight, random_weights
from .quantised.writing import reader_of
from .tensor_names import hf_name, module_path

# Matches the name of a model on the Hugging Face hub.
_HUB_ID = re.compile(r"(?:hf:)?([\w.-]+/[\w.-]+)")


@dataclasses.dataclass(frozen=True)
class Backbone:
    """A frozen model, on which all tasks train their adapters. `load_backbone` makes it.

    Attributes:
      weights: nested dict of the parameters, with the names of Hugging Face: embed_tokens, layers,
        norm and, if it is not tied to the embedding, lm_head. The parameters of all L layers are
        stacked along a leading axis, so that layers.mlp.up_proj.kernel is a `FrozenWeight` [L, k,
        n] (input and output width).
      name_or_path: the origin of the model; `fine_tune` records it as the base model of exported
        adapters.
      fingerprint: hash of the model's folder, from `backbone_fingerprint`; empty if there is no
        folder.
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


def resolve_backbone(backbone: str | Path) -> str:
    """Returns the path of a backbone's folder, like `resolve_path`. Raises BackboneError if there
    is no such folder and the text has the form of a model name on the Hugging Face hub."""
    folder = resolve_path(backbone)
    if (hub := _HUB_ID.fullmatch(folder)) and not Path(folder).exists():
        raise BackboneError(
            f"backbone {str(backbone)!r}: there is no such folder, and models of the Hugging Face "
            f"hub are not downloaded; run `hf download {hub[1]} --local-dir FOLDER`, and use the "
            "folder"
        )
    return folder


def load_backbone(
    folder: str | Path,
    dtype: jnp.dtype | str = "auto",
    backbone_format: str | None = None,
    cache: str | Path | None = None,
    progress: Progress | None = None,
) -> Backbone:
    """Loads a Hugging Face checkpoint folder onto the default device.

    Threads read pieces of tensors and copy them to the device, which transposes and converts them,
    so host memory holds a few pieces of 64 MiB. Linears that need another format than the
    checkpoint's are encoded on the device, tensor by tensor. Linears of a quantised checkpoint keep
    their format (see `models.quantised`).

    Args:
      folder: contains config.json and model.safetensors, or shards with
        model.safetensors.index.json.
      dtype: dtype of all parameters: bfloat16, float16 or float32. "auto" is bfloat16 on an
        accelerator and float32 on CPU.
      backbone_format: format in which the linears of the layers are stored, one of
        `BACKBONE_FORMATS`; None means the format of the checkpoint.
      cache: folder in which encoded checkpoints are kept (see `cached_checkpoint`), which needs a
        `backbone_format`; None keeps none.
      progress: called with the number of bytes of weights that have just arrived on the device.

    Raises:
      BackboneError: an unknown architecture, a missing, extra or misshapen tensor, or an unreadable
        file; the message names it.
      ValueError: weights cannot be stored in `dtype`, or there is a `cache` without a format.
      OSError: the cache cannot be written.
    """
    folder, dtype = Path(folder), backbone_dtype(dtype)
    config = BackboneConfig.from_folder(folder, backbone_format)
    with reader_of(folder, dtype, backbone_format, cache, progress) as reader:
        weights = reader.read(abstract_weights(config, dtype))
    return Backbone(config, weights, str(folder), backbone_fingerprint(folder))


def check_backbone(folder: str | Path) -> None:
    """Raises BackboneError, like `load_backbone`, if a checkpoint folder cannot be loaded. The
    tensors' values are not read."""
    with CheckpointReader(Path(folder), BackboneConfig.from_folder(folder)):
        pass


def backbone_dtype(dtype: jnp.dtype | str) -> jnp.dtype:
    """Returns the dtype; "auto" is bfloat16 on an accelerator and float32 on CPU."""
    if dtype == "auto":
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    return jnp.dtype(dtype)


def save_backbone(backbone: Backbone, folder: str | Path) -> None:
    """Writes config.json and model.safetensors, so that Hugging Face transformers and
    `load_backbone` can load them. Creates the folder if necessary. Parameters keep their dtypes;
    linears in formats that are not dtypes of activations are written in the compute dtype."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config, tensors = backbone.config, {}
    for key_path, leaf in jax.tree.leaves_with_path(backbone.weights, is_leaf=is_weight):
        path = module_path(key_path)
        if is_weight(leaf):
            leaf = leaf.decoded(None if leaf.is_plain else backbone.compute_dtype)
        tensor = leaf.mT if path[-1] == "kernel" else leaf
        if path[0] == "layers":
            tensors |= {hf_name(path, layer): tensor[layer] for layer in range(config.num_layers)}
        else:
            tensors[hf_name(path)] = tensor
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    share_like_folder(path)
    text = json.dumps(to_hf_config(config, str(backbone.compute_dtype)), indent=2)
    (folder / "config.json").write_text(text + "\n")
