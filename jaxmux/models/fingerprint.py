"""A fingerprint of a backbone's folder, with which a changed backbone is recognised."""

import dataclasses
import hashlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import xxhash

from jaxmux.atomic_files import write_atomically
from jaxmux.installation import cache_folder

from .architectures import BackboneConfig
from .checkpoint_files import safetensors_header, shards, unreadable_named

# Number of hexadecimal digits of a fingerprint.
_DIGITS = 32
# A thread reads this many bytes at a time.
_BLOCK_BYTES = 16 * 2**20
_THREADS = 16
# Digests of files below this size are not kept: computing them takes less time than reading kept
# ones.
_LEAST_KEPT_BYTES = 64 * 2**20
# A file that changed less than this time before it was read may change again with the same time
# stamp, so its digests are not kept.
_SETTLED_NS = 2 * 10**9

# For each tensor, a text with its dtype, shape and digest.
_Digests = dict[str, str]


def backbone_fingerprint(folder: str | Path) -> str:
    """Returns a hash of a backbone, including all bytes of its weights, as 32 hexadecimal digits.

    It covers the settings that jaxmux reads from config.json and, for every tensor, the name, the
    dtype, the shape and the bytes (XXH3, 128 bits). It does not depend on the folder's name or on
    the division into shards.

    Threads read about 10 GB/s from memory. The digests of a large file are kept in the user's cache
    folder and used as long as the file's size, inode and times of change stay the same. Every write
    changes one of these times, even if it restores the modification time.

    Raises BackboneError if a file is missing or cannot be read.
    """
    folder = Path(folder)
    config = dataclasses.asdict(BackboneConfig.from_folder(folder).plain)
    for key in ("backbone_format", "quantisation", "kept"):
        # The hash of the tensors covers how linears are stored.
        del config[key]
    tensors: _Digests = {}
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        for path in shards(folder):
            tensors |= _digests(path, threads)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, description in sorted(tensors.items()):
        digest.update(f"{name} {description}\n".encode())
    return digest.hexdigest()[:_DIGITS]


def may_be_the_same(one: str, other: str) -> bool:
    """Whether two fingerprints may belong to the same backbone. An empty fingerprint is unknown.
    Fingerprints of jaxmux 0.1 cover a sample of the weights, have 16 digits and cannot be compared
    with others."""
    return one == other or len(one) != len(other)


def _digests(path: Path, threads: ThreadPoolExecutor) -> _Digests:
    with unreadable_named(path):
        before, began = path.stat(), time.time_ns()
        kept = _kept_file(path) if before.st_size >= _LEAST_KEPT_BYTES else None
        if kept and (digests := _read_kept(kept, before)) is not None:
            return digests
        start, header = safetensors_header(path)
        with path.open("rb", buffering=0) as file:
            digest = partial(_digest, file.fileno(), start)
            digests = dict(zip(header, threads.map(digest, header.values()), strict=True))
        after = path.stat()
    settled = began - before.st_ctime_ns > _SETTLED_NS
    if kept and settled and _identity(before) == _identity(after):
        # If the cache folder cannot be written, the next call reads the file again.
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            record = {"file": _identity(after), "tensors": digests}
            write_atomically(kept, json.dumps(record) + "\n")
    return digests


def _digest(file: int, start: int, tensor: dict) -> str:
    (offset, end), hashed = tensor["data_offsets"], xxhash.xxh3_128()
    block = memoryview(bytearray(min(_BLOCK_BYTES, end - offset)))
    while offset < end:
        count = os.preadv(file, [block[: end - offset]], start + offset)
        if not count:
            raise ValueError("its data is incomplete")
        hashed.update(block[:count])
        offset += count
    return f"{tensor['dtype']} {tensor['shape']} {hashed.hexdigest()}"


def _kept_file(path: Path) -> Path:
    """The file in the cache folder with the digests of the tensors of the file `path`."""
    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    return cache_folder("digests") / f"{name}.json"


def _read_kept(kept: Path, stat: os.stat_result) -> _Digests | None:
    """The digests in the cache folder; None if there are none, or if the file has changed since."""
    try:
        record = json.loads(kept.read_text())
        digests, is_same = record["tensors"], record["file"] == _identity(stat)
        valid = all(isinstance(digest, str) for digest in digests.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return digests if is_same and valid else None


def _identity(stat: os.stat_result) -> list[int]:
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
