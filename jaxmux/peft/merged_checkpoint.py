"""Checkpoints of backbones into which an adapter is merged, for programs that know no adapters."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from jaxmux.atomic_files import share_like_folder
from jaxmux.data import Rendering
from jaxmux.models import BackboneConfig, checkpoint_tensors
from jaxmux.models.checkpoint_files import copy_other_files, shards, write_tensors
from jaxmux.models.quantised.settings import SETTINGS
from jaxmux.models.tensor_names import tensor_names
from jaxmux.pallas_kernels.frozen_weight import PLAIN_FORMATS

from .chat_template_file import write_chat_template
from .kinds import kind_of
from .model_card import CARD, Notes, merged_card
from .peft_folder import AdapterError

# From a weight in float32 to the merged one.
Change = Callable[[np.ndarray], np.ndarray]


def write_merged(
    folder: str | Path,
    backbone: str | Path,
    adapter: Any,
    spec: Any,
    config: BackboneConfig,
    notes: Notes | None = None,
    rendering: Rendering | None = None,
) -> None:
    """Writes the checkpoint of a backbone with an adapter merged into its weights.

    Weights are merged in float32 and rounded to the dtype that they have in the checkpoint. Changes
    that are small beside a weight are lost by that in bfloat16, which has 8 bits. The files are
    divided like those of the backbone; host memory holds one of them. A quantised backbone is
    decoded.

    Args:
      folder: folder to write; it must not exist.
      backbone: the checkpoint folder of the backbone.
      adapter: the trained weights, as for `export_adapter`.
      spec: the specification with which the adapter was trained.
      config: configuration of the backbone.
      notes: what the model card tells of the training; None for nothing.
      rendering: how the training data became text. Its chat template, if it is not that of the
        backbone's tokenizer, becomes that of the checkpoint's. None if that is not known.

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
    write = _write_decoded if config.quantisation else _write_files
    write(partial, backbone, changes, config)
    if changes:
        raise AdapterError(f"{backbone}: tensor {min(changes)} is missing")
    (partial / CARD).write_text(merged_card(str(backbone), kind.name, notes, rendering))
    if rendering and rendering.own_template:
        write_chat_template(partial, rendering)
    partial.rename(folder)


def _write_files(
    folder: Path, backbone: Path, changes: dict[str, Change], config: BackboneConfig
) -> None:
    for path in shards(backbone):
        with safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        for name in changes.keys() & tensors.keys():
            weight = tensors[name]
            merged = changes.pop(name)(weight.astype(np.float32))
            tensors[name] = np.ascontiguousarray(merged.astype(weight.dtype))
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
        share_like_folder(folder / path.name)
    copy_other_files(backbone, folder)
    for path in backbone.glob("*.index.json"):
        shutil.copyfile(path, folder / path.name)


def _write_decoded(
    folder: Path, backbone: Path, changes: dict[str, Change], config: BackboneConfig
) -> None:
    copy_other_files(backbone, folder)
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    name = str(raw.get("dtype") or raw.get("torch_dtype")).removeprefix("torch.")
    dtype = np.dtype(jnp.dtype(name if name in PLAIN_FORMATS else "bfloat16"))
    for key in SETTINGS:
        raw.pop(key, None)
    path.write_text(json.dumps(raw, indent=2) + "\n")
    read = checkpoint_tensors(backbone, np.dtype(np.float32))

    def merged(name: str) -> np.ndarray:
        weight = read(name)
        return (changes.pop(name)(weight) if name in changes else weight).astype(dtype)

    write_tensors(folder, ((name, merged(name)) for name in tensor_names(config)))
