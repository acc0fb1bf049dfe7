"""The files of JSON lines in a run directory: metrics.jsonl, held_out.jsonl, rounds.jsonl.

Numbers may be missing in these files, but are never NaN or infinite. Servers append to such files
for weeks, so their size is bounded.
"""

import json
import math
import mmap
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from jaxmux.atomic_files import sync
from jaxmux.engine import TaskEvaluation, TaskUpdate
from jaxmux.engine.rounds.results import RoundRecord
from jaxmux.engine.tasks.progress import as_line
from jaxmux.models import DeviceBytes

from .checkpoints import RunPosition
from .run_directory import RunDirectory
from .trackers import RunTrackers


def json_line(fields: Mapping[str, Any]) -> bytes:
    """An object as a line of JSON. Numbers that are not finite become null."""
    return json.dumps(finite_or_none(fields)).encode() + b"\n"


def finite_or_none(value: Any) -> Any:
    """The value; None for a number that is not finite, also in a mapping, because JSON cannot
    express it."""
    if isinstance(value, Mapping):
        return {key: finite_or_none(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def objects(content: bytes) -> Iterator[dict[str, Any]]:
    """Yields the objects in lines of JSON and skips damaged lines."""
    for line in content.split(b"\n"):
        try:
            line_object = json.loads(line)
        except ValueError:
            continue
        if isinstance(line_object, dict):
            yield line_object


def objects_backwards(content: mmap.mmap | bytes) -> Iterator[dict[str, Any]]:
    """Yields the objects in lines of JSON, last line first, and skips damaged lines."""
    end = len(content)
    while end:
        begin = content.rfind(b"\n", 0, end - 1) + 1
        yield from objects(content[begin:end])
        end = begin


# When a file has this size in bytes, it is renamed and a new file is begun.
LOG_BYTES = 64 * 2**20
# Names of earlier files; a higher number is newer.
SET_ASIDE = re.compile(r"(?:events|rounds)\.(\d+)\.jsonl")
# Maximum number of earlier files that are kept.
_KEPT = 3


class LineLog:
    """Appends lines to a file. Training does not depend on the file and continues if the disk is
    full.

    When the file has become large, `set_aside_if_large` renames it from "events.jsonl" to
    "events.<n>.jsonl", with the highest number so far, and begins a new file. Only the last few
    earlier files are kept. `size` is the length of the file in bytes.
    """

    def __init__(self, path: Path, say: Callable[[str], None], most_bytes: int = LOG_BYTES):
        """Opens the file `path`, "events.jsonl" or "rounds.jsonl". `say` prints one line; it is
        called when lines are lost. A new file is begun at `most_bytes` bytes."""
        self._path, self._say, self._fails = path, say, False
        self._most_bytes = most_bytes
        self._file = self._open()
        self.size = os.fstat(self._file).st_size
        # A newline if the last line in the file is incomplete and must be ended first; otherwise
        # empty.
        self._first = self._newline()

    def append(self, fields: Mapping[str, Any]) -> bool:
        """Appends an object as a line; returns whether this succeeded. Numbers that are not finite
        become null."""
        line = self._first + json_line(fields)
        try:
            written = self._append(line)
            # If the disk is full, only the beginning of the line is written; the next write raises
            # the error.
            while written < len(line):
                self._first = b"\n"
                written += self._append(line[written:])
            self._first = b""
        except OSError as e:
            self._complain(f"cannot be written ({e.strerror}); lines are lost")
            return False
        return True

    def close(self) -> None:
        os.close(self._file)

    def cut(self, size: int) -> None:
        """Cuts the file to the length `size` in bytes that it had earlier. A shorter file stays as
        it is."""
        if self.size > size:
            os.ftruncate(self._file, size)
            self.size = size
            self._first = self._newline()

    def sync(self) -> None:
        """Waits until all lines are on disk. Raises OSError if the file system reports an error."""
        try:
            os.fsync(self._file)
        except OSError as e:
            raise OSError(e.errno, e.strerror, str(self._path)) from None

    def set_aside_if_large(self) -> bool:
        """Begins a new file if the present one is large; returns whether it did."""
        if self.size < self._most_bytes:
            return False
        try:
            self._set_aside()
        except OSError as e:
            self._complain(f"cannot be set aside ({e.strerror}); it grows")
            return False
        return True

    def _newline(self) -> bytes:
        is_cut = self.size and os.pread(self._file, 1, self.size - 1) != b"\n"
        return b"\n" if is_cut else b""

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        return os.open(self._path, flags, 0o666)

    def _complain(self, problem: str) -> None:
        """Reports the first problem with the file and ignores later problems."""
        if not self._fails:
            self._say(f"{self._path}: {problem}")
        self._fails = True

    def _append(self, content: bytes) -> int:
        written = os.write(self._file, content)
        self.size += written
        return written

    def _set_aside(self) -> None:
        """Begins a new file, or continues the present file if none can be created."""
        number = max(self._numbers(), default=0) + 1
        self._path.rename(self._numbered(number))
        try:
            file = self._open()
        except OSError:
            self._numbered(number).rename(self._path)
            raise
        os.close(self._file)
        self._file, self.size, self._first = file, 0, b""
        with suppress(OSError):
            # After a crash, a recorded length of the new file must not be applied to the old one.
            sync(self._path.parent)
            for old in self._numbers()[:-_KEPT]:
                self._numbered(old).unlink()

    def _numbers(self) -> list[int]:
        """The numbers of the earlier files, ascending."""
        prefix = f"{self._path.stem}."
        names = [name for name in os.listdir(self._path.parent) if name.startswith(prefix)]
        return sorted(int(name[1]) for name in map(SET_ASIDE.fullmatch, names) if name)

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.stem}.{number}.jsonl")


# The first 64 rounds are described in detail, and this many more each time the number of rounds
# doubles.
_DETAILED = 32
# Maximum number of microbatches and of passes in a line.
MOST_MICROBATCHES, MOST_PASSES = 256, 4096


def has_details(index: int) -> bool:
    """Whether the line of round `index` (from 0) describes its microbatches. This is so for the
    first 64 rounds, then for 32 evenly spaced rounds each time the number of rounds doubles."""
    return index % 2 ** max(0, index.bit_length() - _DETAILED.bit_length()) == 0


def round_line(
    record: RoundRecord,
    spent: Mapping[str, float],
    memory: Sequence[DeviceBytes],
    host_bytes: int | None,
    detailed: bool,
) -> Mapping[str, Any]:
    """The entries of a line of rounds.jsonl.

    Args:
      record: the contents of the round.
      spent: seconds by activity since the previous round, from `DeviceTime.spent`. The sum is
        reported as the time of this round, although the devices are one round behind.
      memory: memory of the local devices; empty if they do not report it.
      host_bytes: bytes of host memory that this process uses; None if unknown.
      detailed: whether the line describes each microbatch; `has_details` recommends a value.

    Returns:
      A dict with round, seconds, spent (seconds by activity; their sum is `seconds`), microbatches
      (their number), tokens (with padding), chunk_tokens (of the chunks that hold samples),
      read_tokens (without padding), memory_in_use and memory_peak (bytes by device), host_bytes;
      and with details, "held" and "passes". "held" has for each of the first 256 microbatches its
      replica, its tokens with padding, and a dict that gives for each task the tokens of its chunks
      and the tokens that the model reads. "passes" has for each of the first 4096 passes the
      milliseconds since the first one, replica, stage, part, round, microbatch, and "F" or "B".
    """
    tasks = [task for microbatch in record.microbatches for task in microbatch.tasks.values()]
    line = {
        "round": record.index,
        "seconds": round(sum(spent.values()), 4),
        "spent": {kind: round(seconds, 4) for kind, seconds in spent.items()},
        "microbatches": len(record.microbatches),
        "tokens": sum(microbatch.capacity for microbatch in record.microbatches),
        "chunk_tokens": sum(task.chunks for task in tasks),
        "read_tokens": sum(task.read for task in tasks),
        "memory_in_use": [device.in_use for device in memory],
        "memory_peak": [device.peak for device in memory],
        "host_bytes": host_bytes,
    }
    if detailed:
        line["held"] = [
            [microbatch.replica, microbatch.capacity, microbatch.tasks]
            for microbatch in record.microbatches[:MOST_MICROBATCHES]
        ]
        line["passes"] = _passes(record)
    return line


def host_bytes() -> int | None:
    """Bytes of host memory that this process uses; None if unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _passes(record: RoundRecord) -> list[list[Any]]:
    begin = record.passes[0].seconds if record.passes else 0.0
    return [
        [
            round(1000 * (done.seconds - begin), 2),
            done.replica,
            done.stage,
            done.part,
            record.index + (done.steps is not record.steps),
            done.microbatch,
            "F" if done.forward else "B",
        ]
        for done in record.passes[:MOST_PASSES]
    ]


# A line of metrics.jsonl that lacks one of these fields counts as damaged.
_NEEDED = {"task", "task_step", "loss", "skipped"}


class MetricsWriter:
    """Appends every task update to metrics.jsonl, every held-out loss to held_out.jsonl and every
    round to rounds.jsonl. Sends updates and held-out losses to the trackers."""

    def __init__(
        self,
        directory: RunDirectory,
        position: RunPosition,
        trackers: RunTrackers,
        say: Callable[[str], None],
    ):
        """Opens the files and removes everything that was written after the checkpoint at
        `position`. `close` also closes the trackers. `say` prints one line; it is called when
        metrics are lost."""
        self._metrics = _Lines(directory.metrics, position.metrics_bytes, say)
        self._held_out = _Lines(directory.held_out, position.held_out_bytes, say)
        self._rounds = _Lines(directory.rounds, position.rounds_bytes, say)
        self._trackers, self._finished = trackers, False
        for file in (self._metrics, self._held_out):
            lines = file.since(trackers.lacking)
            trackers.log(lines, file is self._held_out, repeated_to=sys.maxsize)

    def write(self, updates: Iterable[TaskUpdate], evaluations: Iterable[TaskEvaluation]) -> None:
        """Appends one line for each update and each held-out loss, with the time in seconds since
        1970. Numbers that are not finite become null."""
        now = _now()
        for file, results in ((self._metrics, updates), (self._held_out, evaluations)):
            lines = [{**as_line(result), "time": now} for result in results]
            file.append(lines)
            self._trackers.log(lines, file is self._held_out, file.last_removed)

    def write_round(self, line: Mapping[str, Any]) -> None:
        """Appends the line of a round, a result of `round_line`, with the time."""
        self._rounds.append([{**line, "time": _now()}])

    def tell(self, position: RunPosition) -> None:
        """Waits until all lines are on disk, then stores the lengths of the files in `position`."""
        position.metrics_bytes = self._metrics.length()
        position.held_out_bytes = self._held_out.length()
        position.rounds_bytes = self._rounds.length()

    def finish(self) -> None:
        """Records that the training run has ended; `close` reports this to the trackers."""
        self._finished = True

    def close(self) -> None:
        self._metrics.close()
        self._held_out.close()
        self._rounds.close()
        self._trackers.close(self._finished)


def _now() -> float:
    return round(time.time(), 3)


class _Lines:
    """A file of JSON lines that is continued from a checkpoint. `last_removed` is the last round
    whose lines were removed because they were written after the checkpoint; -1 if there is none."""

    def __init__(self, path: Path, length: int, say: Callable[[str], None]):
        """Opens the file and truncates it to its length in bytes at the checkpoint. If this length
        lies within a line, because the file was changed since, the whole line is removed. `say`
        prints one line; it is called when lines are lost."""
        self._file = open(path, "a+b")
        size = self._file.seek(0, os.SEEK_END)
        if (kept := _end_of_line(self._file, min(size, length))) < length:
            say(
                f"{path}: {length - kept} bytes are lost; training is not affected, and later "
                "metrics are appended"
            )
            length = kept
        self._file.seek(length)
        removed = [line.get("step") for line in objects(self._file.read())]
        self.last_removed = max((s for s in removed if isinstance(s, int)), default=-1)
        self._file.truncate(length)

    def since(self, step: int) -> list[dict[str, Any]]:
        """The file's last lines, from the first line of round `step` on."""
        if not (end := self._file.seek(0, os.SEEK_END)):
            return []
        lines: list[dict[str, Any]] = []
        with mmap.mmap(self._file.fileno(), end, access=mmap.ACCESS_READ) as content:
            for line in objects_backwards(content):
                if not line.keys() >= {"step", "task", "time"}:
                    continue  # a line of an early version
                if line["step"] < step:
                    break
                lines.append(line)
        return lines[::-1]

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        try:
            for fields in lines:
                self._file.write(json_line(fields))
            self._file.flush()
        except OSError as e:
            raise OSError(e.errno, e.strerror, self._file.name) from None

    def length(self) -> int:
        """Waits until the file is on disk and returns its length in bytes."""
        os.fsync(self._file.fileno())
        return self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl as dicts with the fields of `as_line`, and "time". Damaged lines
    are left out. Lines of older versions of jaxmux may lack some fields."""
    return _read_lines(path, _NEEDED)


def read_held_out_losses(path: Path) -> list[dict[str, Any]]:
    """The lines of held_out.jsonl as dicts with the fields of `as_line`, and "time". Damaged
    lines are left out."""
    return _read_lines(path, {"task", "task_step", "loss"})


def _read_lines(path: Path, needed: set[str]) -> list[dict[str, Any]]:
    return [line for line in objects(path.read_bytes()) if needed <= line.keys()]


def _end_of_line(file: BinaryIO, size: int) -> int:
    """Length in bytes of the complete lines within the first `size` bytes of a file."""
    file.seek(max(size - 1, 0))
    if file.read(1) == b"\n":
        return size
    file.seek(0)
    return file.read(size).rfind(b"\n") + 1
