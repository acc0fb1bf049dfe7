"""What the checkpoints of a training run hold."""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxmux.engine import BEST, Engine, TaskProgress, train_on
from jaxmux.peft import LeafSpec, SlotArrays, kind_of
from jaxmux.peft.leaves import named_leaves

from .checkpoints import Checkpoints, rounds_of
from .orbax_files import numbers

# What is before the number in the name of a checkpoint that another one replaces.
REPLACED = "replaced"


@dataclasses.dataclass
class RunPosition:
    """The position of a training run, besides the progress of its tasks.

    Attributes:
      rounds: number of rounds completed.
      microbatches: number of microbatches trained, those of the unfinished round included.
      metrics_bytes: length of metrics.jsonl at this position, in bytes.
      held_out_bytes: length of held_out.jsonl at this position, in bytes.
      rounds_bytes: length of rounds.jsonl at this position, in bytes.
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
    """What a checkpoint holds.

    Attributes:
      position: the position of the training run.
      tasks: by name, the task's progress and accumulated samples, as JSON.
      arrays: by name, the task's arrays by path.
    """

    position: RunPosition
    tasks: dict[str, Any]
    arrays: dict[str, SlotArrays]

    def restore(self, engine: Engine) -> None:
        """Puts every task of an engine, and the engine's counters, back to the checkpoint.

        Args:
          engine: an engine in which the tasks of the training run are registered.
        """
        # Tasks that were still waiting for a place are not there.
        for name, task in self.tasks.items():
            progress = TaskProgress.from_json(task["progress"])
            prepared = engine.prepared(name)
            if progress.step < prepared.steps:
                # The task may have been extended.
                train_on(progress, prepared.task)
            engine.restore_task(name, self.arrays[name], progress, task["accumulated"])
        engine.rounds, engine.microbatches = self.position.rounds, self.position.microbatches
        engine.computed_tokens = self.position.computed_tokens


def array_specs(engine: Engine, tasks: Mapping[str, Any]) -> dict[str, dict[str, LeafSpec]]:
    """By task, the descriptions of the arrays by path that a checkpoint holds.

    Args:
      engine: an engine in which the tasks are registered.
      tasks: by name, the entries of the tasks in the checkpoint.
    """

    def own(name: str) -> dict[str, LeafSpec]:
        found = named_leaves(engine.task_specs(name))
        keeps_best = engine.prepared(name).task.keep_best
        if keeps_best and tasks[name]["progress"].get("best_step") is not None:
            adapter = {p: spec for p, spec in found.items() if p.startswith("adapter/")}
            found |= {f"{BEST}{path}": spec for path, spec in adapter.items()}
        return found

    return {name: own(name) for name in engine.names if name in tasks}


def save_run(
    checkpoints: Checkpoints,
    engine: Engine,
    position: RunPosition,
    arrays: Mapping[str, SlotArrays],
) -> None:
    """Starts to save everything that a training run needs to continue from here. The number of the
    checkpoint is that of the completed rounds. A stop within a round replaces the checkpoint that
    was taken at the beginning of the round.

    Args:
      checkpoints: the checkpoints of the training run.
      engine: the engine; its results must have been fetched (`Engine.drain`).
      position: the position of the training run.
      arrays: by task, the result of `Engine.task_arrays`.
    """
    tasks = {
        name: {
            "adapter_kind": kind_of(engine.prepared(name).task.adapter).name,
            "progress": engine.progress(name).to_json(),
            "accumulated": engine.accumulated(name),
        }
        for name in arrays
    }
    record = {"position": dataclasses.asdict(position), "tasks": tasks}
    if checkpoints.has(position.rounds):
        checkpoints.set_aside(position.rounds, REPLACED)
    checkpoints.save(position.rounds, record, arrays)


def number_by_rounds(folder: Path) -> None:
    """Gives each checkpoint of a training run the number of the rounds that it had completed.

    Earlier versions added the number of microbatches. Of two checkpoints after the same round, the
    later one stays. A checkpoint that another one of its number was to replace comes back if the
    process ended before that was complete.

    Args:
      folder: the folder of the checkpoints. Nothing else may use it.
    """
    for replaced in folder.glob(f"{REPLACED}.*"):
        number = folder / replaced.name.removeprefix(f"{REPLACED}.")
        if number.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(number)
    # With microbatches, numbers are larger than those of the rounds, and so in the same order.
    for number in numbers(folder):
        rounds = rounds_of(folder / str(number))
        if rounds not in (None, number):
            shutil.rmtree(folder / str(rounds), ignore_errors=True)
            (folder / str(number)).rename(folder / str(rounds))


def newest_run(checkpoints: Checkpoints, engine: Engine) -> SavedRun | None:
    """Reads the newest checkpoint of a training run that is not damaged; None if there is none.

    Args:
      checkpoints: the checkpoints of the training run.
      engine: an engine in which the tasks of the training run are registered.

    Raises:
      RunDirectoryError: every checkpoint is damaged, or the newest has another format.
    """

    found = checkpoints.newest(lambda record: array_specs(engine, record["tasks"]))
    if found is None:
        return None
    position = RunPosition(**found.record["position"])
    return SavedRun(position, found.record["tasks"], found.arrays)
