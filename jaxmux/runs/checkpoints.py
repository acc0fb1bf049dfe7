"""Checkpoints of a training run: one entry per task at the task's own rank, which any pool, packing
or set of devices restores."""

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

# Of what a checkpoint holds. Older versions had no number.
FORMAT = 2

_TASK = "task."


@dataclasses.dataclass
class RunPosition:
    """Where a training run stands, besides its tasks.

    Attributes:
      rounds: rounds completed.
      microbatches: microbatches trained, those of the unfinished round included.
      metrics_bytes: length of metrics.jsonl up to this position.
      computed_tokens: tokens computed in training, padding included.
      train_seconds: wall time spent training.
    """

    rounds: int = 0
    microbatches: int = 0
    metrics_bytes: int = 0
    computed_tokens: int = 0
    train_seconds: float = 0.0


class Checkpoints:
    """Saves asynchronously and atomically, keeps the last few, restores the newest.

    A checkpoint has an item `run` (JSON) and an item of arrays for each task. `run` holds the
    format, the position, the shape class, and of every task its adapter kind, its progress, a
    checksum of its data, and the samples of the round in progress that its accumulators hold.
    """

    def __init__(self, folder: Path, keep: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(folder, options=options)

    def save(self, engine: Engine, position: RunPosition) -> None:
        """Saves everything that the run needs to go on from here. The engine must be drained."""
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
        items: dict[str, Any] = {"run": ocp.args.JsonSave(run)}
        for name in engine.names:
            items[_TASK + name] = ocp.args.StandardSave(engine.task_arrays(name))
        self._manager.save(step, args=ocp.args.Composite(**items))

    def restore(self, engine: Engine) -> RunPosition | None:
        """Puts the engine where the newest checkpoint was taken; None if there is none.

        Raises:
          RunDirectoryError: the checkpoint has another format.
          TaskError: a task's data has changed since.
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
        self._manager.close()


def read_shape(folder: Path) -> ShapeClass | None:
    """The shape class in the newest checkpoint of a folder; None if there is no checkpoint.

    Raises:
      RunDirectoryError: the checkpoint has another format.
    """
    if not folder.is_dir():
        return None
    with _read_only(folder) as manager:
        step = manager.latest_step()
        return None if step is None else ShapeClass(**_read_run(manager, step)["shape"])


def read_task(folder: Path, name: str, step: int | None = None) -> tuple[int, SlotArrays]:
    """Reads the arrays of one task from the checkpoints of a training run.

    Args:
      folder: the folder `checkpoints` of a run directory.
      name: name of the task.
      step: number of the checkpoint, which is the name of its folder; None takes the newest.

    Returns:
      The number of the checkpoint, and the task's arrays by path, at its own rank.

    Raises:
      FileNotFoundError: there is no such checkpoint, or no such task in it. The message lists the
        checkpoints.
      RunDirectoryError: the checkpoint has another format.
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
