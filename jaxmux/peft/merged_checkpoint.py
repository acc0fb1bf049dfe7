"""Checkpoints of backbones into which an adapter is merged, for programs that do not know
adapters."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxmux.atomic_files import share_like_folder, unwritable_named
from jaxmux.data import Rendering
from jaxmux.models import BackboneConfig, checkpoint_tensors
from jaxmux.models.architectures import record_tying
from jaxmux.models.checkpoint_files import (
    HEAD_TENSOR,
    WHOLE,
    CheckpointTensors,
    copy_other_files,
    shards,
    write_index,
    write_tensors,
)
from jaxmux.models.quantised.settings import SETTINGS
from jaxmux.models.tensor_names import tensor_names
from jaxmux.pallas_kernels.frozen_weight import PLAIN_FORMATS

from .kinds import kind_of
from .model_card import CARD, Notes, merged_card
from .peft_folder import AdapterError, write_chat_template

# Takes a weight in float32 and returns the merged weight.
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

    Weights are merged in float32 and rounded to the dtype that they have in the checkpoint. In
    bfloat16, which has 8 significant bits, changes that are small compared with a weight are lost.
    The weights are divided into the same files as the backbone's; host memory holds one file at a
    time. A quantised backbone is decoded. If the head is the embedding, it is not written a second
    time. All other files of the folder are copied.

    Args:
      folder: folder to write; it must not exist.
      backbone: the checkpoint folder of the backbone.
      adapter: the trained weights, as for `export_adapter`.
      spec: the specification with which the adapter was trained.
      notes: facts about the training for the model card; None for none.
      rendering: how the training data became text; None if unknown. If its chat template differs
        from that of the backbone's tokenizer, the checkpoint's tokenizer gets it.

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
    try:
        copy_other_files(backbone, partial)
        write = _write_decoded if config.quantisation else _write_files
        write(partial, backbone, changes, config)
        if changes:
            raise AdapterError(f"{backbone}: tensor {min(changes)} is missing")
        (partial / CARD).write_text(merged_card(str(backbone), kind.name, notes, rendering))
        if rendering and rendering.own_template and not _replaced_in_list(partial, rendering):
            write_chat_template(partial, rendering)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_files(
    folder: Path, backbone: Path, changes: dict[str, Change], config: BackboneConfig
) -> None:
    """Writes each tensor once, to the file of the same name as in the backbone, and an index of
    what was written."""
    weight_map, total = {}, 0
    with CheckpointTensors(backbone, config.tie_word_embeddings) as files:
        for path, names in files.by_file().items():
            tensors = {
                name: files.read(name)
                for name in names
                if not (name == HEAD_TENSOR and config.tie_word_embeddings)
            }
            for name in changes.keys() & tensors.keys():
                weight = tensors[name]
                merged = changes.pop(name)(weight.astype(np.float32))
                tensors[name] = np.ascontiguousarray(merged.astype(weight.dtype))
            if not tensors:
                continue
            with unwritable_named(folder / path.name):
                save_file(tensors, folder / path.name, metadata={"format": "pt"})
            share_like_folder(folder / path.name)
            weight_map |= dict.fromkeys(tensors, path.name)
            total += sum(tensor.nbytes for tensor in tensors.values())
    if shards(backbone)[0].name != WHOLE:
        write_index(folder, weight_map, total)
    raw = json.loads((folder / "config.json").read_text())
    record_tying(raw, config.tie_word_embeddings)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


def _write_decoded(
    folder: Path, backbone: Path, changes: dict[str, Change], config: BackboneConfig
) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    name = str(raw.get("dtype") or raw.get("torch_dtype")).removeprefix("torch.")
    dtype = np.dtype(jnp.dtype(name if name in PLAIN_FORMATS else "bfloat16"))
    for key in SETTINGS:
        raw.pop(key, None)
    record_tying(raw, config.tie_word_embeddings)
    path.write_text(json.dumps(raw, indent=2) + "\n")
    read = checkpoint_tensors(backbone, np.dtype(np.float32))

    def merged(name: str) -> np.ndarray:
        weight = read(name)
        return (changes.pop(name)(weight) if name in changes else weight).astype(dtype)

    write_tensors(folder, ((name, merged(name)) for name in tensor_names(config)))


def _replaced_in_list(folder: Path, rendering: Rendering) -> bool:
    """Replaces the default template if tokenizer_config.json has a list of named templates. Returns
    whether it has a list that transformers reads. A separate file with a template would hide the
    other templates of the list."""
    path = folder / "tokenizer_config.json"
    if any(folder.glob("chat_template*.jinja")) or any(folder.glob("*chat_templates/*.jinja")):
        return False
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        listed = settings["chat_template"]
        others = [each for each in listed if each["name"] != "default"]
    except (OSError, ValueError, KeyError, TypeError):
        # There is no list. The file cannot be damaged, because the tokenizer has been read.
        return False
    default = {"name": "default", "template": rendering.own_template}
    settings["chat_template"] = [default, *others]
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return True
