"""Checkpoints: numbered records with the arrays of tasks.

The arrays of a task have the task's own rank, so any pool, packing or device can restore them.
Checksums reveal a damaged checkpoint; the newest intact one is then used instead.
"""

import dataclasses
import json
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmux.engine import BEST, REFERENCE, Engine, Reference, TaskProgress, train_on
from jaxmux.objectives.token_losses import SUMS
from jaxmux.peft import LeafSpec, SlotArrays
from jaxmux.peft.leaves import named_leaves

from . import orbax_files
from .orbax_files import numbers
from .run_directory import RunDirectoryError

# The format of a checkpoint's contents. The earliest checkpoints have no format number.
FORMAT = 4


class Found(NamedTuple):
    """A checkpoint that was read. `record` is the JSON object that was saved with it. `arrays` has,
    by task name, the task's arrays by path."""

    number: int
    record: dict[str, Any]
    arrays: dict[str, SlotArrays]


# Takes a record and returns the tasks whose arrays are read: by name, the expected arrays by path,
# or None if any arrays are accepted.
Wanted = Callable[[dict[str, Any]], Mapping[str, Mapping[str, LeafSpec] | None]]


class Checkpoints:
    """Saves checkpoints asynchronously and atomically, keeps the last few, and restores the newest
    that is not damaged.

    A checkpoint holds the arrays of all tasks and a record. `save` adds to the record: its format,
    its own checksum and, in the entry of each task, the paths and a checksum of the task's arrays.
    """

    def __init__(self, folder: Path, keep: int, say: Callable[[str], None]):
        """Opens or creates the folder of the checkpoints, whose parent must exist, and deletes
        unfinished checkpoints. `keep` checkpoints are kept, and older ones deleted. `say` prints
        one line; it is called for damaged checkpoints."""
        self._folder, self._keep, self._say = folder.absolute(), keep, say
        folder.mkdir(exist_ok=True)
        orbax_files.remove_unfinished(folder)
        self._writer = ThreadPoolExecutor(1)
        # The save in progress, or a finished save whose error has not been raised yet.
        self._saving: Future[None] | None = None

    def has(self, number: int) -> bool:
        """Waits like `wait`, then returns whether there is a checkpoint of this number."""
        self.wait()
        return number in self.numbers

    @property
    def numbers(self) -> list[int]:
        return orbax_files.numbers(self._folder)

    def save(self, number: int, record: dict[str, Any], arrays: Mapping[str, SlotArrays]) -> None:
        """Waits until the previous checkpoint is on disk, then starts to save the next one.

        Args:
          number: its number, larger than that of any other.
          record: a JSON object. Its entry "tasks" has an object for each name in `arrays`.
          arrays: by task name, the task's arrays by path. They are copied.

        Raises:
          OSError: the previous checkpoint could not be written.
        """
        self.wait()
        arrays = {
            name: {path: np.array(array) for path, array in of_task.items()}
            for name, of_task in arrays.items()
        }
        self._saving = self._writer.submit(self._write, number, record, arrays)

    def newest(self, wanted: Wanted, beginning: bool = False) -> Found | None:
        """Reads the newest checkpoint that is not damaged. Newer checkpoints, which are damaged,
        are renamed to "damaged.NUMBER".

        Args:
          wanted: selects the arrays to read.
          beginning: whether training can start again from step 0 if every checkpoint is damaged.

        Returns:
          The checkpoint; None if there is none, or if training starts again.

        Raises:
          RunDirectoryError: every checkpoint is damaged, or the newest has another format.
        """
        newest = _newest_intact(self._folder, wanted, self._say, self.numbers, beginning)
        self._set_newer_aside(newest.number if newest else 0)
        return newest

    def wait(self) -> None:
        """Waits until all saves are on disk. Raises OSError, once, if a checkpoint could not be
        written."""
        saving, self._saving = self._saving, None
        if saving:
            saving.result()

    def close(self) -> None:
        """Waits like `wait`, and ends the writing thread."""
        self._writer.shutdown()
        self.wait()

    def _write(self, number: int, record: dict[str, Any], arrays: Mapping[str, SlotArrays]) -> None:
        with ThreadPoolExecutor() as threads:
            checksums = list(threads.map(_checksum, arrays.values()))
        tasks = dict(record["tasks"])
        for (name, of_task), checksum in zip(arrays.items(), checksums, strict=True):
            tasks[name] = {**tasks[name], "paths": [*of_task], "checksum": checksum}
        run = {"format": FORMAT, **record, "tasks": tasks}
        run["checksum"] = _record_checksum(run)
        orbax_files.write(self._folder / str(number), run, arrays)
        for old in self.numbers[: -self._keep]:
            orbax_files.delete(self._folder / str(old))

    def set_aside(self, number: int, name: str) -> None:
        """Renames a checkpoint to "NAME.NUMBER", so that it no longer counts as a checkpoint."""
        aside = self._folder / f"{name}.{number}"
        shutil.rmtree(aside, ignore_errors=True)
        (self._folder / str(number)).rename(aside)

    def _set_newer_aside(self, number: int) -> None:
        for newer in self.numbers:
            if newer > number:
                self.set_aside(newer, "damaged")


