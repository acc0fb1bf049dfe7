"""Tokenized samples, the unit of global batches and packing, and a temporary file that stores them.
Memory holds only the position of each sample in the file."""

import copy
import errno
import os
import resource
import tempfile
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt32

from .errors import DataError

# This many tokens, 4 bytes each, are kept in memory before they are written. Small data need no
# file.
_TOKENS_IN_MEMORY = 2**20
_TOKEN = np.dtype(np.int32)
# This many open files, or a quarter of the limit if that is less, are left for other purposes.
_OTHER_FILES = 256


class Sample(NamedTuple):
    """One tokenized training example.

    The model reads `input_ids[:-1]` and predicts `input_ids[1:]`, so a sample of n tokens takes n -
    1 positions of a microbatch, and a further position for each virtual token.

    Attributes:
      input_ids: int32, n at least 2.
      target_mask: True for the tokens that count in the loss; False for the first token, because no
        token precedes it.
      sample_id: index of the record in its source, from 0, below 2**32. Dropout masks depend on it.
      virtual_tokens: number of positions before the tokens that a trained prompt fills. Predictions
        at these positions do not count in the loss.
      values: by name, further numbers of each token that an objective reads, float32.
      numbers: by name, such numbers of the sample.
    """

    input_ids: Int[np.ndarray, " n"]
    target_mask: Bool[np.ndarray, " n"]
    sample_id: int
    virtual_tokens: int = 0
    values: Mapping[str, Float[np.ndarray, " n"]] = MappingProxyType({})
    numbers: Mapping[str, float] = MappingProxyType({})

    @property
    def stream_length(self) -> int:
        """Number of positions in a row that this sample takes: virtual tokens and `read_tokens`."""
        return self.virtual_tokens + self.read_tokens

    @property
    def read_tokens(self) -> int:
        """Number of tokens that the model reads: all but the last one."""
        return len(self.input_ids) - 1

    @property
    def target_tokens(self) -> int:
        """Number of tokens that count in the loss."""
        return int(np.count_nonzero(self.target_mask))


class TokenFile:
    """The tokens of samples, one sample after another, in a temporary file without a name.

    A token that counts in the loss is stored as its id, and any other token as -1 - id. Behind the
    tokens of a sample come the bits of its `values`, one name after another. The last
    tokens, up to a million, are in memory. The operating system removes the file when nothing
    refers to this object any more, or when the process is killed. The file lies in the folder that
    the environment variable TMPDIR names, otherwise in /var/tmp, because /tmp is in memory on many
    systems.
    """

    def __init__(self):
        self._file: BinaryIO | None = None
        self._written = 0
        self._tail = bytearray()

    def append(self, sample: Sample) -> int:
        """Appends the tokens of a sample; returns the number of tokens before them. Raises
        DataError if the file cannot be written, or if the process has too many open files."""
        begin = (self._written + len(self._tail)) // _TOKEN.itemsize
        stored = np.where(sample.target_mask, sample.input_ids, ~sample.input_ids)
        self._tail += stored.astype(_TOKEN).tobytes()
        for values in sample.values.values():
            self._tail += values.astype(np.float32).tobytes()
        if len(self._tail) >= _TOKENS_IN_MEMORY * _TOKEN.itemsize:
            self._write()
        return begin

    def read(self, begin: int, length: int) -> Int[np.ndarray, " length"]:
        """The stored values of `length` tokens, of which the first has `begin` tokens before it.
        Several threads may call it after the last `append`. Raises DataError if the file cannot be
        read."""
        begin, size = begin * _TOKEN.itemsize, length * _TOKEN.itemsize
        if begin >= self._written:
            begin -= self._written
            return np.frombuffer(bytes(self._tail[begin : begin + size]), _TOKEN)
        # A mapped file would count as memory of the process after it was read.
        content = os.pread(self._file.fileno(), size, begin)
        if len(content) != size:
            raise DataError(f"the temporary file of the tokens ends before byte {begin + size}")
        return np.frombuffer(content, _TOKEN)

    def _write(self) -> None:
        folder = temporary_folder()
        try:
            if self._file is None:
                self._file = _unnamed_file(folder)
            rest = memoryview(self._tail)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            hint = ""
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                hint = "; name a folder with more room by the environment variable TMPDIR"
            elif error.errno in (errno.EMFILE, errno.ENFILE):
                hint = "; data of a million tokens need an open file; raise `ulimit -n`"
            raise DataError(
                f"{folder}: the tokens of the data cannot be written there: {error.strerror}{hint}"
            ) from error
        self._written += len(self._tail)
        self._tail = bytearray()


