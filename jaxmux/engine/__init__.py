"""The multi-task engine, which trains the adapters of many tasks together on one frozen backbone.

In go a backbone, prepared tasks and a shape class. Out come the updates of every task, round by
round, and at the end its adapter.
"""

from .engine import Engine
from .engine_options import EngineOptions
from .prepared_task import PreparedTask, prepare_task
from .progress import TaskProgress, TaskUpdate

__all__ = ["Engine", "EngineOptions", "PreparedTask", "TaskProgress", "TaskUpdate", "prepare_task"]
