"""The multi-task engine: many tasks' adapters trained together on one frozen backbone."""

from .engine import Engine
from .options import EngineOptions
from .prepare import PreparedTask, prepare_task
from .progress import TaskProgress, TaskUpdate

__all__ = ["Engine", "EngineOptions", "PreparedTask", "TaskProgress", "TaskUpdate", "prepare_task"]