def _unnamed_file(folder: str) -> BinaryIO:
    """Creates a file without a name. Raises OSError if few open files are left, because checkpoints
    and other data need some."""
    file = tempfile.TemporaryFile(dir=folder, buffering=0)
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A new file gets the lowest free number, so the number shows how many files are open.
    if most != resource.RLIM_INFINITY and file.fileno() >= most - min(_OTHER_FILES, most // 4):
        file.close()
        raise OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)} (the limit is {most})")
    return file


def temporary_folder() -> str:
    """The folder for temporary files with tokens."""
    usual = "/var/tmp"
    is_usable = not os.environ.get("TMPDIR") and os.access(usual, os.W_OK | os.X_OK)
    return usual if is_usable and Path(usual).is_dir() else tempfile.gettempdir()


class StoredSamples(Sequence[Sample]):
    """A sequence of samples whose tokens are in a `TokenFile`. Each sample takes 20 bytes of
    memory.

    Attributes:
      stream_lengths: int32 [samples], `Sample.stream_length` of each.
      target_tokens: int32 [samples], `Sample.target_tokens` of each.
      sample_ids: uint32 [samples], `Sample.sample_id` of each.
    """

    def __init__(
        self,
        tokens: TokenFile,
        begins: Int[np.ndarray, " samples"],
        lengths: Int[np.ndarray, " samples"],
        target_tokens: Int[np.ndarray, " samples"],
        sample_ids: UInt32[np.ndarray, " samples"],
        virtual_tokens: int = 0,
        values: tuple[str, ...] = (),
        numbers: Mapping[str, Float[np.ndarray, " samples"]] = MappingProxyType({}),
    ):
        """Describes samples that are already in the file.

        Args:
          begins: number of tokens before each sample in the file.
          lengths: number of tokens of each sample.
          target_tokens: number of tokens of each sample that count in the loss.
          virtual_tokens: `Sample.virtual_tokens` of every sample.
          values: the names of `Sample.values`.
          numbers: `Sample.numbers` by name.
        """
        self._tokens, self._begins, self._lengths = tokens, begins, lengths
        self.target_tokens, self.sample_ids = target_tokens, sample_ids
        self._virtual_tokens, self._values = virtual_tokens, values
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index):
        """Reads one sample, or returns `StoredSamples` for a slice."""
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        begin, length = int(self._begins[index]), int(self._lengths[index])
        stored, *values = self._tokens.read(begin, length * (1 + len(self._values))).reshape(
            -1, length
        )
        # Compute the complement of negative values without a branch.
        ids = stored ^ (stored >> 31)
        return Sample(
            ids,
            stored >= 0,
            int(self.sample_ids[index]),
            self._virtual_tokens,
            {n: x.view(np.float32) for n, x in zip(self._values, values, strict=True)},
            {name: float(column[index]) for name, column in self.numbers.items()},
        )

    @property
    def stream_lengths(self) -> Int[np.ndarray, " samples"]:
        return self._lengths - 1 + self._virtual_tokens

    @property
    def token_counts(self) -> Int[np.ndarray, " samples"]:
        """Number of tokens of each sample, without virtual tokens."""
        return self._lengths

    @property
    def tokens_key(self) -> tuple[int, bytes, bytes]:
        """A key that is equal for samples that are the same tokens of the same open file."""
        return id(self._tokens), self._begins.tobytes(), self._lengths.tobytes()

    def take(self, indices: Int[np.ndarray, " taken"]) -> "StoredSamples":
        """The samples with these indices, which may be in any order and may repeat."""
        return StoredSamples(
            self._tokens,
            self._begins[indices],
            self._lengths[indices],
            self.target_tokens[indices],
            self.sample_ids[indices],
            self._virtual_tokens,
            self._values,
            {name: column[indices] for name, column in self.numbers.items()},
        )

    def with_ids_shifted(self, by: int) -> "StoredSamples":
        """The samples with `by`, modulo 2**32, added to their ids."""
        ids = ((self.sample_ids.astype(np.uint64) + by) % 2**32).astype(np.uint32)
        return self._with(sample_ids=ids)

    def with_virtual_tokens(self, number: int) -> "StoredSamples":
        return self._with(_virtual_tokens=number)

    def with_numbers(self, **numbers: Float[np.ndarray, " samples"]) -> "StoredSamples":
        """The samples with these `Sample.numbers` in addition to their own."""
        return self._with(numbers={**self.numbers, **numbers})

    def _with(self, **attributes: Any) -> "StoredSamples":
        other = copy.copy(self)
        vars(other).update(attributes)
        return other


