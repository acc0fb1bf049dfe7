"""Loads and saves backbones in Hugging Face's format: config.json and safetensors, whole or
sharded. Never pickle.
"""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file

from .architectures import BackboneConfig, BackboneError, to_hf_config
from .modules import Weights, abstract_weights, random_weights


@dataclasses.dataclass(frozen=True)
class Backbone:
    """A frozen model: its shape, its weights, and where it came from (for the exported
    adapters)."""

    config: BackboneConfig
    weights: Weights
    name_or_path: str

    @property
    def dtype(self) -> jnp.dtype:
        """Of the weights, in which the forward pass computes."""
        return self.weights["embed_tokens"]["weight"].dtype

    @classmethod
    def random(
        cls, config: BackboneConfig, seed: int = 0, dtype: jnp.dtype = jnp.float32
    ) -> "Backbone":
        """A backbone with random weights, for benchmarks and tests."""
        return cls(config, random_weights(config, seed, dtype), f"random-{config.architecture}")


def load_backbone(folder: str | Path, dtype: jnp.dtype | str = "auto") -> Backbone:
    """Loads a checkpoint folder tensor by tensor into `dtype` on the default device.

    Host memory stays below the model's size in `dtype` plus one stacked parameter.

    Args:
      folder: holds config.json and model.safetensors, or its shards with
        model.safetensors.index.json.
      dtype: "auto" means bfloat16 on an accelerator and float32 on CPU.

    Raises:
      BackboneError: an unknown architecture, a missing, extra or misshapen tensor, or an unreadable
        file; the message names it.
    """
    folder = Path(folder)
    config = BackboneConfig.from_folder(folder)
    if dtype == "auto":
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    with ExitStack() as stack:
        tensors = _Tensors(folder, stack)
        weights = _load_tree(tensors, config, jnp.dtype(dtype))
        tensors.refuse_unread()
    return Backbone(config, weights, str(folder))


def save_backbone(backbone: Backbone, folder: str | Path) -> None:
    """Writes config.json and model.safetensors in the weights' dtype; transformers loads the
    result."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config, tensors = backbone.config, {}
    for path, leaf in _leaves(backbone.weights):
        if path[0] == "layers":
            for layer in range(config.num_layers):
                tensors[_hf_name(path, layer)] = _hf_layout(path, leaf[layer])
        else:
            tensors[_hf_name(path)] = _hf_layout(path, leaf)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    dtype = str(jax.tree.leaves(backbone.weights)[0].dtype)
    (folder / "config.json").write_text(json.dumps(to_hf_config(config, dtype), indent=2) + "\n")


class _Tensors:
    """The tensors of a checkpoint by name, over all its shards, and which of them have been
    read."""

    def __init__(self, folder: Path, stack: ExitStack):
        self.folder = folder
        self.owner = {}
        for path in _shards(folder):
            try:
                shard = stack.enter_context(safe_open(path, framework="flax"))
            except (SafetensorError, OSError) as e:
                raise BackboneError(
                    f"{path}: cannot be read as safetensors ({e}); truncated download?"
                ) from None
            self.owner |= dict.fromkeys(shard.keys(), shard)
        self.unread = set(self.owner)

    def read(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        if name not in self.owner:
            raise BackboneError(f"{self.folder}: tensor {name} is missing")
        with jax.default_device(jax.devices("cpu")[0]):
            tensor = np.asarray(self.owner[name].get_tensor(name))
        if tensor.shape != shape:
            raise BackboneError(
                f"{self.folder}: tensor {name} has shape {list(tensor.shape)}, "
                f"config.json implies {list(shape)}"
            )
        self.unread.discard(name)
        return tensor.astype(dtype)

    def refuse_unread(self) -> None:
        # Old checkpoints carry this constant; tied ones may carry the head a second time.
        ignored = {n for n in self.unread if n.endswith("rotary_emb.inv_freq")} | {"lm_head.weight"}
        if extra := sorted(self.unread - ignored):
            shown = ", ".join(extra[:3]) + (f" and {len(extra) - 3} more" if len(extra) > 3 else "")
            raise BackboneError(
                f"{self.folder}: tensors that config.json does not account for: {shown}"
            )


def _shards(folder: Path) -> list[Path]:
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if whole.exists():
        return [whole]
    if not index.exists():
        raise BackboneError(
            f"{folder}: neither {whole.name} nor {index.name} found (only safetensors are read)"
        )
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as e:
        raise BackboneError(f"{index}: not an index of safetensors shards ({e!r})") from None
    if missing := [name for name in names if not (folder / name).exists()]:
        raise BackboneError(f"{index}: shard {missing[0]} is missing")
    return [folder / name for name in names]


def _load_tree(tensors: _Tensors, config: BackboneConfig, dtype: np.dtype) -> Weights:
    weights: Weights = {}
    for path, leaf in _leaves(abstract_weights(config, dtype)):
        if path[0] == "layers":
            value = np.empty(leaf.shape, dtype)
            for layer in range(config.num_layers):
                value[layer] = _read(tensors, path, leaf.shape[1:], dtype, layer)
        else:
            value = _read(tensors, path, leaf.shape, dtype)
        node = weights
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = jnp.asarray(value)
    return weights


def _read(
    tensors: _Tensors, path: tuple[str, ...], shape, dtype: np.dtype, layer: int | None = None
) -> np.ndarray:
    transposed = path[-1] == "kernel"
    tensor = tensors.read(_hf_name(path, layer), shape[::-1] if transposed else shape, dtype)
    return tensor.T if transposed else tensor


def _leaves(
    tree: Weights, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], jax.Array]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _hf_name(path: tuple[str, ...], layer: int | None = None) -> str:
    """`("layers", "self_attn", "q_proj", "kernel")`, 3 →
    `model.layers.3.self_attn.q_proj.weight`."""
    *modules, leaf = path
    if modules[0] == "layers":
        modules = ["layers", str(layer), *modules[1:]]
    prefix = [] if modules[0] == "lm_head" else ["model"]
    return ".".join([*prefix, *modules, "weight" if leaf == "kernel" else leaf])


def _hf_layout(path: tuple[str, ...], leaf: jax.Array) -> jax.Array:
    return leaf.T if path[-1] == "kernel" else leaf
