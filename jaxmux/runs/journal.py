"""The commands that a server has carried out since its checkpoints, on disk before they are."""

import dataclasses
import errno
import json
import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxmux.atomic_files import sync
from jaxmux.engine import TaskProgress
from jaxmux.live import At, Command, End, Meter, StateChange

from .run_directory import RunDirectoryError
from .task_fields import from_json, to_json

_SEGMENT = re.compile(r"(\d+)\.jsonl")


class Journal:
    """Commands in the order in which they were carried out, divided into segments.

    A segment holds the commands after the checkpoint of its number, and before the next one. A
    command is a line of JSON with a checksum, and with what its task had done and used by then. A
    line at the end of a segment that is not complete was never carried out.
    """

    def __init__(self, folder: Path):
        """Opens the journal; `begin` has to be called before `append`.

        Args:
          folder: its folder; it is created if it does not exist.
        """
        self._folder = folder
        # The descriptor of the segment that is written, and its length; -1 if there is none.
        self._file, self._length = -1, 0
        folder.mkdir(exist_ok=True)
        sync(folder.parent)

    @property
    def numbers(self) -> list[int]:
        """The numbers of the segments, ascending."""
        names = (_SEGMENT.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def read(self, after: int) -> list[Command]:
        """The commands that were carried out after a checkpoint.

        Args:
          after: number of the checkpoint; 0 for all commands from the beginning.

        Raises:
          RunDirectoryError: a line is damaged, so commands are lost.
        """
        return [
            command
            for number in self.numbers
            if number >= after
            for command in _commands(self._path(number))
        ]

    def begin(self, number: int) -> None:
        """Begins a segment, or goes on with it: the next commands come after the checkpoint of this
        number.

        Args:
          number: number of the checkpoint, not smaller than that of any segment.

        Raises:
          OSError: the segment cannot be created. The one before it goes on.
        """
        path = self._path(number)
        length = _complete_length(path.read_bytes()) if path.exists() else 0
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            os.ftruncate(file, length)
            sync(self._folder)
        except OSError:
            os.close(file)
            raise
        self.close()
        self._file, self._length = file, length

    def append(self, commands: Sequence[Command]) -> None:
        """Returns when commands are on disk.

        Args:
          commands: the commands, in their order.

        Raises:
          OSError: they cannot be written, and will not be read.
        """
        lines = b"".join(map(_line, commands))
        try:
            if self._file < 0:
                raise OSError(errno.EIO, "not writable since an earlier error")
            written = 0
            while written < len(lines):
                written += os.pwrite(self._file, lines[written:], self._length + written)
            os.fsync(self._file)
        except OSError as e:
            self._go_back()
            raise OSError(e.errno, e.strerror, str(self._folder)) from None
        self._length += len(lines)

    def forget(self, before: int) -> None:
        """Deletes the segments that no checkpoint needs any more.

        Args:
          before: number of the oldest checkpoint.
        """
        for number in self.numbers:
            if number < before:
                self._path(number).unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _go_back(self) -> None:
        """Removes what was written in vain. If that fails too, nothing more is written, because a
        damaged line would be followed by others."""
        try:
            os.ftruncate(self._file, self._length)
            os.fsync(self._file)
        except OSError:
            self.close()

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.jsonl"


def _line(command: Command) -> bytes:
    fields: dict[str, Any] = {"kind": command.kind, "task": command.task, "time": command.time}
    if command.kind == "register":
        task, priority, files = command.value
        fields |= {"specification": to_json(task), "priority": priority, "files": dict(files)}
    elif command.kind == "end":
        history, progress, steps, warnings = command.value
        fields["value"] = {
            "history": [change._asdict() for change in history],
            "progress": progress and progress.to_json(),
            "steps": steps,
            "warnings": warnings,
        }
    elif command.value is not None:
        fields["value"] = command.value
    if command.at:
        fields["at"] = {"step": command.at.step, "meter": dataclasses.asdict(command.at.meter)}
    text = json.dumps(fields)
    return f'{{"checksum": {zlib.crc32(text.encode())}, "command": {text}}}\n'.encode()


def _commands(path: Path) -> list[Command]:
    """The commands of a segment."""
    content = path.read_bytes()
    content = content[: _complete_length(content)]
    return [_command(path, i, line) for i, line in enumerate(content.split(b"\n")[:-1], 1)]


def _command(path: Path, number: int, line: bytes) -> Command:
    try:
        found = json.loads(line)
        fields = found["command"]
        if zlib.crc32(json.dumps(fields).encode()) != found["checksum"]:
            raise ValueError("its checksum differs")
        value = fields.get("value")
        if fields["kind"] == "register":
            # Older journals know nothing of files.
            files = fields.get("files", {})
            value = from_json(fields["specification"]), fields["priority"], files
        elif fields["kind"] == "end":
            value = _end(value)
        at = fields.get("at")
        at = at and At(at["step"], Meter(**at["meter"]))
        return Command(fields["kind"], fields["task"], value, fields["time"], at)
    except (ValueError, KeyError, TypeError) as e:
        raise RunDirectoryError(
            f"{path}, line {number}: damaged ({e}), so commands are lost; restore the file from a "
            "backup, or delete it and the later ones to go on without their commands"
        ) from None


def _end(fields: dict[str, Any]) -> End:
    return End(
        tuple(StateChange.of(change) for change in fields["history"]),
        fields["progress"] and TaskProgress.from_json(fields["progress"]),
        fields["steps"],
        # Older journals know nothing of warnings.
        tuple(fields.get("warnings", ())),
    )


def _complete_length(content: bytes) -> int:
    """The length of the lines that end."""
    return content.rfind(b"\n") + 1