def read_task(
    folder: Path, name: str, rounds: int | None = None, say: Callable[[str], None] = print
) -> tuple[int, TaskProgress, SlotArrays]:
    """Reads one task from the checkpoints of a training run, without an engine.

    `peft.adapter_of` makes the task's adapter from the arrays, for example to export it.

    Args:
      folder: the folder `checkpoints` of a run directory.
      rounds: read the newest checkpoint after exactly this number of rounds (a round is one global
        batch of every task that still trains). None reads the newest checkpoint that is not
        damaged.
      say: prints one line; it is called for damaged checkpoints.

    Returns:
      The rounds completed before the checkpoint, the task's progress, and its NumPy arrays by path
      ("adapter/mlp.up_proj/a"). The arrays have the task's own rank: its adapter, the gradients and
      the loss accumulated over its current global batch, and its optimizer state.

    Raises:
      RunDirectoryError: there is no such checkpoint, it lacks the task, it is damaged, or it has
        another format. The message names the folder and, if the checkpoint is missing, the existing
        checkpoints.
    """
    empty = RunDirectoryError(f"{folder.absolute()}: no checkpoint; nothing was trained yet")
    if not folder.is_dir():
        raise empty
    folder = folder.absolute()
    rounds_by_number = {
        number: rounds_of(folder / str(number)) for number in orbax_files.numbers(folder)
    }
    if not rounds_by_number:
        raise empty
    candidates = [
        number
        for number, completed in rounds_by_number.items()
        if rounds is None or rounds == (number if completed is None else completed)
    ]
    # Earlier versions numbered checkpoints differently; training renames their folders.
    others = [
        str(completed) if completed == number else f"{completed} (in {folder.name}/{number})"
        for number, completed in rounds_by_number.items()
        if completed is not None and number not in candidates
    ]
    if not candidates:
        raise RunDirectoryError(
            f"{folder}: no checkpoint after round {rounds}; there are those after rounds "
            f"{', '.join(others) or 'none'}"
        )

    def only(run: dict[str, Any]) -> dict[str, None]:
        if name not in run["tasks"]:
            raise RunDirectoryError(
                f"{folder}: task {name!r} was still waiting for a place after round "
                f"{run['position']['rounds']}"
            )
        return {name: None}

    way_out = f"give --round for one of those after rounds {', '.join(others)}" if others else None
    checkpoint = _newest_intact(folder, only, say, candidates, way_out=way_out)
    run = checkpoint.record
    progress = TaskProgress.from_json(run["tasks"][name]["progress"])
    return run["position"]["rounds"], progress, checkpoint.arrays[name]


def rounds_of(folder: Path) -> int | None:
    """Number of rounds completed before this checkpoint; None if the checkpoint is damaged."""
    try:
        return int(orbax_files.read_record(folder)["position"]["rounds"])
    except MemoryError:
        raise
    except Exception:  # Orbax passes on the errors of many libraries
        return None


