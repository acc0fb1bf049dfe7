"""Checkpoints of backbones into which an adapter is merged, for programs that know no adapters."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxmux.models import BackboneConfig
from jaxmux.models.checkpoint_files import shards

from .kinds import kind_of
from .peft_folder import AdapterError

# Files of a checkpoint besides the weights: configurations, tokenizers and chat templates.
_OTHERS = (".json", ".model", ".txt", ".jinja")


def write_merged(
    folder: str | Path, backbone: str | Path, adapter: Any, spec: Any, config: BackboneConfig
) -> None:
    """Writes the checkpoint of a backbone with an adapter merged into its weights.

    Weights are merged in float32 and rounded to the dtype that they have in the checkpoint. Changes
    that are small beside a weight are lost by that in bfloat16, which has 8 bits. The files are
    divided like those of the backbone; host memory holds one of them.

    Args:
      folder: folder to write; it must not exist.
      backbone: the checkpoint folder of the backbone.
      adapter: the trained weights, as for `export_adapter`.
      spec: the specification with which the adapter was trained.
      config: configuration of the backbone.

    Raises:
      AdapterError: the kind of the adapter cannot be merged.
      BackboneError: a file of the backbone is missing.
      OSError: a file cannot be written.
    """
    kind, folder, backbone = kind_of(spec), Path(folder), Path(backbone)
    if kind.merged is None:
        raise AdapterError(
            f"{folder}: an adapter of the kind {kind.name!r} does more than change weights of the "
            "backbone, so it cannot be merged; export it without --merge"
        )
    changes = dict(kind.merged(spec, adapter, config))
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for path in shards(backbone):
        with safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        for name in changes.keys() & tensors.keys():
            weight = tensors[name]
            merged = changes.pop(name)(weight.astype(np.float32))
            tensors[name] = np.ascontiguousarray(merged.astype(weight.dtype))
        save_file(tensors, partial / path.name, metadata={"format": "pt"})
    if changes:
        raise AdapterError(f"{backbone}: tensor {min(changes)} is missing")
    for path in backbone.iterdir():
        if path.suffix in _OTHERS and path.is_file():
            shutil.copyfile(path, partial / path.name)
    partial.rename(folder)
