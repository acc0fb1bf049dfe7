"""The folder of a training run: the paths of its files, and the record of what it trains."""

import dataclasses
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxmux.atomic_files import write_atomically
from jaxmux.data import Rendering
from jaxmux.errors import LONGEST_LINE, InputError, cause_of, first_line, message_of
from jaxmux.models import may_be_the_same
from jaxmux.objectives import LOSS, SFT
from jaxmux.planner.devices import Deployment
from jaxmux.planner.packing import ShapeClass
from jaxmux.printable import spaced
from jaxmux.tasks import TASK_NAME

_NAME = ".lock"
# At most this many attempts to create a folder that other processes remove at the same time.
_ATTEMPTS = 10
# Number of attempts to take the lock, and seconds between two attempts; `lock_state` may hold the
# lock for a moment.
_TRIES, _SECONDS_A_TRY = 5, 0.005
# If an exception ended the process, its lock file holds this prefix and the exception's message.
_FAILED = "failed: "


class FolderLockError(Exception):
    """A folder cannot be created or locked; the message gives the reason."""


class FolderLock:
    """Locks a folder against other processes until `close`, by a lock on its file ".lock".

    Until `close`, the file contains the process id, which remains if the process is killed. After
    `close`, it contains the exception that ended the process, or nothing. `created` is True if the
    folder did not exist before.
    """

    def __init__(self, folder: Path):
        """Opens a folder, or creates it with its parents, and locks it. Raises FolderLockError if
        the folder is not writable, another process holds it, or its file system has no locks."""
        self.created = False
        self._folder = folder
        for _ in range(_ATTEMPTS):
            try:
                self._open()
            except FileNotFoundError as e:
                # The folder may have been removed by another process that had created it but not
                # used it.
                reason = e.strerror
                continue
            except OSError as e:
                raise FolderLockError(f"not writable ({e.strerror})") from None
            self._lock()
            if self._is_in_folder():
                self._before = self._file.read()
                self._write(f"{os.getpid()}\n")
                return
            self._file.close()
            reason = "another process creates and removes it"
        raise FolderLockError(f"not writable ({reason})")

    def close(
        self, *, remove: bool = False, unused: bool = False, error: BaseException | None = None
    ) -> None:
        """Releases the folder.

        Args:
          remove: whether to remove a folder that this lock created, if it holds nothing else.
          unused: whether to restore the earlier contents of the lock file, because this process did
            not use the folder.
          error: the exception that ends the process. Only subclasses of Exception are recorded;
            signals are not.
        """
        # The folder is still locked here, so no other process starts to use it.
        with suppress(OSError):  # A file may have come into the folder, or the folder is gone.
            if remove and self.created and os.listdir(self._folder) == [_NAME]:
                (self._folder / _NAME).unlink()
                self._folder.rmdir()
        failure = f"{_FAILED}{_message(error)}\n" if isinstance(error, Exception) else ""
        self._write(self._before if unused else failure)
        self._file.close()

    def _write(self, text: str) -> None:
        """Replaces the contents of the lock file. Only people and `lock_state` read them, so errors
        such as a full disk are ignored."""
        with suppress(OSError, ValueError):  # ValueError: the file was closed before.
            os.ftruncate(self._file.fileno(), 0)
            os.pwrite(self._file.fileno(), text.encode(), 0)

    def _open(self) -> None:
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._folder.mkdir()
            self.created = True
        except FileExistsError:
            self.created = False
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        self._file = open(os.open(self._folder / _NAME, flags, 0o666), "r+", errors="replace")

    def _lock(self) -> None:
        for left in reversed(range(_TRIES)):
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if left:
                    time.sleep(_SECONDS_A_TRY)
            except OSError as e:
                self._file.close()
                raise FolderLockError(
                    f"its file system cannot lock files ({e.strerror}); choose one that can"
                ) from None
        self._file.close()
        raise FolderLockError("in use by another process")

    def _is_in_folder(self) -> bool:
        """Whether the locked file is the one that other processes see in the folder."""
        try:
            in_folder = (self._folder / _NAME).stat()
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(self._file.fileno()), in_folder)