def _newest_intact(
    folder: Path,
    wanted: Wanted,
    say: Callable[[str], None],
    numbers: Iterable[int],
    beginning: bool = False,
    way_out: str | None = None,
) -> Found | None:
    """Reads the newest of the checkpoints `numbers` that is not damaged; None if there is none.

    Args:
      beginning: whether training can start again from step 0 if every checkpoint is damaged.
      way_out: advice in the error that every checkpoint is damaged, besides restoring the folder
        from a backup.
    """
    problems = []
    for number in sorted(numbers, reverse=True):
        try:
            checkpoint = _read(folder, number, wanted)
        except (RunDirectoryError, MemoryError):
            raise
        except Exception as e:  # Orbax passes on the errors of many libraries
            reason = orbax_files.reason(e)
            problems.append(f"the checkpoint of step {number} is damaged ({reason})")
            continue
        for problem in problems:
            say(f"{folder}: {problem}; the one of step {number} takes its place")
        return checkpoint
    if beginning:
        for problem in problems:
            say(f"{folder}: {problem}; its tasks begin anew")
        return None
    if problems:
        others = "" if way_out else ", and no other can be read"
        raise RunDirectoryError(
            f"{folder}: {problems[0]}{others}; restore the folder from a backup, or "
            f"{way_out or 'begin anew with --restart'}"
        )
    return None


def _read(folder: Path, number: int, wanted: Wanted) -> Found:
    """Reads a checkpoint. Every exception except RunDirectoryError means that the checkpoint is
    damaged."""
    run = orbax_files.read_record(folder / str(number))
    if "checksum" in run and run["checksum"] != _record_checksum(run):
        raise ValueError("the checksum of its item run differs")
    if (version := run.get("format", 1)) != FORMAT:
        raise RunDirectoryError(
            f"{folder}: the checkpoint of step {number} has format {version}, this version of "
            f"jaxmux reads format {FORMAT}; finish the run with the version that began it, or "
            "begin anew with --restart"
        )
    specs = wanted(run)
    if missing := specs.keys() - run["tasks"].keys():
        raise RunDirectoryError(
            f"{folder}: no task {min(missing)!r} in the checkpoint of step {number}"
        )
    paths = {name: run["tasks"][name]["paths"] for name in specs}
    arrays = orbax_files.read_arrays(folder / str(number), paths) if paths else {}
    for name, leaves in arrays.items():
        if _checksum(leaves) != run["tasks"][name]["checksum"]:
            raise ValueError(f"the checksum of task {name!r} differs")
        _rename(leaves)
        if specs[name] is not None and (path := _other_array(leaves, specs[name])):
            raise ValueError(f"array {path!r} of task {name!r} is not what this version expects")
    return Found(number, run, arrays)


def _other_array(arrays: SlotArrays, specs: Mapping[str, LeafSpec]) -> str | None:
    """Path of the first array that is missing, has no spec, or has another shape or dtype than its
    spec."""
    for path in sorted(arrays.keys() | specs.keys()):
        array, spec = arrays.get(path), specs.get(path)
        if array is None or spec is None:
            return path
        if (array.shape, array.dtype) != (tuple(spec.shape), np.dtype(spec.dtype)):
            return path
    return None


def _rename(arrays: SlotArrays) -> None:
    """Gives the arrays of a checkpoint that an earlier version has written their present names and
    shapes."""
    if "loss" in arrays:
        arrays["sums"] = arrays.pop("loss").reshape(1)
    if "sums" in arrays:
        arrays["sums"] = np.pad(arrays["sums"], (0, max(0, SUMS - len(arrays["sums"]))))


def _checksum(arrays: SlotArrays) -> int:
    checksum = 0
    for path, array in sorted(arrays.items()):
        checksum = zlib.crc32(f"{path} {array.dtype} {array.shape}".encode(), checksum)
        checksum = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8), checksum)
    return checksum


