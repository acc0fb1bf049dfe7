"""The folder of a training run: the paths of its files, and the record of what it trains."""

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

# The format of run.json. Files of older versions have no format number.
FORMAT = 2
# `restart` deletes only these files, which a training run writes.
_OWN = ("run.json", "config.gin", "metrics.jsonl", "checkpoints", "adapters", "summary.json")
_OWN += ("loss.png", "tensorboard")


class RunDirectoryError(ValueError):
    """The folder of a training run (`run_dir`) cannot be used. The message names it and says what
    to do."""


class RunDirectory:
    """The folder of a training run: the paths of its files, and the record of what it trains. It is
    locked against other processes until `close`.

    Attributes:
      path: absolute path of the folder.
      metrics: path of metrics.jsonl, one line for each task and round (one global batch of every
        task).
      summary: path of summary.json.
      loss_plot: path of loss.png.
      tensorboard: path of the folder of TensorBoard's files.
      checkpoints: path of the folder of the checkpoints.
    """

    def __init__(self, path: str | Path, identity: dict[str, Any], *, restart: bool = False):
        """Creates or opens the folder and locks it. No file besides the lock is written before
        `begin`.

        Args:
          path: the folder.
          identity: description of what is trained, as a JSON object; `begin` writes it to run.json.
            A folder whose run.json records another identity is refused.
          restart: True also accepts a folder of another training run; `begin` then deletes the
            files of that training run.

        Raises:
          RunDirectoryError: the folder is not writable or another process uses it. Without
            `restart` also: it belongs to another training run, has a damaged run.json, or holds
            files of a training run without run.json.
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
        """Path of the folder to which a task's adapter is exported.

        Args:
          task: name of the task.
        """
        return self.path / "adapters" / task

    def begin(self, config_text: str | None) -> None:
        """Writes run.json and config.gin. Call it once all inputs have been checked: with
        `restart`, it first deletes the files of an earlier training run.

        Args:
          config_text: text of config.gin; None writes no such file.
        """
        if self._restart:
            self._clear()
        write_atomically(self.path / "run.json", json.dumps(self._identity, indent=2) + "\n")
        if config_text is not None:
            write_atomically(self.path / "config.gin", config_text)

    def close(self) -> None:
        """Releases the lock of the folder."""
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
    """Reads run.json, the record of what a training run trains.

    Args:
      path: the run directory.

    Returns:
      A dict with format (the version of the record), backbone (path), dtype, tokens_per_microbatch,
      row_len, chunk_len, and tasks: by name, the fields of the `Task` except name and
      sample_prompt.

    Raises:
      RunDirectoryError: the folder has no run.json, or run.json is damaged or has a format that
        this version of jaxmux does not read.
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
    """Writes a file so that readers find it complete or not at all, even after a crash.

    Args:
      path: the file.
      text: its new content.
    """
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _differences(found: Any, wanted: Any, path: str = "") -> list[str]:
    """The first three keys that differ, for example `tasks.a.adapter.rank: 8 there, 16 here`."""
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