class LockState(NamedTuple):
    """State of the process that holds or last held a folder, according to the folder's lock.

    Attributes:
      holder: "alive" (a process holds the folder), "ended" (the process released it), "failed" (the
        process released it because of an exception), "killed" (the process ended without releasing
        it), or "unknown" (there is no lock, or it cannot be read).
      since: time at which the process took or released the folder, in seconds since 1970; 0 if
        unknown.
      failure: the first line of the exception's message; None unless the process failed.
    """

    holder: Literal["alive", "ended", "failed", "killed", "unknown"]
    since: float
    failure: str | None = None

    def __str__(self) -> str:
        """The state of a training process in words; empty if the process ended normally or its
        state is unknown."""
        ends = {
            "alive": "its training process is running",
            "failed": f"its training process failed: {self.failure}",
            "killed": "its training process was killed",
        }
        return ends.get(self.holder, "")


def lock_state(folder: Path) -> LockState:
    """Reads the lock of a folder that another process may hold."""
    try:
        file = os.open(folder / _NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return LockState("unknown", 0.0)
    try:
        changed = os.fstat(file).st_mtime
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return LockState("alive", changed)
        text = os.read(file, 4 * LONGEST_LINE).decode(errors="replace")
        if text.startswith(_FAILED):
            return LockState("failed", changed, text.removeprefix(_FAILED).rstrip("\n"))
        return LockState("killed" if text else "ended", changed)
    except OSError:
        return LockState("unknown", 0.0)
    finally:
        os.close(file)


def _message(error: Exception) -> str:
    """The first line of the message shown for an exception."""
    error = cause_of(error)
    message = message_of(error) or f"{type(error).__name__}: {first_line(error)}"
    return spaced((message.splitlines() or [""])[0][:LONGEST_LINE])


# The format of run.json. Files of older versions have no format number.
FORMAT = 3
# Files that a training run writes, by name; True marks a folder. `restart` deletes only these, in
# this order: run.json comes last, because it proves that jaxmux wrote the other files.
_OWN = {
    "summary.json": False,
    "config.gin": False,
    "metrics.jsonl": False,
    "held_out.jsonl": False,
    "rounds.jsonl": False,
    "samples.jsonl": False,
    "start.json": False,
    "tasks.json": False,
    "loss.png": False,
    "sweep.json": False,
    "sweep.png": False,
    "checkpoints": True,
    "adapters": True,
    "tensorboard": True,
    "wandb": True,
    "trackers.json": False,
    "run.json": False,
}
# Keys of a task's length. The length may grow; a finished run is then extended.
_LENGTH = re.compile(r"tasks\..+\.(steps|epochs)")
# Settings of tasks that earlier versions did not record, with the values that tasks had then.
_LATER_SETTINGS = {"objective": {"kind": SFT.kind}, "best_metric": LOSS}


class RunDirectoryError(InputError):
    """The folder of a training run (`run_dir`) cannot be used. The message names the folder and
    says what to do."""


class RecordedShapes(NamedTuple):
    """The shape classes of a training run, which stay the same when the run continues.

    Attributes:
      single: the shape class on every single replica: the one with which the run began or, if it
        began on several replicas, the one with the longest rows.
      several: for each deployment of several replicas ("pp2,tp1 + pp1,tp1"), the shape class of
        each replica.
    """

    single: ShapeClass
    several: dict[str, tuple[ShapeClass, ...]]

    def of(self, deployment: Deployment) -> tuple[ShapeClass, ...] | None:
        """The shape class of each replica of a deployment; None if none is recorded."""
        if len(deployment.replicas) == 1:
            return (self.single,)
        return self.several.get(str(deployment))

    def to_json(self) -> dict[str, Any]:
        several = {n: [dataclasses.asdict(s) for s in each] for n, each in self.several.items()}
        return {"shape": dataclasses.asdict(self.single), "replica_shapes": several}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "RecordedShapes":
        """The inverse of `to_json`. The entry "replica_shapes" may be missing."""
        several = record.get("replica_shapes", {})
        shapes = {n: tuple(ShapeClass(**fields) for fields in each) for n, each in several.items()}
        return cls(ShapeClass(**record["shape"]), shapes)


class RunDirectory:
    """The folder of a training run: the paths of its files, and the record of what the run trains.
    The folder is locked against other processes until `close`.

    The folder may be a symbolic link, but nothing in it may be one: jaxmux neither writes through
    links nor deletes what they point to.

    Attributes:
      path: absolute path of the folder.
      metrics: path of metrics.jsonl, one line for each task and round (one global batch of every
        task).
      held_out: path of held_out.jsonl, one line for each held-out loss that was measured.
      rounds: path of rounds.jsonl, one line for each round.
      samples: path of samples.jsonl, one line for each completion of a task's `sample_prompt`.
      start: path of start.json, which tells how the last start spent the time before its first
        round.
      ended: path of tasks.json, the tasks that have ended while others still train.
      sweep_results: path of sweep.json.
      shapes: the shape classes with which the recorded training run began; None for a new run.
      begun: time at which the training run began, in local time without a zone. Chat templates that
        write the date use this time, also when the run is continued later.
      extended: whether a task shall train longer than in the recorded training run.
      replaced: names of the tasks whose files `begin` deletes because of `restart`.
      failure: first line of the exception that ended the previous process; None if there was none.
    """

    def __init__(self, path: str | Path, identity: dict[str, Any], *, restart: bool = False):
        """Creates or opens the folder and locks it. Before `begin`, only the lock is written. If
        `begin` is not called, `close` removes a folder that was created here.

        Args:
          identity: description of what is trained, as a JSON object. A folder with another recorded
            identity is refused, unless only `steps` or `epochs` of tasks are larger now.
          restart: whether another identity is accepted and `begin` deletes the files of the earlier
            training run.

        Raises:
          RunDirectoryError: the folder is not writable, another process uses it, it belongs to
            another training run, it holds links, or it holds files of a training run without
            run.json.
        """
        self.path = Path(path).absolute()
        self.metrics = self.path / "metrics.jsonl"
        self.held_out = self.path / "held_out.jsonl"
        self.rounds = self.path / "rounds.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.start = self.path / "start.json"
        self.ended = self.path / "tasks.json"
        self.summary = self.path / "summary.json"
        self.loss_plot = self.path / "loss.png"
        self.sweep_results = self.path / "sweep.json"
        self.sweep_plot = self.path / "sweep.png"
        self.checkpoints = self.path / "checkpoints"
        self.shapes: RecordedShapes | None = None
        self.begun = datetime.now().replace(microsecond=0)
        self.extended = False
        self.replaced: tuple[str, ...] = ()
        self._identity, self._restart = json.loads(json.dumps(identity)), restart
        self._recorded: dict[str, Any] | None = None
        self._begun = False
        self.failure = lock_state(self.path).failure
        try:
            self._lock = FolderLock(self.path)
        except FolderLockError as e:
            raise self._error(str(e)) from None
        try:
            self._open()
        except RunDirectoryError:
            self._lock.close(remove=True, unused=True)
            raise

    def adapter(self, task: str) -> Path:
        """Path of the folder to which a task's adapter is exported."""
        return self.path / "adapters" / task

    def refuse_changes(self, fingerprints: Mapping[str, str]) -> None:
        """Raises RunDirectoryError if the backbone or the data differ from those with which the
        training run began. `fingerprints` has hashes of the backbone and of the data, including
        held-out data, by name ("backbone", "data of task 'a'")."""
        recorded = {} if self._recorded is None else self._recorded["fingerprints"]
        changed = [
            what
            for what, fingerprint in fingerprints.items()
            if not may_be_the_same(recorded.get(what, fingerprint), fingerprint)
        ]
        if changed:
            raise self._error(
                f"the {' and the '.join(changed)} changed since the run began; restore what it "
                "began with, choose another run_dir, or begin anew with --restart"
            )

    def begin(
        self,
        fingerprints: Mapping[str, str],
        shapes: RecordedShapes,
        config_text: str | None,
        samples: Mapping[str, Mapping[str, int]],
        rendering: Mapping[str, Rendering],
    ) -> None:
        """Writes run.json and config.gin. Call it after everything has been checked.

        Args:
          fingerprints: as for `refuse_changes`.
          config_text: text of config.gin; None writes no such file.
          samples: by task, the number of "training" and of "held_out" samples or pairs.
          rendering: by task, how the records of its training data became text.

        Raises:
          RunDirectoryError: a file cannot be written.
        """
        entries = {
            "begun": self.begun.isoformat(),
            "fingerprints": dict(fingerprints),
            "samples": samples,
            "rendering": {name: rules._asdict() for name, rules in rendering.items()},
        }
        record = self._identity | entries | shapes.to_json()
        self._begun = True
        try:
            if self._restart:
                self._clear()
            if self.extended:
                # This is the summary of the shorter training run.
                self.summary.unlink(missing_ok=True)
            write_atomically(self.path / "run.json", json.dumps(record, indent=2) + "\n")
            if config_text is not None:
                write_atomically(self.path / "config.gin", config_text)
        except OSError as e:
            raise self._error(f"{e.filename or self.path}: {e.strerror}") from None

    @property
    def goes_on(self) -> bool:
        """Whether an earlier call has left files of checkpoints. The training run continues if one
        of them is complete."""
        folder = self.checkpoints
        return not self._restart and folder.is_dir() and any(folder.iterdir())

    def close(self, error: BaseException | None = None) -> None:
        """Releases the lock of the folder. Removes the folder if it was created here and `begin`
        was not called. The lock file then records `error`, which ends the training run."""
        self._lock.close(remove=not self._begun, error=error)

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def _error(self, message: str) -> RunDirectoryError:
        return RunDirectoryError(f"run directory {self.path}: {message}")

    def _open(self) -> None:
        present = {name for name in _OWN if os.path.lexists(self.path / name)}
        if present and "run.json" not in present:
            raise self._error(
                f"holds {', '.join(sorted(present))} but no run.json, so they may be somebody "
                "else's; move them away, or choose another run_dir"
            )
        self._refuse_links(present)
        if not present:
            return
        if self._restart:
            self.replaced = tuple(_read_ours(self.path)["tasks"])
        else:
            self._recorded = read_record(self.path)
            self.shapes = RecordedShapes.from_json(self._recorded)
            self.begun = begun_of(self._recorded) or self.begun
            self._refuse_other_identity()

    def _refuse_links(self, names: set[str]) -> None:
        adapters = [self.adapter(name) for name in self._identity["tasks"]]
        below = [path for path in adapters if os.path.lexists(path)]
        for path in (*(self.path / name for name in names), *below):
            name = path.relative_to(self.path)
            if path.is_symlink():
                raise self._error(
                    f"{name} is a symbolic link; remove the link, or choose another run_dir"
                )
            if path.is_dir() != _OWN.get(str(name), True):
                kinds = ("folder", "file") if path.is_dir() else ("file", "folder")
                raise self._error(
                    f"{name} is a {kinds[0]}, but should be a {kinds[1]}; move it away"
                )

    def _refuse_other_identity(self) -> None:
        recorded = {key: self._recorded.get(key) for key in self._identity}
        tasks = recorded["tasks"].items()
        recorded["tasks"] = {name: _LATER_SETTINGS | settings for name, settings in tasks}
        differences = []
        for key, there, wanted in _differences(recorded, self._identity):
            longer = isinstance(there, int) and isinstance(wanted, int) and wanted > there
            if longer and _LENGTH.fullmatch(key):
                self.extended = True
            elif there is _ABSENT and (wanted is None or wanted is False or wanted == {}):
                # The setting is newer than the record, and the task does not use it.
                continue
            elif _ABSENT in (there, wanted):
                differences.append(f"{key}: only {'here' if there is _ABSENT else 'there'}")
            else:
                differences.append(f"{key}: {there!r} there, {wanted!r} here")
        if differences:
            raise self._error(
                f"belongs to another config ({'; '.join(differences[:3])}). Choose another "
                "run_dir, or begin anew with --restart"
            )

    def _clear(self) -> None:
        for name, is_folder in _OWN.items():
            path = self.path / name
            if is_folder and path.exists():
                shutil.rmtree(path)
            elif not is_folder:
                path.unlink(missing_ok=True)


def begun_of(record: Mapping[str, Any]) -> datetime | None:
    """Time at which the training run of a record (from `read_record`) began, in local time; None in
    older records."""
    return datetime.fromisoformat(record["begun"]) if "begun" in record else None


def read_record(path: Path) -> dict[str, Any]:
    """Reads run.json, the record of what a training run trains.

    Returns:
      A dict with format, backbone (path), dtype, tokens_per_microbatch, row_len, chunk_len,
      fingerprints (hashes of the backbone and the data), shape and replica_shapes (from
      `RecordedShapes.to_json`), begun (the time), samples (by task, the numbers of "training" and
      "held_out" samples), rendering (by task, the fields of `Rendering`), and tasks (by name, the
      fields of the `Task` except name and sample_prompt). Older records lack begun, samples and
      rendering.

    Raises:
      RunDirectoryError: the folder has no run.json, or run.json is damaged or has a format that
        this version of jaxmux does not read.
    """
    record = _read_ours(path)
    if (version := record.get("format", 1)) != FORMAT:
        raise RunDirectoryError(
            f"{path / 'run.json'}: has format {version}, this version of jaxmux reads format "
            f"{FORMAT}; finish the run with the version that began it, or begin anew with --restart"
        )
    try:
        RecordedShapes.from_json(record)
        begun_of(record)
        counts, rendering = record.get("samples", {}), record.get("rendering", {})
        dicts = (record["fingerprints"], counts, *counts.values(), rendering, *rendering.values())
        valid = all(isinstance(entry, dict) for entry in dicts) and all(
            re.fullmatch(TASK_NAME, name) and isinstance(task["adapter"]["kind"], str)
            for name, task in record["tasks"].items()
        )
    except (KeyError, TypeError, AttributeError, ValueError):
        valid = False
    if not valid:
        raise RunDirectoryError(
            f"{path / 'run.json'}: damaged (an entry is missing or has the wrong form); restore "
            "it, or choose another run_dir"
        )
    return record


def _read_ours(path: Path) -> dict[str, Any]:
    """The content of run.json in any format. Raises RunDirectoryError if jaxmux did not write the
    file."""
    file = path / "run.json"
    try:
        record = json.loads(file.read_text())
        if not isinstance(record, dict) or not isinstance(record["tasks"], dict):
            raise ValueError("it should be an object with an entry 'tasks'")
    except OSError:
        if not path.is_dir():
            why = "no such folder"
        elif (path / "server.json").exists():
            why = f"it is a server's folder; its adapters are the folders {path / 'adapters' / '*'}"
        else:
            why = "nothing was trained in it (it has no run.json)"
        raise RunDirectoryError(f"run directory {path}: {why}") from None
    except (ValueError, KeyError) as e:
        raise RunDirectoryError(
            f"{file}: damaged ({e}), so it does not prove that the files beside it are those of a "
            "training run; restore it, or choose another run_dir"
        ) from None
    return record


def without_adapter(path: Path) -> RunDirectoryError:
    """The error that a run directory has no adapter yet, with the state of its training process."""
    ends = str(lock_state(path))
    return RunDirectoryError(f"{path}: has no adapter yet" + (ends and f"; {ends}"))


_ABSENT = object()


def _differences(recorded: Any, wanted: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """The keys that differ ("tasks.a.adapter.rank"), each with both values; `_ABSENT` marks a
    missing key."""
    if not (isinstance(recorded, dict) and isinstance(wanted, dict)):
        return [] if recorded == wanted else [(path, recorded, wanted)]
    keys = [*wanted, *(key for key in recorded if key not in wanted)]
    return [
        difference
        for key in keys
        for difference in _differences(
            recorded.get(key, _ABSENT), wanted.get(key, _ABSENT), f"{path}.{key}" if path else key
        )
    ]