def _record_checksum(run: Mapping[str, Any]) -> int:
    """CRC-32 of a record without its checksum."""
    rest = {key: value for key, value in run.items() if key != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


# While a newer checkpoint replaces an older one with the same number, the older one's name has this
# prefix.
REPLACED = "replaced"


@dataclasses.dataclass
class RunPosition:
    """Position of a training run, apart from the progress of its tasks.

    Attributes:
      rounds: number of rounds completed.
      microbatches: number of microbatches trained, including those of the unfinished round.
      metrics_bytes: length in bytes of metrics.jsonl at this position.
      held_out_bytes: length in bytes of held_out.jsonl at this position.
      rounds_bytes: length in bytes of rounds.jsonl at this position.
      computed_tokens: number of tokens computed in training, padding included.
      train_seconds: wall time spent training, in seconds.
    """

    rounds: int = 0
    microbatches: int = 0
    metrics_bytes: int = 0
    held_out_bytes: int = 0
    rounds_bytes: int = 0
    computed_tokens: int = 0
    train_seconds: float = 0.0


class SavedRun(NamedTuple):
    """Contents of a checkpoint of a training run. `tasks` has, by name, each task's progress and
    accumulated samples as JSON; `arrays` has, by name, each task's arrays by path."""

    position: RunPosition
    tasks: dict[str, Any]
    arrays: dict[str, SlotArrays]

    def restore(self, engine: Engine) -> None:
        """Resets the engine's counters and its tasks to the checkpoint. All tasks of the training
        run must be registered in the engine."""
        # The checkpoint lacks tasks that were waiting for a slot.
        for name, task in self.tasks.items():
            progress = TaskProgress.from_json(task["progress"])
            prepared = engine.prepared(name)
            if progress.step < prepared.steps:
                # The task may have been given more steps since the checkpoint.
                train_on(progress, prepared.task)
            engine.restore_task(name, self.arrays[name], progress, task["accumulated"])
        engine.rounds, engine.microbatches = self.position.rounds, self.position.microbatches
        engine.computed_tokens = self.position.computed_tokens


def array_specs(engine: Engine, tasks: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By task, the specs by path of the arrays that a checkpoint of this engine holds. The tasks
    must be registered in the engine. `tasks` has, by name, the tasks' entries in the checkpoint's
    record."""

    def specs_of(name: str) -> dict[str, Any]:
        specs = named_leaves(engine.task_specs(name))
        keeps_best = engine.prepared(name).task.keep_best
        if keeps_best and tasks[name]["progress"].get("best_step") is not None:
            adapter = {p: spec for p, spec in specs.items() if p.startswith("adapter/")}
            specs |= {f"{BEST}{path}": spec for path, spec in adapter.items()}
        if tasks[name].get("reference"):
            arrays = Reference.specs(engine.prepared(name))
            specs |= {f"{REFERENCE}{path}": spec for path, spec in arrays.items()}
        return specs

    return {name: specs_of(name) for name in engine.names if name in tasks}


def save_run(
    checkpoints: Checkpoints,
    engine: Engine,
    position: RunPosition,
    arrays: Mapping[str, SlotArrays],
) -> None:
    """Starts to save everything that a training run needs to continue from here.

    The number of the checkpoint is the number of completed rounds. If training stops within a
    round, the checkpoint replaces the one that was saved at the beginning of the round. The
    engine's results must have been fetched (`Engine.drain`). `arrays` has, by task, the result of
    `Engine.task_arrays`.
    """
    tasks = {
        name: {
            "adapter_kind": engine.prepared(name).kind.name,
            "progress": engine.progress(name).to_json(),
            "accumulated": engine.accumulated(name),
            "reference": any(path.startswith(REFERENCE) for path in of_task),
        }
        for name, of_task in arrays.items()
    }
    record = {"position": dataclasses.asdict(position), "tasks": tasks}
    if checkpoints.has(position.rounds):
        checkpoints.set_aside(position.rounds, REPLACED)
    checkpoints.save(position.rounds, record, arrays)


def number_by_rounds(folder: Path) -> None:
    """Renames each checkpoint of a training run to its number of completed rounds.

    Earlier versions added the number of microbatches to this number. Of two checkpoints of the same
    round, the later one stays. If a process ended while it replaced a checkpoint, the old
    checkpoint is restored. No other process may use the folder meanwhile.
    """
    for replaced in folder.glob(f"{REPLACED}.*"):
        number = folder / replaced.name.removeprefix(f"{REPLACED}.")
        if number.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(number)
    # Earlier numbers are rounds plus microbatches, so they have the order of the rounds.
    for number in numbers(folder):
        rounds = rounds_of(folder / str(number))
        if rounds not in (None, number):
            shutil.rmtree(folder / str(rounds), ignore_errors=True)
            (folder / str(number)).rename(folder / str(rounds))


def newest_run(checkpoints: Checkpoints, engine: Engine) -> SavedRun | None:
    """Reads the newest checkpoint of a training run that is not damaged; None if there is none. All
    tasks of the training run must be registered in the engine. Raises RunDirectoryError if every
    checkpoint is damaged, or the newest has another format."""
    checkpoint = checkpoints.newest(lambda record: array_specs(engine, record["tasks"]))
    if checkpoint is None:
        return None
    position = RunPosition(**checkpoint.record["position"])
    return SavedRun(position, checkpoint.record["tasks"], checkpoint.arrays)
