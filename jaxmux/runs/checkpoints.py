"""Checkpoints: numbered records with the arrays of tasks.

The arrays of a task have the task's own rank, so any pool, packing or device can restore them.
Checksums tell a damaged checkpoint, and an older one takes its place.
"""

import json
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxmux.engine import TaskProgress
from jaxmux.errors import first_line
from jaxmux.peft import LeafSpec, SlotArrays

from .run_directory import RunDirectoryError

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

# The format of a checkpoint's contents. Checkpoints of older versions have no format number.
FORMAT = 4

# The items of a checkpoint.
_RUN, _TASKS = "run", "tasks"


class Found(NamedTuple):
    """A checkpoint that was read.

    Attributes:
      number: its number.
      record: its record.
      arrays: by name, the arrays of tasks by path.
    """

    number: int
    record: dict[str, Any]
    arrays: dict[str, SlotArrays]


# A function from a record to the tasks whose arrays are to be read: by name, descriptions of the
# arrays by path, or None for any arrays.
Wanted = Callable[[dict[str, Any]], Mapping[str, Mapping[str, LeafSpec] | None]]


class Checkpoints:
    """Saves checkpoints asynchronously and atomically, keeps the last few, and restores the newest
    that is not damaged.

    A checkpoint has an item `run` (JSON) and an item `tasks` with all arrays, because Orbax takes
    longer for many items. `run` is the record, with the format and a checksum of itself, and with
    the paths and a checksum of the arrays in the entry of each task.
    """

    def __init__(self, folder: Path, keep: int, say: Callable[[str], None]):
        """Opens the folder of the checkpoints.

        Args:
          folder: the folder; it is created if it does not exist.
          keep: number of checkpoints to keep; older ones are deleted.
          say: function that prints one line; it is told of damaged checkpoints.
        """
        self._folder, self._keep, self._say = folder, keep, say
        folder.mkdir(exist_ok=True)

    def has(self, number: int) -> bool:
        """Whether there is a checkpoint of this number.

        Args:
          number: the number.
        """
        return number in self._manager.all_steps()

    @property
    def numbers(self) -> list[int]:
        """The numbers of all checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, number: int, record: dict[str, Any], arrays: Mapping[str, SlotArrays]) -> None:
        """Starts to save a checkpoint.

        Args:
          number: its number, larger than that of any other.
          record: a JSON object. Its entry "tasks" has an object for each name in `arrays`.
          arrays: by name, the arrays of tasks by path.
        """
        arrays = {
            name: {path: np.asarray(array) for path, array in own.items()}
            for name, own in arrays.items()
        }
        with ThreadPoolExecutor() as threads:
            checksums = list(threads.map(_checksum, arrays.values()))
        tasks = dict(record["tasks"])
        for (name, own), checksum in zip(arrays.items(), checksums, strict=True):
            tasks[name] = {**tasks[name], "paths": [*own], "checksum": checksum}
        run = {"format": FORMAT, **record, "tasks": tasks}
        run["checksum"] = _record_checksum(run)
        ocp = _orbax()
        items: dict[str, Any] = {_RUN: ocp.args.JsonSave(run)}
        if arrays:
            items[_TASKS] = ocp.args.PyTreeSave(arrays)
        self._manager.save(number, args=ocp.args.Composite(**items))

    def keep_newest(self) -> list[int]:
        """Deletes what should have been deleted when a checkpoint was begun that then failed, which
        Orbax forgets. No checkpoint may be under way.

        Returns:
          The numbers of the checkpoints that are kept, ascending.
        """
        numbers = self.numbers
        for path in self._folder.iterdir():
            if path.name.isdecimal() and int(path.name) < numbers[0]:
                shutil.rmtree(path, ignore_errors=True)
        return numbers

    def remove_incomplete(self) -> None:
        """Deletes what is left of checkpoints that could not be completed. Orbax does it only when
        the folder is opened. Threads of one that has just failed may still write a little."""
        for path in self._folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(path, ignore_errors=True)

    def newest(self, wanted: Wanted, beginning: bool = False) -> Found | None:
        """Reads the newest checkpoint that is not damaged. Damaged checkpoints that are newer are
        renamed to "damaged.NUMBER".

        Args:
          wanted: tells which arrays to read.
          beginning: whether training can begin anew if every checkpoint is damaged.

        Returns:
          The checkpoint; None if there is none, or if training begins anew.

        Raises:
          RunDirectoryError: every checkpoint is damaged, or the newest has another format.
        """
        if not any(self._folder.iterdir()):
            return None
        steps = self._manager.all_steps()
        found = _newest_intact(self._manager, wanted, self._say, steps, beginning)
        self._set_newer_aside(found.number if found else 0)
        return found

    def wait(self) -> None:
        """Waits until all saves are on disk."""
        if self._is_open:
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Releases the folder."""
        if self._is_open:
            self._manager.close()

    @property
    def _is_open(self) -> bool:
        return "_manager" in vars(self)

    @cached_property
    def _manager(self) -> "ocp.CheckpointManager":
        return _open(
            self._folder, max_to_keep=self._keep, create=False, cleanup_tmp_directories=True
        )

    def set_aside(self, number: int, name: str) -> None:
        """Renames a checkpoint to "NAME.NUMBER", so that it is none any more.

        Args:
          number: its number.
          name: the name.
        """
        self._manager.close()
        del self._manager
        aside = self._folder / f"{name}.{number}"
        shutil.rmtree(aside, ignore_errors=True)
        (self._folder / str(number)).rename(aside)

    def _set_newer_aside(self, step: int) -> None:
        for other in self._manager.all_steps():
            if other > step:
                self.set_aside(other, "damaged")


