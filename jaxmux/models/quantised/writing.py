"""Writes checkpoints whose linears are quantised, in the layouts of other libraries.

float8 is written like compressed-tensors does (scales for channels of weights and for tokens of
activations), int8 and nf4 like bitsandbytes does. In the dtype for which it was written, such a
checkpoint gives the same numbers as the original checkpoint.
"""

import fcntl
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmux.pallas_kernels.frozen_weight import FrozenWeight
from jaxmux.pallas_kernels.number_formats import (
    DYNAMIC_MAP,
    NF4_TABLE,
    DoubleQuantised,
    absmax_of_blocks,
)

from ..architectures import BackboneConfig, record_tying
from ..checkpoint_files import copy_other_files, write_tensors
from ..checkpoint_reader import CheckpointReader, Progress
from ..errors import BackboneError
from ..fingerprint import backbone_fingerprint
from ..tensor_names import tensor_names
from .bitsandbytes import STATE, state_of
from .settings import SETTINGS

_log = logging.getLogger("jaxmux")

# Increase this when an encoder's results change, so that older cached checkpoints are not used.
_VERSION = 2

_CHANNELS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
_TOKENS = _CHANNELS | {"strategy": "token", "dynamic": True}
_FLOAT8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _CHANNELS | {"dynamic": False},
            "input_activations": _TOKENS,
        }
    },
}
_INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 0.0}
_NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_quant_storage": "uint8",
}
# For each format, the quantization_config for config.json.
_SETTINGS: dict[str, dict[str, Any]] = {"float8": _FLOAT8, "int8": _INT8, "nf4": _NF4}


def cached_checkpoint(
    folder: str | Path, dtype: jnp.dtype, backbone_format: str | None, cache: str | Path
) -> Path:
    """The folder with the checkpoint of a backbone in a format. The checkpoint is made when it is
    first requested.

    Args:
      dtype: dtype of all weights except the layers' linears.
      backbone_format: format of the layers' linears, one of `BACKBONE_FORMATS`.
      cache: folder of such checkpoints. Their names contain the fingerprint of the backbone.

    Raises:
      BackboneError: as for `load_backbone`.
      ValueError: `backbone_format` is None.
      OSError: the checkpoint cannot be written.
    """
    if backbone_format is None:
        raise ValueError(f"a cache of backbones, {cache}, needs a backbone_format")
    cache = Path(cache)
    cache.mkdir(parents=True, exist_ok=True)
    fingerprint, name = backbone_fingerprint(folder), np.dtype(dtype).name
    target = cache / f"{fingerprint}-{backbone_format}-{name}-v{_VERSION}"
    # Other processes wait here until the first process has written the checkpoint.
    with (cache / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists() and (problem := _damage(target, backbone_format)):
            _log.warning("%s: damaged, so it is made again (%s)", target, problem)
            shutil.rmtree(target)
        if not target.exists():
            write_quantised(folder, target, dtype, backbone_format)
    return target


def _damage(folder: Path, backbone_format: str) -> str | None:
    """Why a cached checkpoint cannot be used; None if it can."""
    try:
        with CheckpointReader(folder, BackboneConfig.from_folder(folder, backbone_format)):
            return None
    except BackboneError as e:
        return str(e)


def reader_of(
    folder: Path,
    dtype: jnp.dtype,
    backbone_format: str | None,
    cache: str | Path | None,
    progress: Progress | None = None,
) -> CheckpointReader:
    """The reader of a backbone's checkpoint, or of a quantised checkpoint in `cache`. Arguments and
    errors are as for `load_backbone`."""
    source = folder if cache is None else cached_checkpoint(folder, dtype, backbone_format, cache)
    config = BackboneConfig.from_folder(source, backbone_format)
    return CheckpointReader(source, config, progress)


def write_quantised(
    folder: str | Path, target: str | Path, dtype: jnp.dtype, backbone_format: str
) -> None:
    """Writes the checkpoint of a backbone whose linears are in `backbone_format`, one of
    `BACKBONE_FORMATS`, and whose other weights are in `dtype`. One process at a time may write
    `target`, which appears when it is complete. Linears are encoded on the default device, one
    after the other; host memory holds one file.

    Raises:
      BackboneError: as `load_backbone`.
      OSError: the checkpoint cannot be written.
    """
    folder, target = Path(folder), Path(target)
    config = BackboneConfig.from_folder(folder, backbone_format)
    partial = target.with_name(f".{target.name}.partial")
    # A process that was killed may have left this folder.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with CheckpointReader(folder, config) as reader:
            write_tensors(partial, _tensors(reader, config, np.dtype(dtype)))
        copy_other_files(folder, partial)
        path = partial / "config.json"
        raw = json.loads(path.read_text())
        for key in (*SETTINGS, "torch_dtype"):
            raw.pop(key, None)
        record_tying(raw, config.tie_word_embeddings)
        raw |= {"dtype": np.dtype(dtype).name, "quantization_config": _SETTINGS[backbone_format]}
        path.write_text(json.dumps(raw, indent=2) + "\n")
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _tensors(
    reader: CheckpointReader, config: BackboneConfig, dtype: np.dtype
) -> Iterator[tuple[str, Any]]:
    for name in tensor_names(config):
        weight = reader.tensor(name, dtype)
        if not isinstance(weight, FrozenWeight):
            yield name, weight
            continue
        linear = name.removesuffix(".weight")
        for part, array in _parts(jax.device_get(weight), dtype).items():
            yield f"{linear}.{part}", array


def _parts(weight: FrozenWeight, dtype: np.dtype) -> dict[str, np.ndarray]:
    """The tensors of one linear; each is named by the part of its name after the linear's name."""
    match weight.format:
        case "float8":
            return {"weight": weight.values, "weight_scale": weight.scales[:, None]}
        case "int8":
            rows = np.zeros((), np.uint8)
            return {"weight": weight.values.T, "SCB": weight.scales, "weight_format": rows}
    state = state_of(weight, weight.rounding or dtype.name)
    parts = {
        "weight": weight.values.reshape(-1, 1),
        "weight.quant_map": NF4_TABLE,
        f"{STATE}nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }
    if not isinstance(scales := weight.scales, DoubleQuantised):
        return parts | {"weight.absmax": absmax_of_blocks(scales, weight.input_size)}
    nested = {"weight.nested_absmax": scales.nested, "weight.nested_quant_map": DYNAMIC_MAP}
    return parts | nested | {"weight.absmax": scales.absmax.reshape(-1)}
