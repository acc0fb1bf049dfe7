"""The files of a checkpoint folder of Hugging Face."""

import json
from pathlib import Path

from .architectures import BackboneError


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
