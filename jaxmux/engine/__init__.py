"""The multi-task engine, which trains the adapters of many tasks together on one frozen backbone.

The engine takes a backbone, prepared tasks and a shape class (the sizes of a microbatch). It trains
round by round: a *round* is one global batch of every live task. It returns the updates of every
round and, at the end, the adapter of every task.

    prepared = [jaxmux.prepare_task(task, backbone.config, tokenizer) for task in tasks]
    shape = jaxmux.best_shape(prepared, backbone)
    engine = jaxmux.Engine(backbone, jaxmux.EngineOptions(shape))
    engine.register_tasks(prepared)
    while not engine.finished:
        updates = engine.train_round()
    updates = engine.drain()
    adapter = engine.adapter("billing")
    engine.close()
"""

from .devices.programs_ahead import ProgramsAhead
from .engine import Engine
from .engine_options import EngineOptions, EngineSize
from .queued_engine import Bracket, QueuedEngine, rung_of
from .rounds.results import Computed, ComputedTurn, HeldOutTokens
from .state.slots import BEST, REFERENCE, Reference, SuspendedTask, TrainedTask
from .tasks.prepared_task import PreparedTask, driven_task, prepare_task
from .tasks.progress import TaskEvaluation, TaskProgress, TaskUpdate, train_on

__all__ = [
    "BEST",
    "REFERENCE",
    "Reference",
    "Bracket",
    "Computed",
    "ComputedTurn",
    "Engine",
    "EngineOptions",
    "EngineSize",
    "HeldOutTokens",
    "PreparedTask",
    "ProgramsAhead",
    "QueuedEngine",
    "SuspendedTask",
    "TaskEvaluation",
    "TaskProgress",
    "TaskUpdate",
    "TrainedTask",
    "driven_task",
    "prepare_task",
    "rung_of",
    "train_on",
]
