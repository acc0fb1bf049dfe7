"""Reads and writes Hugging Face PEFT adapter folders, which `peft` and vLLM load."""

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from jaxmux.atomic_files import write_atomically
from jaxmux.errors import InputError
from jaxmux.models import BackboneConfig, linear_sizes

from .lora import Adapter, Factors, LoRA
from .targets import full_name, resolve_targets, target_names

_PREFIX = "base_model.model."
# The files of an adapter folder.
SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# The key of the base model's fingerprint in the metadata of the weights.
_BASE = "jaxmux.base_fingerprint"
# Data types of weights, as safetensors names them, that NumPy can hold (BF16 with JAX installed).
_DTYPES = ("BF16", "F16", "F32", "F64")
# Settings of PEFT that change what an adapter computes. They are unset in a plain LoRA.
_NOT_SUPPORTED = (
    "use_dora",
    "use_qalora",
    "lora_bias",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "layer_replication",
    "exclude_modules",
    "target_parameters",
    "modules_to_save",
    "trainable_token_indices",
    "alora_invocation_tokens",
)


class AdapterError(InputError):
    """A Hugging Face PEFT adapter folder cannot be read or does not fit. The message names the file
    or folder, and the key or tensor at fault."""


def export_adapter(
    folder: str | Path,
    adapter: Adapter,
    spec: LoRA,
    config: BackboneConfig,
    base_model: str,
    *,
    serving: bool = False,
    base_fingerprint: str = "",
) -> None:
    """Writes an adapter as a Hugging Face PEFT folder, which `peft` and vLLM load.

    The folder gets `adapter_model.safetensors` and `adapter_config.json`.

    Args:
      folder: folder to write; it is created if it does not exist.
      adapter: the trained weights, for example from `Engine.adapter`. By path of a linear within a
        layer ("mlp.up_proj"), the LoRA factors a [L, k, r] and b [L, r, n] of all L layers, for
        input width k, output width n and the adapter's rank r.
      spec: the `LoRA` specification with which the adapter was trained.
      config: configuration of the backbone (`Backbone.config`).
      base_model: name or path of the backbone, recorded as `base_model_name_or_path`.
      serving: False writes the factors as they are, and records alpha and rsLoRA of `spec`. True
        multiplies B by the adapter's scale and records a scale of 1 (lora_alpha = rank, no rsLoRA),
        for servers that do not support rsLoRA. The outputs of the adapter are the same.
      base_fingerprint: hash of the backbone, from `backbone_fingerprint`, by which `import_adapter`
        recognises it; empty records none.

    Raises:
      ValueError: `spec.target_modules` matches no linear of the backbone.
      KeyError: `adapter` lacks a linear that `spec` targets.
      OSError: a file cannot be written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    scale = spec.scale if serving else 1.0
    tensors = {}
    for module, mask in resolve_targets(spec.target_modules, config).items():
        a, b = adapter[module]
        for layer in np.flatnonzero(mask):
            name = _PREFIX + full_name(module, layer)
            tensors[f"{name}.lora_A.weight"] = np.ascontiguousarray(a[layer].T)
            tensors[f"{name}.lora_B.weight"] = np.ascontiguousarray(b[layer].T * np.float32(scale))
    settings = _peft_config(spec, config, base_model, serving)
    # The files are renamed when they are complete, because other processes may wait for them.
    weights = folder / ".weights.partial"
    metadata = {"format": "pt"} | ({_BASE: base_fingerprint} if base_fingerprint else {})
    try:
        save_file(tensors, weights, metadata=metadata)
    except SafetensorError as e:
        raise OSError(errno.EIO, str(e), str(weights)) from None
    _sort_metadata(weights)
    weights.replace(folder / WEIGHTS)
    write_atomically(folder / SETTINGS, json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _sort_metadata(path: Path) -> None:
    """Sorts the metadata in a safetensors file, whose order is otherwise another one each time, so
    that equal adapters are equal files. Returns when the file is on disk."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        file.seek(8)
        file.write(
            json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(length)
        )
        file.flush()
        os.fsync(file.fileno())


