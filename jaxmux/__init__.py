"""jaxmux: many fine-tuning tasks at once on one frozen backbone."""

from .data import Source
from .optimizers import SGD, AdamW, Lion, Schedule
from .peft import LoRA
from .tasks import Task, TaskError

__all__ = ["SGD", "AdamW", "Lion", "LoRA", "Schedule", "Source", "Task", "TaskError"]
