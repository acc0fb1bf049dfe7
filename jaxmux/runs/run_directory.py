"""The folder of a run: where its files lie, and whose it is."""

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

# Of run.json. Older versions had no number.
FORMAT = 2
# What `restart` may delete: the files that a run writes, nothing else.
_OWN = ("run.json", "config.gin", "metrics.jsonl", "checkpoints", "adapters", "summary.json")
_OWN += ("loss.png", "tensorboard")


class RunDirectoryError(ValueError):
    """The run directory cannot be used; the message names it and what to do."""


class RunDirectory:
    """A run's folder, locked against a second process for as long as the object lives.

    Attributes:
      metrics, summary, loss_plot, tensorboard, checkpoints: paths in it.
    """

    def __init__(self, path: str | Path, identity: dict[str, Any], *, restart: bool = False):
        """Makes or opens the folder; `begin` makes it this run's.

        Args:
          identity: what is trained, as JSON. A folder of another identity is refused.
          restart: deletes the files of an earlier run first.

        Raises:
          RunDirectoryError: not writable, in use, of another run, or full of somebody else's files.
        """
        self.path = Path(path).absolute()
        self.metrics = self.path / "metrics.jsonl"
        self.summary = self.path / "summary.json"
        self.loss_plot = self.path / "loss.png"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "w")
        except OSError as e:
            raise RunDirectoryError(
                f"run directory {self.path}: not writable ({e.strerror})"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise RunDirectoryError(
                f"run directory {self.path}: in use by another process"
            ) from None
        self._identity, self._restart = json.loads(json.dumps(identity)), restart
        if not restart:
            try:
                self._refuse_others()
            except RunDirectoryError:
                self.close()
                raise

    def adapter(self, task: str) -> Path:
        return self.path / "adapters" / task

    def begin(self, config_text: str | None) -> None:
        """Records whose folder this is, once everything has been checked and training starts."""
        if self._restart:
            self._clear()
        write_atomically(self.path / "run.json", json.dumps(self._identity, indent=2) + "\n")
        if config_text is not None:
            write_atomically(self.path / "config.gin", config_text)

    def close(self) -> None:
        """Gives up the lock."""
        self._lock.close()

    def _refuse_others(self) -> None:
        if (self.path / "run.json").exists():
            if differences := _differences(read_identity(self.path), self._identity):
                raise RunDirectoryError(
                    f"run directory {self.path}: belongs to another config "
                    f"({'; '.join(differences)}). Choose another run_dir, or begin anew with "
                    "restart"
                )
        elif strangers := sorted(p.name for p in self.path.iterdir() if p.name in _OWN):
            raise RunDirectoryError(
                f"run directory {self.path}: holds {', '.join(strangers)} but no run.json; "
                "choose another run_dir, or begin anew with restart"
            )

    def _clear(self) -> None:
        for name in _OWN:
            path = self.path / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def read_identity(path: Path) -> dict[str, Any]:
    """What the run in a folder trains, as `fine_tune` recorded it.

    Raises:
      RunDirectoryError: the folder is no run's, its record is damaged or has another format.
    """
    try:
        identity = json.loads((path / "run.json").read_text())
    except OSError:
        raise RunDirectoryError(f"{path}: no run directory (it has no run.json)") from None
    except json.JSONDecodeError as e:
        raise RunDirectoryError(f"{path / 'run.json'}: damaged ({e})") from None
    found = identity.get("format", 1) if isinstance(identity, dict) else None
    if found != FORMAT:
        raise RunDirectoryError(
            f"{path / 'run.json'}: has format {found}, this version of jaxmux reads format "
            f"{FORMAT}; finish the run with the version that began it, or begin anew with restart"
        )
    return identity


def write_atomically(path: Path, text: str) -> None:
    """Writes a file that a reader finds whole or not at all, also after a crash."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _differences(found: Any, wanted: Any, path: str = "") -> list[str]:
    """Which keys differ, at most three of them, as `tasks.a.adapter.rank: 8 there, 16 here`."""
    if not (isinstance(found, dict) and isinstance(wanted, dict)):
        return [] if found == wanted else [f"{path}: {found!r} there, {wanted!r} here"]
    differences = []
    for key in [*wanted, *(k for k in found if k not in wanted)]:
        below = f"{path}.{key}" if path else key
        if key not in found or key not in wanted:
            differences.append(f"{below}: only {'here' if key in wanted else 'there'}")
        else:
            differences += _differences(found[key], wanted[key], below)
    return differences[:3]
