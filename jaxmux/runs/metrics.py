"""The files of JSON lines in a run directory: metrics.jsonl, held_out.jsonl, rounds.jsonl.

Numbers in them may be missing, but are never NaN or infinite. Servers append to such files for
weeks; these stay bounded in size.
"""

import json
import math
import mmap
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from jaxmux.engine import TaskEvaluation, TaskUpdate
from jaxmux.engine.rounds.results import RoundRecord
from jaxmux.engine.tasks.progress import as_line
from jaxmux.models import DeviceBytes

from .checkpoints import RunPosition
from .run_directory import RunDirectory
from .trackers import RunTrackers


def json_line(fields: Mapping[str, Any]) -> bytes:
    """An object as a line of JSON. Numbers that are not finite become null.

    Args:
      fields: the entries of the object.
    """
    finite = {key: finite_or_none(value) for key, value in fields.items()}
    return json.dumps(finite).encode() + b"\n"


def finite_or_none(value: Any) -> Any:
    """The value, or None for a number that is not finite, which JSON cannot express.

    Args:
      value: any value.
    """
    return None if isinstance(value, float) and not math.isfinite(value) else value


def objects(content: bytes) -> Iterator[dict[str, Any]]:
    """The objects in lines of JSON. Damaged lines are left out.

    Args:
      content: the lines.
    """
    for line in content.split(b"\n"):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found


def objects_backwards(content: mmap.mmap | bytes) -> Iterator[dict[str, Any]]:
    """The objects in lines of JSON, from the last one on. Damaged lines are left out.

    Args:
      content: the lines.
    """
    end = len(content)
    while end:
        begin = content.rfind(b"\n", 0, end - 1) + 1
        yield from objects(content[begin:end])
        end = begin


# Size in bytes at which a file is set aside.
LOG_BYTES = 64 * 2**20
# Names of the files that have been set aside. Those of higher numbers are newer.
SET_ASIDE = re.compile(r"(?:events|rounds)\.(\d+)\.jsonl")
# Number of these files that are kept.
_KEPT = 3


class LineLog:
    """Appends lines to a file. Nothing depends on the file but what it tells its readers, so a
    full disk does not stop training.

    A file that has become large is set aside: "events.jsonl" is renamed to "events.<n>.jsonl", with
    a number that is higher than all others, and a new file is begun. Only the last of these files
    are kept.
    """

    def __init__(self, path: Path, say: Callable[[str], None], most_bytes: int = LOG_BYTES):
        """Opens the file.

        Args:
          path: the file, "events.jsonl" or "rounds.jsonl".
          say: function that prints one line; it is told if lines are lost.
          most_bytes: size in bytes at which the file is set aside.
        """
        self._path, self._say, self._fails = path, say, False
        self._most_bytes = most_bytes
        # What the next line begins with: the end of a line that was cut off.
        self._first = b""
        self._file = self._open()
        self._size = os.fstat(self._file).st_size
        if self._size and os.pread(self._file, 1, self._size - 1) != b"\n":
            self._first = b"\n"

    def append(self, fields: Mapping[str, Any]) -> None:
        """Appends a line.

        Args:
          fields: the entries of its object. Numbers that are not finite become null.
        """
        if self._size >= self._most_bytes:
            try:
                self._set_aside()
            except OSError as e:
                self._complain(f"cannot be set aside ({e.strerror}); it grows")
        line = self._first + json_line(fields)
        try:
            written = self._append(line)
            # A full disk takes the beginning of a line, and says so at the next write.
            while written < len(line):
                self._first = b"\n"
                written += self._append(line[written:])
            self._first = b""
        except OSError as e:
            self._complain(f"cannot be written ({e.strerror}); lines are lost")

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def lines(self, since: float) -> Iterator[bytes]:
        """The lines of all files that were changed since then, from the oldest on.

        Args:
          since: time in seconds since 1970.
        """
        for path in self._paths():
            # File systems may round times down, by up to two seconds.
            if path.stat().st_mtime >= since - 2:
                with path.open("rb") as file:
                    yield from file

    def last(self) -> dict[str, Any] | None:
        """The object of the last line that is not damaged; None if there is none."""
        for path in reversed(self._paths()):
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if not size:
                    continue
                with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as content:
                    for found in objects_backwards(content):
                        return found
        return None

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        return os.open(self._path, flags, 0o666)

    def _complain(self, problem: str) -> None:
        """Tells of a problem with the file, if it is the first one."""
        if not self._fails:
            self._say(f"{self._path}: {problem}")
        self._fails = True

    def _append(self, content: bytes) -> int:
        written = os.write(self._file, content)
        self._size += written
        return written

    def _set_aside(self) -> None:
        """Begins a new file. If none can be created, the present one goes on."""
        number = max(self._numbers(), default=0) + 1
        self._path.rename(self._numbered(number))
        try:
            file = self._open()
        except OSError:
            self._numbered(number).rename(self._path)
            raise
        os.close(self._file)
        self._file, self._size, self._first = file, 0, b""
        for old in self._numbers()[:-_KEPT]:
            self._numbered(old).unlink()

    def _numbers(self) -> list[int]:
        """The numbers of the files that were set aside, ascending."""
        own = f"{self._path.stem}."
        names = [name for name in os.listdir(self._path.parent) if name.startswith(own)]
        return sorted(int(name[1]) for name in map(SET_ASIDE.fullmatch, names) if name)

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.stem}.{number}.jsonl")

    def _paths(self) -> list[Path]:
        """All files, from the oldest on."""
        return [*map(self._numbered, self._numbers()), self._path]


