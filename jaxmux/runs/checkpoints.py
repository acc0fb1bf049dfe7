"""Checkpoints of a training run.

A checkpoint has one entry for each task, at the task's own rank, so any pool, packing or device can
restore it.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from jaxmux.engine import Engine, TaskProgress
from jaxmux.peft import SlotArrays, kind_of
from jaxmux.peft.leaves import named_leaves
from jaxmux.planner.packing import ShapeClass
from jaxmux.tasks import TaskError

from .run_directory import RunDirectoryError

# The format of a checkpoint's contents. Checkpoints of older versions have no format number.
FORMAT = 2

_TASK = "task."


@dataclasses.dataclass
class RunPosition:
    """The position of a training run, besides the progress of its tasks.

    Attributes:
      rounds: number of rounds completed.
      microbatches: number of microbatches trained, those of the unfinished round included.
      metrics_bytes: length of metrics.jsonl at this position, in bytes.
      computed_tokens: number of tokens computed in training, padding included.
      train_seconds: wall time spent training, in seconds.
    """

    rounds: int = 0
    microbatches: int = 0
    metrics_bytes: int = 0
    computed_tokens: int = 0
    train_seconds: float = 0.0


class Checkpoints:
    """Saves checkpoints asynchronously and atomically, keeps the last few, and restores the newest.

    A checkpoint has an item `run` (JSON) and an item of arrays for each task. `run` holds the
    format, the position and the shape class. For every task, `run` holds the adapter kind, the
    progress, a checksum of the data, and the indices of the samples in the unfinished round whose
    gradients the accumulators hold.
    """

    def __init__(self, folder: Path, keep: int):
        """Opens the folder of the checkpoints.

        Args:
          folder: the folder; it is created if it does not exist.
          keep: number of checkpoints to keep; older ones are deleted.
        """
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(folder, options=options)

    def save(self, engine: Engine, position: RunPosition) -> None:
        """Starts to save everything that the training run needs to continue from here.

        The number of the checkpoint is the number of rounds plus the number of microbatches so far.
        Nothing is saved if this checkpoint exists already.

        Args:
          engine: the engine; its results must have been fetched (`Engine.drain`).
          position: the position of the training run.
        """
        # Every microbatch and every update makes a new position.
        step = position.microbatches + position.rounds
        if step in self._manager.all_steps():
            return
        run = {
            "format": FORMAT,
            "position": dataclasses.asdict(position),
            "shape": dataclasses.asdict(engine.options.shape),
            "tasks": {name: _task_record(engine, name) for name in engine.names},
        }
        items = {_TASK + n: ocp.args.StandardSave(engine.task_arrays(n)) for n in engine.names}
        self._manager.save(step, args=ocp.args.Composite(run=ocp.args.JsonSave(run), **items))

    def restore(self, engine: Engine) -> RunPosition | None:
        """Restores every task of the engine from the newest checkpoint.

        Args:
          engine: an engine in which the tasks of the training run are registered.

        Returns:
          The position of the checkpoint; None if there is no checkpoint.

        Raises:
          RunDirectoryError: the checkpoint has another format.
          TaskError: a task's data has changed since the checkpoint.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        run = _read_run(self._manager, step)
        items: dict[str, Any] = {}
        for name in engine.names:
            if run["tasks"][name]["data"] != engine.prepared(name).fingerprint:
                raise TaskError(
                    f"task {name!r}: its data is not what the run began with; restore the data, "
                    "choose another run_dir, or begin anew with restart"
                )
            specs = named_leaves(engine.task_specs(name))
            template = {path: np.zeros(spec.shape, spec.dtype) for path, spec in specs.items()}
            items[_TASK + name] = ocp.args.StandardRestore(template)
        restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        for name in engine.names:
            task = run["tasks"][name]
            progress = TaskProgress.from_json(task["progress"])
            engine.restore_task(name, restored[_TASK + name], progress, task["accumulated"])
        position = RunPosition(**run["position"])
        engine.rounds, engine.microbatches = position.rounds, position.microbatches
        return position

    def wait(self) -> None:
        """Waits until all saves are on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Releases the folder."""
        self._manager.close()


def read_shape(folder: Path) -> ShapeClass | None:
    """The shape class in the newest checkpoint of a folder; None if there is no checkpoint.

    Args:
      folder: the folder `checkpoints` of a run directory.

    Raises:
      RunDirectoryError: the checkpoint has another format.
    """
    if not folder.is_dir():
        return None
    with _read_only(folder) as manager:
        step = manager.latest_step()
        return None if step is None else ShapeClass(**_read_run(manager, step)["shape"])


def read_task(folder: Path, name: str, step: int | None = None) -> tuple[int, SlotArrays]:
    """Reads the arrays of one task from the checkpoints of a training run, without an engine.

    `peft.adapter_of` makes the task's adapter of these arrays, for example to export it.

    Args:
      folder: the folder `checkpoints` of a run directory.
      name: name of the task.
      step: number of the checkpoint, which is the name of its folder: the number of rounds (one
        global batch of every task) plus the number of microbatches trained before it. None takes
        the newest checkpoint.

    Returns:
      A pair: the number of the checkpoint, and the task's NumPy arrays by path
      ("adapter/mlp.up_proj/a"), at the task's own rank: its adapter, the gradients and the loss
      accumulated over its current global batch, and its optimizer state.

    Raises:
      FileNotFoundError: there is no such checkpoint, or no such task in it. The message names the
        folder and, where the checkpoint is missing, the existing checkpoints.
      RunDirectoryError: the checkpoint has a format that this version of jaxmux does not read.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder.absolute()}: no checkpoints")
    with _read_only(folder) as manager:
        steps = sorted(manager.all_steps())
        chosen = (steps[-1] if steps else None) if step is None else step
        if chosen not in steps:
            wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise FileNotFoundError(f"{folder.absolute()}: {wanted}; there are {steps or 'none'}")
        if name not in _read_run(manager, chosen)["tasks"]:
            raise FileNotFoundError(
                f"{folder.absolute()}: no task {name!r} in the checkpoint of step {chosen}"
            )
        items = ocp.args.Composite(**{_TASK + name: ocp.args.StandardRestore()})
        return chosen, manager.restore(chosen, args=items)[_TASK + name]


def _task_record(engine: Engine, name: str) -> dict[str, Any]:
    prepared = engine.prepared(name)
    return {
        "adapter_kind": kind_of(prepared.task.adapter).name,
        "progress": engine.progress(name).to_json(),
        "data": prepared.fingerprint,
        "accumulated": engine.accumulated(name),
    }


def _read_only(folder: Path) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(read_only=True)
    return ocp.CheckpointManager(folder.absolute(), options=options)


def _read_run(manager: ocp.CheckpointManager, step: int) -> dict[str, Any]:
    restored = manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))
    run = restored["run"]
    if run.get("format") != FORMAT:
        raise RunDirectoryError(
            f"{manager.directory}: the checkpoint of step {step} has format "
            f"{run.get('format', 1)}, this version of jaxmux reads format {FORMAT}; finish the run "
            "with the version that began it, or begin anew with restart"
        )
    return run
