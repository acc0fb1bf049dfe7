"""The files of a checkpoint folder of Hugging Face."""

import json
import math
import os
import shutil
import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file

from jaxmux.atomic_files import share_like_folder, unwritable_named

from .errors import BackboneError

# The limit of the safetensors format.
_LONGEST_HEADER = 100_000_000
# The embedding and the head.
EMBEDDING_TENSOR, HEAD_TENSOR = "model.embed_tokens.weight", "lm_head.weight"
# The file of all weights, and the index of several files of weights.
WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Suffixes of the files in which various libraries store weights.
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".ot"),
    *(".onnx", ".onnx_data", ".npz", ".tflite", ".pdparams"),
)
# Largest size of a file of weights, in bytes.
_SHARD_BYTES = 4 * 10**9
# Dtypes by their names in safetensors. The NumPy interface of safetensors lacks those of 8 bits.
_DTYPES = {
    "F64": jnp.float64,
    "F32": jnp.float32,
    "F16": jnp.float16,
    "BF16": jnp.bfloat16,
    "I64": jnp.int64,
    "I32": jnp.int32,
    "I16": jnp.int16,
    "I8": jnp.int8,
    "U8": jnp.uint8,
    "BOOL": jnp.bool_,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
    "F8_E8M0": jnp.float8_e8m0fnu,
}


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights or their index, and not only a configuration."""
    return (folder / WHOLE).exists() or (folder / _INDEX).exists()


def shards(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder. Raises BackboneError if a file is missing, or
    the index is damaged or names files of other folders."""
    index, whole = folder / _INDEX, folder / WHOLE
    if whole.exists():
        return [whole]
    if not index.exists():
        hint = "only safetensors are read"
        if any(folder.glob("*.gguf")):
            hint += "; for a GGUF file, take the checkpoint from which it was made"
        raise BackboneError(f"{folder}: neither {whole.name} nor {index.name} found ({hint})")
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


def safetensors_header(path: Path) -> tuple[int, dict[str, Any]]:
    """The header of a safetensors file: the offset of the data in the file, and for each tensor its
    dtype, shape and data_offsets. A file begins with the length of the header (8 bytes) and the
    header (JSON). If the file cannot be read or is incomplete, the type of the exception varies;
    see `unreadable_named`."""
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(min(length, _LONGEST_HEADER)))
    header.pop("__metadata__", None)
    for name, tensor in header.items():
        if 8 + length + tensor["data_offsets"][1] > size:
            raise ValueError(f"the data of tensor {name} is incomplete")
    return 8 + length, header


class _Entry(NamedTuple):
    """A tensor in a file. `file` is the descriptor of the open file, `offset` the index of the
    tensor's first byte, and `dtype` the name of the dtype in safetensors."""

    path: Path
    file: int
    offset: int
    dtype: str
    shape: tuple[int, ...]


