"""The multi-task engine: many tasks' adapters trained together on one frozen backbone."""

from .engine import Engine
from .engine_options import EngineOptions
from .prepared_task import PreparedTask, prepare_task
from .progress import TaskProgress, TaskUpdate

__all__ = ["Engine", "EngineOptions", "PreparedTask", "TaskProgress", "TaskUpdate", "prepare_task"]