def read_task(
    folder: Path, name: str, rounds: int | None = None, say: Callable[[str], None] = print
) -> tuple[int, TaskProgress, SlotArrays]:
    """Reads one task from the checkpoints of a training run, without an engine.

    `peft.adapter_of` makes the task's adapter of the arrays, for example to export it.

    Args:
      folder: the folder `checkpoints` of a run directory.
      name: name of the task.
      rounds: takes the newest checkpoint that was taken after this round (a round is one global
        batch of every task that still trains). None takes the newest checkpoint that is not
        damaged.
      say: function that prints one line; it is told of damaged checkpoints.

    Returns:
      The rounds completed before the checkpoint, the task's progress, and its NumPy arrays by path
      ("adapter/mlp.up_proj/a"), at the task's own rank: its adapter, the gradients and the loss
      accumulated over its current global batch, and its optimizer state.

    Raises:
      RunDirectoryError: there is no such checkpoint, or no such task in it, or it is damaged, or it
        has another format. The message names the folder and, where the checkpoint is missing, the
        existing checkpoints.
    """
    empty = RunDirectoryError(f"{folder.absolute()}: no checkpoint; nothing was trained yet")
    if not folder.is_dir():
        raise empty
    with _open(folder.absolute(), read_only=True) as manager:
        steps = {step: _rounds_of(manager, step) for step in manager.all_steps()}
        wanted = [step for step, found in steps.items() if rounds is None or found == rounds]
        if not steps:
            raise empty
        if not wanted:
            # Earlier versions numbered folders in another way; training renames them.
            kept = ", ".join(
                str(found) if found == step else f"{found} (in {folder.name}/{step})"
                for step, found in sorted(steps.items())
                if found is not None
            )
            raise RunDirectoryError(
                f"{folder.absolute()}: no checkpoint after round {rounds}; there are those after "
                f"rounds {kept or 'none'}"
            )

        def own(run: dict[str, Any]) -> dict[str, None]:
            if name not in run["tasks"]:
                raise RunDirectoryError(
                    f"{folder.absolute()}: task {name!r} was still waiting for a place after round "
                    f"{run['position']['rounds']}"
                )
            return {name: None}

        _, run, arrays = _newest_intact(manager, own, say, wanted)
        progress = TaskProgress.from_json(run["tasks"][name]["progress"])
        return run["position"]["rounds"], progress, arrays[name]


def _rounds_of(manager: "ocp.CheckpointManager", step: int) -> int | None:
    """The rounds completed before a checkpoint; None if it is damaged."""
    try:
        return _read_record(manager, step)["position"]["rounds"]
    except MemoryError:
        raise
    except Exception:  # orbax passes on the errors of many libraries
        return None


def _newest_intact(
    manager: "ocp.CheckpointManager",
    wanted: Wanted,
    say: Callable[[str], None],
    steps: Iterable[int],
    beginning: bool = False,
) -> Found | None:
    """Reads the newest checkpoint that is not damaged; None if there is no checkpoint.

    Args:
      manager: the checkpoints.
      wanted: tells which arrays to read.
      say: function that prints one line.
      steps: the numbers of the checkpoints to try.
      beginning: whether training can begin anew if every checkpoint is damaged.
    """
    problems = []
    for step in sorted(steps, reverse=True):
        try:
            found = _read(manager, step, wanted)
        except (RunDirectoryError, MemoryError):
            raise
        except Exception as e:  # orbax passes on the errors of many libraries
            problems.append(f"the checkpoint of step {step} is damaged ({first_line(e)[:200]})")
            continue
        for problem in problems:
            say(f"{manager.directory}: {problem}; the one of step {step} takes its place")
        return found
    if beginning:
        for problem in problems:
            say(f"{manager.directory}: {problem}; training begins anew with all commands")
        return None
    if problems:
        raise RunDirectoryError(
            f"{manager.directory}: {problems[0]}, and no other can be read; restore the folder "
            "from a backup, or begin anew with --restart"
        )
    return None


