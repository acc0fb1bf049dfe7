"""The folder of a tuning server: the paths of its files, and the record of what it serves."""

import json
import os
from pathlib import Path
from typing import Any

from jaxmux.atomic_files import write_atomically

from .event_log import EVENTS_SET_ASIDE
from .folder_lock import FolderLock, FolderLockError
from .run_directory import RunDirectoryError

# The format of server.json.
FORMAT = 1
# What a server writes: by name, True for a folder.
_OWN = {
    "server.json": False,
    "events.jsonl": False,
    "journal": True,
    "checkpoints": True,
    "adapters": True,
    "specifications": True,
    "inputs": True,
    "watched.json": False,
    "config.gin": False,
}


class ServerDirectory:
    """The folder of a server, locked against other processes until `close`.

    The folder may be a symbolic link, but nothing in it is: jaxmux does not write through links.

    Attributes:
      path: absolute path of the folder.
      checkpoints: path of the folder of the checkpoints.
      journal: path of the folder of the commands since then.
      events: path of events.jsonl.
    """

    def __init__(self, path: str | Path, identity: dict[str, Any]):
        """Creates or opens the folder, and locks it.

        Args:
          path: the folder.
          identity: description of what is served, as a JSON object. A folder that records another
            one is refused.

        Raises:
          RunDirectoryError: the folder is not writable, another process uses it, it belongs to
            another server, it holds links, or it holds files but no server.json.
        """
        self.path = Path(path).absolute()
        self.checkpoints = self.path / "checkpoints"
        self.journal = self.path / "journal"
        self.events = self.path / "events.jsonl"
        try:
            self._lock = FolderLock(self.path)
        except FolderLockError as e:
            raise self._error(str(e)) from None
        try:
            self._open({"format": FORMAT, **identity})
        except BaseException:
            self._lock.close(remove=True)
            raise

    def adapter(self, task: str) -> Path:
        """Path of the folder to which a task's adapter is exported.

        Args:
          task: name of the task.
        """
        return self.path / "adapters" / task

    def close(self) -> None:
        """Releases the lock of the folder."""
        self._lock.close()

    def _open(self, identity: dict[str, Any]) -> None:
        present = os.listdir(self.path)
        found = [name for name in present if name in _OWN or EVENTS_SET_ASIDE.fullmatch(name)]
        for name in found:
            path, is_folder = self.path / name, _OWN.get(name, False)
            if path.is_symlink() or path.is_dir() != is_folder:
                kind = "folder" if is_folder else "file"
                raise self._error(f"{name} should be a {kind} and no link; move it away")
        record = self.path / "server.json"
        if "server.json" in found:
            self._refuse_other(record, identity)
        elif others := sorted(set(present) - {".lock", ".server.json.partial"}):
            raise self._error(
                f"holds {', '.join(others[:3])} but no server.json, so it may be somebody else's; "
                "choose another folder"
            )
        else:
            try:
                write_atomically(record, json.dumps(identity, indent=2) + "\n")
            except OSError as e:
                raise self._error(f"{e.filename or record}: {e.strerror}") from None

    def _refuse_other(self, record: Path, identity: dict[str, Any]) -> None:
        try:
            recorded = json.loads(record.read_text())
            different = [key for key in identity if recorded[key] != identity[key]]
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise self._error(f"server.json is damaged ({e!r}); restore it") from None
        if different:
            key = different[0]
            raise self._error(
                f"belongs to another server ({key}: {recorded[key]!r} there, {identity[key]!r} "
                "here); choose another folder"
            )

    def _error(self, message: str) -> RunDirectoryError:
        return RunDirectoryError(f"server folder {self.path}: {message}")