class SampleWriter:
    def __init__(self, tokens: TokenFile):
        self._tokens = tokens
        self._begins, self._lengths = array("q"), array("i")
        self._targets, self._ids = array("i"), array("I")
        self._values: tuple[str, ...] = ()
        self._numbers: dict[str, array] = {}

    def __len__(self) -> int:
        return len(self._begins)

    def append(self, sample: Sample) -> None:
        """Appends a sample without virtual tokens. All have values and numbers of the same
        names."""
        self._values = tuple(sample.values)
        for name, number in sample.numbers.items():
            self._numbers.setdefault(name, array("d")).append(number)
        self._begins.append(self._tokens.append(sample))
        self._lengths.append(len(sample.input_ids))
        self._targets.append(sample.target_tokens)
        self._ids.append(sample.sample_id)

    def extend(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            self.append(sample)

    def samples(self) -> StoredSamples:
        columns = (self._begins, self._lengths, self._targets, self._ids)
        arrays = (np.array(column) for column in columns)
        numbers = {name: np.array(column) for name, column in self._numbers.items()}
        return StoredSamples(self._tokens, *arrays, values=self._values, numbers=numbers)


def stored(samples: Iterable[Sample]) -> StoredSamples:
    """Writes samples without virtual tokens to a new file."""
    writer = SampleWriter(TokenFile())
    writer.extend(samples)
    return writer.samples()


def joined(parts: Sequence[StoredSamples]) -> StoredSamples:
    """Concatenates samples that are in one file and have the same number of virtual tokens."""
    first = parts[0]
    names = "_begins", "_lengths", "target_tokens", "sample_ids"
    columns = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
    numbers = {n: np.concatenate([part.numbers[n] for part in parts]) for n in first.numbers}
    return StoredSamples(first._tokens, *columns, first._virtual_tokens, first._values, numbers)


def taken(samples: Sequence[Sample], indices: Int[np.ndarray, " taken"]) -> Sequence[Sample]:
    """The samples with these indices."""
    if isinstance(samples, StoredSamples):
        return samples.take(indices)
    return [samples[i] for i in indices.tolist()]


def chained(parts: Sequence[Sequence[Sample]]) -> Sequence[Sample]:
    """Concatenates samples that may be in different files."""
    whole = [part for part in parts if len(part)]
    are_stored = all(isinstance(part, StoredSamples) for part in whole)
    if are_stored and len({id(part._tokens) for part in whole}) == 1:
        return joined(whole)
    return [sample for part in whole for sample in part]


def stream_lengths(samples: Sequence[Sample]) -> Int[np.ndarray, " samples"]:
    """Stream lengths of samples in tokens, without reading samples from a file."""
    if isinstance(samples, StoredSamples):
        return samples.stream_lengths
    return np.array([sample.stream_length for sample in samples], np.int32)


def token_counts(samples: Sequence[Sample]) -> Int[np.ndarray, " samples"]:
    """Number of tokens of each sample, without virtual tokens and without reading samples from a
    file."""
    if isinstance(samples, StoredSamples):
        return samples.token_counts
    return np.array([len(sample.input_ids) for sample in samples], np.int32)


def target_counts(samples: Sequence[Sample]) -> Int[np.ndarray, " samples"]:
    """Number of tokens of each sample that count in the loss, without reading samples from a
    file."""
    if isinstance(samples, StoredSamples):
        return samples.target_tokens
    return np.array([sample.target_tokens for sample in samples], np.int32)


def target_tokens(samples: Sequence[Sample]) -> int:
    """Number of tokens of all samples that count in the loss, without reading samples from a
    file."""
    if isinstance(samples, StoredSamples):
        return int(samples.target_tokens.sum(dtype=np.int64))
    return sum(sample.target_tokens for sample in samples)
