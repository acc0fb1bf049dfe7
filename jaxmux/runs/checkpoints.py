"""Checkpoints of a run: one entry per task at true rank, so that any pool or mesh restores them."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from jaxmux.engine import Engine, TaskProgress
from jaxmux.peft import SlotArrays
from jaxmux.planner import PlanningError
from jaxmux.planner.packing import ShapeClass
from jaxmux.planner.packing.microbatches import PACKING
from jaxmux.tasks import TaskError

_TASK = "task."


@dataclasses.dataclass
class RunPosition:
    """Where a run stands, besides its tasks.

    Attributes:
      rounds: rounds completed; `microbatches` trained in all, `microbatches_done` of them in the
        unfinished round.
      metrics_bytes: length of metrics.jsonl that belongs to this position.
      computed_tokens: tokens computed in training, padding included.
      train_seconds: wall time spent training.
    """

    rounds: int = 0
    microbatches: int = 0
    microbatches_done: int = 0
    metrics_bytes: int = 0
    computed_tokens: int = 0
    train_seconds: float = 0.0


class Checkpoints:
    """Saves asynchronously and atomically, keeps the last few; restores the newest."""

    def __init__(self, folder: Path, keep: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(folder, options=options)

    def save(self, engine: Engine, position: RunPosition) -> None:
        """Saves everything that the run needs to go on from here. The engine must be drained."""
        # Every microbatch and every update makes a new position.
        step = position.microbatches + position.rounds
        if step in self._manager.all_steps():
            return
        tasks = {name: engine.progress(name).to_json() for name in engine.names}
        data = {name: engine.prepared(name).fingerprint for name in engine.names}
        run = {
            "position": dataclasses.asdict(position),
            "tasks": tasks,
            "data": data,
            "shape": dataclasses.asdict(engine.options.shape),
            "packing": PACKING,
        }
        items: dict[str, Any] = {"run": ocp.args.JsonSave(run)}
        for name in engine.names:
            items[_TASK + name] = ocp.args.StandardSave(engine.task_arrays(name))
        self._manager.save(step, args=ocp.args.Composite(**items))

    def restore(self, engine: Engine) -> RunPosition | None:
        """Puts the engine where the newest checkpoint was taken; None if there is none.

        Raises:
          TaskError: a task's data has changed since.
          PlanningError: the shape class has, or, in the middle of a round, the way of packing.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        items: dict[str, Any] = {"run": ocp.args.JsonRestore()}
        for name in engine.names:
            template = {k: np.zeros_like(v) for k, v in engine.task_arrays(name).items()}
            items[_TASK + name] = ocp.args.StandardRestore(template)
        restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        for name in engine.names:
            if restored["run"]["data"][name] != engine.prepared(name).fingerprint:
                raise TaskError(
                    f"task {name!r}: its data is not what the run began with; restore the data, "
                    "choose another run_dir, or begin anew with restart"
                )
        if restored["run"]["shape"] != dataclasses.asdict(engine.options.shape):
            raise PlanningError(
                f"the run began with microbatches of {restored['run']['shape']}, here they are "
                f"{dataclasses.asdict(engine.options.shape)}; set row_len and chunk_len alike"
            )
        in_round = restored["run"]["position"]["microbatches_done"]
        if in_round and restored["run"].get("packing") != PACKING:
            raise PlanningError(
                f"the run was stopped {in_round} microbatches into a round by a version of jaxmux "
                "that packs differently; finish the round with that version, or begin anew with "
                "restart"
            )
        for name in engine.names:
            progress = TaskProgress.from_json(restored["run"]["tasks"][name])
            engine.restore_task(name, restored[_TASK + name], progress)
        position = RunPosition(**restored["run"]["position"])
        engine.rounds, engine.microbatches = position.rounds, position.microbatches
        engine.microbatches_done = position.microbatches_done
        return position

    def wait(self) -> None:
        """Until all saves are on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()


def read_shape(folder: Path) -> ShapeClass | None:
    """The shape class of the run whose checkpoints these are; None if there is none yet."""
    if not folder.is_dir():
        return None
    options = ocp.CheckpointManagerOptions(read_only=True)
    with ocp.CheckpointManager(folder.absolute(), options=options) as manager:
        step = manager.latest_step()
        if step is None:
            return None
        restored = manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))
        return ShapeClass(**restored["run"]["shape"])


def read_task(folder: Path, name: str, step: int | None = None) -> tuple[int, SlotArrays]:
    """A task's arrays from a run's checkpoints, without an engine.

    Args:
      step: which checkpoint; None takes the newest.

    Returns:
      The checkpoint's step, and the arrays by path.

    Raises:
      FileNotFoundError: no checkpoint, no such step, or no such task in it; the message says what
        there is.
    """
    folder = folder.absolute()
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no checkpoints")
    with ocp.CheckpointManager(
        folder, options=ocp.CheckpointManagerOptions(read_only=True)
    ) as manager:
        steps = sorted(manager.all_steps())
        chosen = (steps[-1] if steps else None) if step is None else step
        if chosen not in steps:
            wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise FileNotFoundError(f"{folder}: {wanted}; there are {steps or 'none'}")
        if not (folder / str(chosen) / (_TASK + name)).is_dir():
            raise FileNotFoundError(
                f"{folder}: no task {name!r} in the checkpoint of step {chosen}"
            )
        items = ocp.args.Composite(**{_TASK + name: ocp.args.StandardRestore()})
        return chosen, manager.restore(chosen, args=items)[_TASK + name]