class CheckpointTensors:
    """The tensors of a checkpoint folder, by name, as a context manager. `names` are the sorted
    names of all tensors; empty before the context is entered."""

    def __init__(self, folder: Path, is_tied: bool = False):
        """The files of the folder are opened when the context is entered. If the head is the
        embedding (`is_tied`) and the files have the table only under the head's name, the table is
        renamed to the embedding."""
        self.folder, self.names, self._is_tied = folder, [], is_tied
        self._entries: dict[str, _Entry] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "CheckpointTensors":
        """Opens the files. Raises BackboneError if a file is missing or cannot be read."""
        with ExitStack() as stack:
            for path in shards(self.folder):
                # safetensors checks that sizes, dtypes and offsets agree.
                with unreadable_named(path), safe_open(path, framework="numpy"):
                    start, header = safetensors_header(path)
                    file = os.open(path, os.O_RDONLY)
                stack.callback(os.close, file)
                # If several files have a tensor, the last file is used, as in transformers.
                for name, tensor in header.items():
                    offset, shape = start + tensor["data_offsets"][0], tuple(tensor["shape"])
                    self._entries[name] = _Entry(path, file, offset, tensor["dtype"], shape)
            if self._is_tied and EMBEDDING_TENSOR not in self._entries:
                if HEAD_TENSOR in self._entries:
                    self._entries[EMBEDDING_TENSOR] = self._entries.pop(HEAD_TENSOR)
            self._stack = stack.pop_all()
        self.names = sorted(self._entries)
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def of_module(self, module: str) -> list[str]:
        """The names of the tensors that begin with this name and a dot."""
        first, prefix = bisect_left(self.names, f"{module}."), f"{module}."
        return list(takewhile(lambda name: name.startswith(prefix), self.names[first:]))

    def by_file(self) -> dict[Path, list[str]]:
        names: dict[Path, list[str]] = {}
        for name, entry in self._entries.items():
            names.setdefault(entry.path, []).append(name)
        return names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        """The dtype of a tensor, as safetensors names it, for example "BF16"."""
        return self._entry(name).dtype

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Reads a tensor, or some consecutive rows (indices of its first axis), into new memory.
        Several threads may call it at the same time. Raises BackboneError if the dtype is unknown
        or the file cannot be read."""
        entry, dtype = self._entry(name), self.array_dtype(name)
        shape, offset = entry.shape, entry.offset
        if shape:
            start, stop, _ = rows.indices(shape[0])
            offset += start * math.prod(shape[1:]) * dtype.itemsize
            shape = (stop - start, *shape[1:])
        values = np.empty(shape, dtype)
        left = memoryview(values.reshape(-1).view(np.uint8))
        with unreadable_named(entry.path):
            while left:
                count = os.preadv(entry.file, [left], offset)
                if not count:
                    raise ValueError(f"the data of tensor {name} is incomplete")
                left, offset = left[count:], offset + count
        return values

    def array_dtype(self, name: str) -> np.dtype:
        """The dtype of the array that `read` returns. Raises BackboneError if it is unknown."""
        if (dtype := self.dtype(name)) not in _DTYPES:
            raise BackboneError(f"{self.folder}: tensor {name} has the unknown dtype {dtype}")
        return np.dtype(_DTYPES[dtype])

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise BackboneError(f"{self.folder}: tensor {name} is missing")
        return self._entries[name]


@contextmanager
def unreadable_named(path: Path) -> Iterator[None]:
    """Turns errors in reading a safetensors file into a BackboneError that names the file."""
    errors = (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError)
    try:
        yield
    except (*errors, struct.error) as e:
        raise BackboneError(
            f"{path}: cannot be read as safetensors ({e}); truncated download?"
        ) from None


def write_tensors(folder: Path, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes tensors into safetensors files of about 4 GB, with an index if there are several
    files. Tensors stay in memory until their file is written. Raises OSError if a file cannot be
    written."""
    weight_map: dict[str, int] = {}
    held: dict[str, jax.Array] = {}
    size = total = files = 0

    def write() -> None:
        nonlocal held, size, files
        files += 1
        with unwritable_named(folder):
            save_file(held, folder / str(files), metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(held, files))
        held, size = {}, 0

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        for name, array in tensors:
            if held and size + array.nbytes > _SHARD_BYTES:
                write()
            held[name] = jnp.asarray(array)
            size, total = size + array.nbytes, total + array.nbytes
        write()
    names = [f"model-{i:05}-of-{files:05}.safetensors" for i in range(1, files + 1)]
    if files == 1:
        names = [WHOLE]
    else:
        owners = {name: names[number - 1] for name, number in weight_map.items()}
        write_index(folder, owners, total)
    for number, name in enumerate(names, start=1):
        share_like_folder((folder / str(number)).rename(folder / name))


def write_index(folder: Path, weight_map: Mapping[str, str], total_size: int) -> None:
    """Writes the index of several files of weights. `weight_map` has, for each tensor, the name of
    its file; `total_size` is the number of bytes of all tensors."""
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / _INDEX).write_text(json.dumps(index, indent=1) + "\n")


def copy_other_files(folder: Path, target: Path) -> None:
    """Copies the files of a checkpoint folder other than weights and their index: configurations,
    tokenizers, chat templates, licences and code, including those in subfolders. Hidden files are
    not copied, nor is a subfolder that holds weights, because it is another model or a run.
    `target` may be in the folder. Raises OSError if a file cannot be copied."""
    for entry in [path for path in folder.iterdir() if not path.name.startswith(".")]:
        files = [entry]
        if entry.is_dir():
            files = [where / name for where, _, names in entry.walk() for name in names]
            if target.resolve().is_relative_to(entry.resolve()) or any(map(_is_weights, files)):
                continue
        for path in files:
            if path.is_file() and not _is_weights(path):
                copy = target / path.relative_to(folder)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)


def _is_weights(path: Path) -> bool:
    """Whether a file has weights, is an index of weights, or makes transformers look for the
    weights of an adapter."""
    name = path.name
    return path.suffix in _WEIGHTS or name.endswith(".index.json") or name == "adapter_config.json"
