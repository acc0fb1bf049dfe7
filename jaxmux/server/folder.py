"""The folder of a tuning server: the paths of its files, and the record of what it serves."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxmux.atomic_files import write_atomically
from jaxmux.models import may_be_the_same
from jaxmux.runs.metrics import SET_ASIDE
from jaxmux.runs.run_directory import FolderLock, FolderLockError, RunDirectoryError

# The format of the folder, and the last version of jaxmux that wrote the previous format.
FORMAT, _LAST_VERSION = 2, "0.1.0"
# The key in server.json of the sizes with which tasks are trained.
_SIZES = "sizes"
# The file of the database; SQLite keeps two more files beside it.
DATABASE = "server.db"
# Files that a server writes, by name; True marks a folder.
_OWN = {
    "server.json": False,
    "events.jsonl": False,
    "rounds.jsonl": False,
    DATABASE: False,
    f"{DATABASE}-wal": False,
    f"{DATABASE}-shm": False,
    "checkpoints": True,
    "adapters": True,
    "inputs": True,
    "watched.json": False,
    "refused.json": False,
    "config.gin": False,
    "tensorboard": True,
    "wandb": True,
    "trackers.json": False,
}


class ServerDirectory:
    """The folder of a server, locked against other processes until `close`. The folder may be a
    symbolic link, but nothing in it may be one: jaxmux does not write through links."""

    def __init__(self, path: str | Path, identity: dict[str, Any]):
        """Creates or opens the folder, and locks it. `identity` describes what is served, as a JSON
        object; a folder with another recorded identity is refused. Raises RunDirectoryError if the
        folder is not writable, another process uses it, it belongs to another server, it holds
        links, or it holds files but no server.json."""
        self.path = Path(path).absolute()
        self.checkpoints = self.path / "checkpoints"
        self.database = self.path / DATABASE
        self.events = self.path / "events.jsonl"
        self.rounds = self.path / "rounds.jsonl"
        try:
            self._lock = FolderLock(self.path)
        except FolderLockError as e:
            raise self._error(str(e)) from None
        try:
            self._open({"format": FORMAT, **identity})
        except BaseException:
            self._lock.close(remove=True, unused=True)
            raise

    def adapter(self, task: str) -> Path:
        """Path of the folder to which a task's adapter is exported."""
        return self.path / "adapters" / task

    def record_sizes(self, sizes: Mapping[str, Any], say: Callable[[str], None]) -> None:
        """Records the sizes with which tasks are trained, by name, as a JSON object. If they differ
        from the recorded sizes, `say` prints that the results of tasks that have already begun are
        no longer exactly reproducible. Raises RunDirectoryError if server.json is damaged."""
        path = self.path / "server.json"
        record = self._read(path)
        # A server that ended early has recorded no sizes.
        before = record.get(_SIZES, {})
        if before == sizes:
            return
        changed = [
            f"{name} was {_shown(value)} and is {_shown(sizes.get(name))}"
            for name, value in before.items()
            if value != sizes.get(name)
        ]
        if changed:
            say(
                f"server folder {self.path}: {', '.join(changed)}; tasks that have begun go on, "
                "but their adapters may differ by rounding from what they would have been, and "
                "those that do not fit any more are paused"
            )
        try:
            write_atomically(path, json.dumps(record | {_SIZES: dict(sizes)}, indent=2) + "\n")
        except OSError as e:
            say(f"{path}: its sizes cannot be recorded ({e.strerror}); training goes on")

    def close(self, error: BaseException | None = None) -> None:
        """Releases the lock of the folder. If an `error` ends the server, the lock file records
        this error."""
        self._lock.close(error=error)

    def __enter__(self) -> "ServerDirectory":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def _open(self, identity: dict[str, Any]) -> None:
        present = os.listdir(self.path)
        found = [name for name in present if name in _OWN or SET_ASIDE.fullmatch(name)]
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
        recorded = self._read(record)
        if recorded.get("format") == 1:
            raise self._error(
                f"jaxmux {_LAST_VERSION} or an earlier version has written it; finish its tasks "
                "with that version, or choose another folder"
            )
        missing = [key for key in identity if key not in recorded]
        if missing:
            raise self._damaged(f"it has no {missing[0]}")
        different = [key for key in identity if recorded[key] != identity[key]]
        known, present = str(recorded["fingerprint"]), identity["fingerprint"]
        if different == ["fingerprint"] and may_be_the_same(known, present):
            # From now on, a changed backbone is noticed.
            write_atomically(record, json.dumps(recorded | identity, indent=2) + "\n")
        elif different:
            key = different[0]
            raise self._error(
                f"belongs to another server ({key}: {recorded[key]!r} there, {identity[key]!r} "
                "here); choose another folder"
            )

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            recorded = json.loads(path.read_text())
        except (OSError, ValueError) as e:
            raise self._damaged(repr(e)) from None
        if not isinstance(recorded, dict) or not isinstance(recorded.get(_SIZES, {}), dict):
            raise self._damaged("it should hold objects")
        return recorded

    def _damaged(self, why: str) -> RunDirectoryError:
        return self._error(f"server.json is damaged ({why}); restore it")

    def _error(self, message: str) -> RunDirectoryError:
        return RunDirectoryError(f"server folder {self.path}: {message}")


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "nothing"
    return "not recorded" if value is None else str(value)
