"""A fingerprint of a backbone's folder, by which a changed backbone is recognised."""

import dataclasses
import hashlib
import json
import struct
from pathlib import Path

from .architectures import BackboneConfig
from .checkpoint_files import safetensors_header, shards
from .errors import BackboneError

# Bytes that are read at the start, in the middle and at the end of each tensor.
_SAMPLE_BYTES = 1024


def backbone_fingerprint(folder: str | Path) -> str:
    """A hash of a backbone that takes milliseconds, because it reads only parts of the weights.

    It covers the settings that jaxmux reads from config.json and, of every tensor, the name, the
    dtype, the shape, and the bytes at its start, middle and end. It does not depend on the folder's
    name or on the division into shards.

    Args:
      folder: Hugging Face checkpoint folder with config.json and safetensors.

    Returns:
      The first 16 hexadecimal digits of the SHA-256 hash.

    Raises:
      BackboneError: a file is missing or cannot be read; the message names it.
    """
    folder = Path(folder)
    config = dataclasses.asdict(BackboneConfig.from_folder(folder).plain)
    for key in ("backbone_format", "quantisation", "kept"):
        # The tensors tell how linears are stored.
        del config[key]
    tensors = dict(tensor for path in shards(folder) for tensor in _tensors(path))
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, (description, sample) in sorted(tensors.items()):
        digest.update(f"{name} {description}".encode() + sample)
    return digest.hexdigest()[:16]


def _tensors(path: Path) -> list[tuple[str, tuple[str, bytes]]]:
    """By name, the dtype and shape of each tensor of a safetensors file, and a sample of its
    bytes."""
    found = []
    try:
        data, header = safetensors_header(path)
        with path.open("rb") as file:
            for name, tensor in header.items():
                start, end = tensor["data_offsets"]
                sample = b""
                for offset in (start, (start + end) // 2, max(start, end - _SAMPLE_BYTES)):
                    file.seek(data + offset)
                    sample += file.read(min(_SAMPLE_BYTES, end - offset))
                found.append((name, (f"{tensor['dtype']} {tensor['shape']}", sample)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as e:
        raise BackboneError(
            f"{path}: cannot be read as safetensors ({e}); truncated download?"
        ) from None
    return found