def _read(manager: "ocp.CheckpointManager", step: int, wanted: Wanted) -> Found:
    """Reads a checkpoint. Any exception but RunDirectoryError means that it is damaged."""
    run = _read_record(manager, step)
    if "checksum" in run and run["checksum"] != _record_checksum(run):
        raise ValueError("the checksum of its item run differs")
    if (found := run.get("format", 1)) != FORMAT:
        raise RunDirectoryError(
            f"{manager.directory}: the checkpoint of step {step} has format {found}, this version "
            f"of jaxmux reads format {FORMAT}; finish the run with the version that began it, or "
            "begin anew with --restart"
        )
    specs = wanted(run)
    if missing := specs.keys() - run["tasks"].keys():
        raise RunDirectoryError(
            f"{manager.directory}: no task {min(missing)!r} in the checkpoint of step {step}"
        )
    paths = {name: run["tasks"][name]["paths"] for name in specs}
    arrays = _read_arrays(manager, step, paths) if paths else {}
    for name, leaves in arrays.items():
        if _checksum(leaves) != run["tasks"][name]["checksum"]:
            raise ValueError(f"the checksum of task {name!r} differs")
        if specs[name] is not None and (path := _other_array(leaves, specs[name])):
            raise ValueError(f"array {path!r} of task {name!r} is not what this version expects")
    return Found(step, run, arrays)


def _read_record(manager: "ocp.CheckpointManager", step: int) -> dict[str, Any]:
    ocp = _orbax()
    restored = manager.restore(step, args=ocp.args.Composite(**{_RUN: ocp.args.JsonRestore()}))
    return restored[_RUN]


def _read_arrays(
    manager: "ocp.CheckpointManager", step: int, paths: Mapping[str, Iterable[str]]
) -> dict[str, SlotArrays]:
    """Reads the arrays of some tasks, by name. Those of others stay on disk."""
    ocp = _orbax()
    # Orbax takes the type of what it reads from what it is given: any array.
    any_array = np.zeros(())
    wanted = {name: dict.fromkeys(own, any_array) for name, own in paths.items()}
    args = ocp.args.PyTreeRestore(item=wanted, partial_restore=True)
    return manager.restore(step, args=ocp.args.Composite(**{_TASKS: args}))[_TASKS]


def _other_array(arrays: SlotArrays, specs: Mapping[str, LeafSpec]) -> str | None:
    """The path of an array that is missing, or not described, or has another shape or dtype."""
    for path in sorted(arrays.keys() | specs.keys()):
        array, spec = arrays.get(path), specs.get(path)
        if array is None or spec is None:
            return path
        if (array.shape, array.dtype) != (tuple(spec.shape), np.dtype(spec.dtype)):
            return path
    return None


def _open(folder: Path, **options) -> "ocp.CheckpointManager":
    """Opens a folder of checkpoints.

    Args:
      folder: the folder.
      options: those of `CheckpointManagerOptions`.
    """
    ocp = _orbax()
    # Orbax works in process 0 without the others.
    alone = ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes={0}, barrier_sync_key_prefix="jaxmux"
    )
    options = ocp.CheckpointManagerOptions(**options, multiprocessing_options=alone)
    return ocp.CheckpointManager(folder, options=options)


def _orbax() -> ModuleType:
    """The package `orbax.checkpoint`. Importing it takes a while, so training begins without it."""
    import orbax.checkpoint

    return orbax.checkpoint


def _checksum(arrays: SlotArrays) -> int:
    """A CRC-32 of all arrays with their paths, dtypes and shapes."""
    checksum = 0
    for path, array in sorted(arrays.items()):
        checksum = zlib.crc32(f"{path} {array.dtype} {array.shape}".encode(), checksum)
        checksum = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8), checksum)
    return checksum


def _record_checksum(run: Mapping[str, Any]) -> int:
    """A CRC-32 of the item `run` without its own checksum."""
    rest = {key: value for key, value in run.items() if key != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())