# The first rounds have details, and then so many each time the number of rounds has doubled.
_DETAILED = 32
# Most microbatches and most passes that a line tells of.
MOST_MICROBATCHES, MOST_PASSES = 256, 4096


def has_details(index: int) -> bool:
    """Whether the line of a round tells what each microbatch held: it is one of the first 64
    rounds, or one of 32 that are spread over those in which the number of rounds doubles.

    Args:
      index: number of the round, from 0.
    """
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
      record: what the round held.
      spent: where the time since the round before went, from `DeviceTime.spent`. The time of a
        round is seen from it although the devices are one round behind.
      memory: memory of the local devices; empty if they do not report it.
      host_bytes: bytes of the host's memory that this process uses; None if that is not known.
      detailed: whether the line tells what each microbatch held, as `has_details` advises.

    Returns:
      A dict with round, seconds, spent (seconds by kind; their sum is `seconds`), microbatches
      (their number), tokens (with padding), chunk_tokens (of the chunks that hold samples),
      read_tokens (without padding), memory_in_use and memory_peak (bytes by device), host_bytes;
      and with details, held and passes. "held" has for each of the first 256 microbatches its
      replica, its tokens with padding, and by task the tokens of its chunks and those that the
      model reads.
      "passes" has for each of the first 4096 passes the milliseconds since the first one, replica,
      stage, part, round, microbatch, and "F" or "B".
    """
    tasks = [own for microbatch in record.microbatches for own in microbatch.tasks.values()]
    line = {
        "round": record.index,
        "seconds": round(sum(spent.values()), 4),
        "spent": {kind: round(seconds, 4) for kind, seconds in spent.items()},
        "microbatches": len(record.microbatches),
        "tokens": sum(own.capacity for own in record.microbatches),
        "chunk_tokens": sum(own.chunks for own in tasks),
        "read_tokens": sum(own.read for own in tasks),
        "memory_in_use": [own.in_use for own in memory],
        "memory_peak": [own.peak for own in memory],
        "host_bytes": host_bytes,
    }
    if detailed:
        line["held"] = [
            [own.replica, own.capacity, own.tasks]
            for own in record.microbatches[:MOST_MICROBATCHES]
        ]
        line["passes"] = _passes(record)
    return line


def host_bytes() -> int | None:
    """Bytes of the host's memory that this process uses; None where that is not known."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _passes(record: RoundRecord) -> list[list[Any]]:
    begin = record.passes[0].seconds if record.passes else 0.0
    return [
        [
            round(1000 * (own.seconds - begin), 2),
            own.replica,
            own.stage,
            own.part,
            record.index + (own.steps is not record.steps),
            own.microbatch,
            "F" if own.forward else "B",
        ]
        for own in record.passes[:MOST_PASSES]
    ]


# The fields without which a line of metrics.jsonl counts as damaged.
_NEEDED = {"task", "task_step", "loss", "skipped"}


