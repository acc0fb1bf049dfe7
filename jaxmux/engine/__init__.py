"""The multi-task engine: many tasks' adapters trained together on one frozen backbone."""

from .engine import Engine, EngineOptions, TaskUpdate
from .prepare import PreparedTask, prepare_task
from .progress import TaskProgress

__all__ = ["Engine", "EngineOptions", "PreparedTask", "TaskProgress", "TaskUpdate", "prepare_task"]