def import_adapter(
    folder: str | Path, config: BackboneConfig, base_fingerprint: str = ""
) -> tuple[LoRA, Adapter]:
    """Reads a Hugging Face PEFT LoRA folder.

    Args:
      folder: folder with `adapter_config.json` and `adapter_model.safetensors`.
      config: configuration of the backbone on which the adapter was trained (`Backbone.config`).
      base_fingerprint: hash of the backbone, from `backbone_fingerprint`. An adapter that records
        another one is refused. Empty checks nothing.

    Returns:
      A pair: the `LoRA` specification, and the weights. The weights are, by path of a linear within
      a layer ("mlp.up_proj"), the factors a [L, k, r] and b [L, r, n], float32 NumPy arrays, for L
      layers, input width k, output width n and the adapter's rank r. They are zero in layers that
      are not adapted. `initialisation` and `loraplus_ratio` of the specification have their
      defaults, because PEFT does not record them.

    Raises:
      AdapterError: the adapter is not a plain LoRA (it uses DoRA, biases, or ranks or alphas per
        module), or a file or tensor is missing, unknown or of the wrong shape.
    """
    folder = Path(folder)
    settings, tensors, base = _read_folder(folder)
    if base and base_fingerprint and base != base_fingerprint:
        raise AdapterError(
            f"{folder}: was trained on another backbone "
            f"({settings.get('base_model_name_or_path')}), on which alone it makes sense"
        )
    where = folder / "adapter_config.json"
    for key, expected in {"peft_type": "LORA", "bias": "none"}.items():
        if settings.get(key, expected) != expected:
            raise AdapterError(
                f"{where}: {key}={settings[key]!r} is not supported, only {expected!r}"
            )
    for key in _NOT_SUPPORTED:
        if settings.get(key):
            raise AdapterError(f"{where}: {key}={settings[key]!r} is not supported")
    targets = settings.get("target_modules")
    try:
        spec = LoRA(
            rank=settings["r"],
            alpha=settings["lora_alpha"],
            dropout=settings.get("lora_dropout", 0.0),
            target_modules=targets if isinstance(targets, str) else tuple(targets or ()),
            rslora=settings.get("use_rslora", False),
        )
        masks = resolve_targets(spec.target_modules, config)
    except (KeyError, TypeError, ValueError) as e:
        raise AdapterError(f"{where}: {e}") from None

    adapter: Adapter = {}
    for module, mask in masks.items():
        adapter[module] = _stack_layers(folder, tensors, module, mask, spec.rank, config)
    if tensors:
        raise AdapterError(f"{folder}: tensor {min(tensors)} belongs to no target module")
    return spec, adapter


def is_adapter_folder(folder: Path) -> bool:
    """Whether a folder has the two files of an adapter; they are not read.

    Args:
      folder: the folder, which need not exist.
    """
    return all((folder / name).is_file() for name in (SETTINGS, WEIGHTS))


def _stack_layers(folder, tensors, module, mask, rank, config) -> Factors:
    k, n = linear_sizes(config, module)
    shapes = {"lora_A": (rank, k), "lora_B": (n, rank)}
    found: dict[str, dict[int, np.ndarray]] = {factor: {} for factor in shapes}
    # All tensors are checked before arrays of all layers are made, because the rank is the file's.
    for layer in np.flatnonzero(mask):
        for factor, shape in shapes.items():
            name = f"{_PREFIX}{full_name(module, layer)}.{factor}.weight"
            if name not in tensors:
                raise AdapterError(f"{folder}: tensor {name} is missing")
            tensor = tensors.pop(name)
            if tensor.shape != shape:
                raise AdapterError(
                    f"{folder}: tensor {name} has shape {list(tensor.shape)}, "
                    f"rank and backbone imply {list(shape)}"
                )
            found[factor][layer] = tensor
    factors = []
    for factor, shape in shapes.items():
        stacked = np.zeros((config.num_layers, *shape[::-1]), np.float32)
        for layer, tensor in found[factor].items():
            stacked[layer] = tensor.T
        factors.append(stacked)
    return Factors(*factors)


def _read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray], str]:
    """The settings, the tensors, and the fingerprint of the base model; empty if it has none."""
    settings, weights = folder / SETTINGS, folder / WEIGHTS
    for file in (settings, weights):
        if not file.is_file():
            raise AdapterError(f"{file}: not found")
    try:
        found = json.loads(settings.read_text())
        if not isinstance(found, dict):
            raise AdapterError(f"{settings}: should be a JSON object, found {type(found).__name__}")
        with safe_open(weights, framework="numpy") as file:
            base = (file.metadata() or {}).get(_BASE, "")
            for name in file.keys():
                if (dtype := file.get_slice(name).get_dtype()) not in _DTYPES:
                    raise AdapterError(
                        f"{weights}: tensor {name} is {dtype}; expected {', '.join(_DTYPES)}"
                    )
        return found, load_file(weights), base
    except (ValueError, OSError, RecursionError, SafetensorError) as e:
        if isinstance(e, AdapterError):
            raise
        raise AdapterError(f"{folder}: cannot be read: {e}") from None


def _peft_config(
    spec: LoRA, config: BackboneConfig, base_model: str, serving: bool
) -> dict[str, Any]:
    alpha = float(spec.rank) if serving else spec.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": spec.rank,
        "lora_alpha": int(alpha) if math.floor(alpha) == alpha else alpha,
        "lora_dropout": spec.dropout,
        "bias": "none",
        "target_modules": target_names(resolve_targets(spec.target_modules, config)),
        "use_rslora": spec.rslora and not serving,
        "use_dora": False,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "rank_pattern": {},
        "alpha_pattern": {},
        "inference_mode": True,
    }