class MetricsWriter:
    """Appends every task update to metrics.jsonl, every held-out loss to held_out.jsonl, and hands
    both to the trackers; and every round to rounds.jsonl."""

    def __init__(
        self,
        directory: RunDirectory,
        position: RunPosition,
        trackers: RunTrackers,
        say: Callable[[str], None],
    ):
        """Opens the files and removes everything that was written after the last checkpoint.

        Args:
          directory: the run directory.
          position: the position of the checkpoint.
          trackers: the trackers, which `close` closes.
          say: function that prints one line; it is told of lost metrics.
        """
        self._metrics = _Lines(directory.metrics, position.metrics_bytes, say)
        self._held_out = _Lines(directory.held_out, position.held_out_bytes, say)
        self._rounds = _Lines(directory.rounds, position.rounds_bytes, say)
        self._trackers, self._finished = trackers, False
        for own in (self._metrics, self._held_out):
            lines = own.since(trackers.lacking)
            trackers.log(lines, own is self._held_out, repeated_to=sys.maxsize)

    def write(self, updates: Iterable[TaskUpdate], evaluations: Iterable[TaskEvaluation]) -> None:
        """Appends one line for each update and for each held-out loss, with the time of day in
        seconds since 1970. Numbers that are not finite become null.

        Args:
          updates: the updates.
          evaluations: the held-out losses.
        """
        now = _now()
        for own, results in ((self._metrics, updates), (self._held_out, evaluations)):
            lines = [{**as_line(result), "time": now} for result in results]
            own.append(lines)
            self._trackers.log(lines, own is self._held_out, own.last_removed)

    def write_round(self, line: Mapping[str, Any]) -> None:
        """Appends the line of a round, with the time of day.

        Args:
          line: the result of `round_line`.
        """
        self._rounds.append([{**line, "time": _now()}])

    def tell(self, position: RunPosition) -> None:
        """Waits until the lines are on disk, and enters the lengths of the files.

        Args:
          position: the position of the training run; it is changed.
        """
        position.metrics_bytes = self._metrics.length()
        position.held_out_bytes = self._held_out.length()
        position.rounds_bytes = self._rounds.length()

    def finish(self) -> None:
        """Notes that the training run has ended, which `close` tells the trackers."""
        self._finished = True

    def close(self) -> None:
        """Closes the files and the trackers."""
        self._metrics.close()
        self._held_out.close()
        self._rounds.close()
        self._trackers.close(self._finished)


def _now() -> float:
    return round(time.time(), 3)


class _Lines:
    """A file of JSON lines that is continued from a checkpoint.

    Attributes:
      last_removed: the last round of which lines have been removed, because they were written after
        the checkpoint; -1 if there are none.
    """

    def __init__(self, path: Path, length: int, say: Callable[[str], None]):
        """Opens the file and cuts it off at the end of its last line that the checkpoint knows. If
        the file was changed or cut since, that length may lie within a line: such a line is removed
        as a whole, so the next one never goes on with it.

        Args:
          path: the file.
          length: its length at the checkpoint, in bytes.
          say: function that prints one line; it is told of lost lines.
        """
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
        """The last lines, from the first one of a round on."""
        if not (end := self._file.seek(0, os.SEEK_END)):
            return []
        found: list[dict[str, Any]] = []
        with mmap.mmap(self._file.fileno(), end, access=mmap.ACCESS_READ) as content:
            for own in objects_backwards(content):
                if not own.keys() >= {"step", "task", "time"}:
                    continue  # a line of an early version
                if own["step"] < step:
                    break
                found.append(own)
        return found[::-1]

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Appends lines."""
        try:
            for fields in lines:
                self._file.write(json_line(fields))
            self._file.flush()
        except OSError as e:
            raise OSError(e.errno, e.strerror, self._file.name) from None

    def length(self) -> int:
        """Waits until the file is on disk; returns its length in bytes."""
        os.fsync(self._file.fileno())
        return self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl as dicts with the fields of `as_line`, and "time". Damaged
    lines are left out. Lines of older versions of jaxmux may lack some fields.

    Args:
      path: path of metrics.jsonl.
    """
    return _read_lines(path, _NEEDED)


def read_held_out_losses(path: Path) -> list[dict[str, Any]]:
    """The lines of held_out.jsonl as dicts with the fields of `as_line`, and "time". Damaged
    lines are left out.

    Args:
      path: path of held_out.jsonl.
    """
    return _read_lines(path, {"task", "task_step", "loss"})


def _read_lines(path: Path, needed: set[str]) -> list[dict[str, Any]]:
    return [found for found in objects(path.read_bytes()) if needed <= found.keys()]


def _end_of_line(file: BinaryIO, size: int) -> int:
    """The length of the complete lines in the first `size` bytes of a file."""
    file.seek(max(size - 1, 0))
    if file.read(1) == b"\n":
        return size
    file.seek(0)
    return file.read(size).rfind(b"\n") + 1
