"""jaxmux: many fine-tuning tasks at once on one frozen backbone.

import jaxmux

summary = jaxmux.fine_tune(
    backbone="/models/Llama-3.2-1B",
    tasks=[
        jaxmux.Task("billing", "billing.jsonl", jaxmux.LoRA(rank=8), epochs=3),
        jaxmux.Task("support", "support.jsonl", jaxmux.LoRA(rank=32), epochs=1),
    ],
    run_dir="runs/two_tasks",
)
"""

from .data import DataError, Source, load_tokenizer
from .engine import Engine, EngineOptions, PreparedTask, TaskUpdate, prepare_task
from .generation import Request, complete
from .models import Backbone, BackboneConfig, BackboneError, load_backbone, save_backbone
from .optimizers import SGD, AdamW, Lion, Schedule
from .peft import AdapterError, LoRA, export_adapter, import_adapter
from .planner import PlanningError, ShapeClass
from .runs import Interrupted, RunDirectoryError, Summary, best_shape, fine_tune
from .tasks import Task, TaskError

__all__ = [
    "SGD",
    "AdamW",
    "AdapterError",
    "Backbone",
    "BackboneConfig",
    "BackboneError",
    "DataError",
    "Engine",
    "EngineOptions",
    "Interrupted",
    "Lion",
    "LoRA",
    "PlanningError",
    "PreparedTask",
    "Request",
    "RunDirectoryError",
    "Schedule",
    "ShapeClass",
    "Source",
    "Summary",
    "Task",
    "TaskError",
    "TaskUpdate",
    "best_shape",
    "complete",
    "export_adapter",
    "fine_tune",
    "import_adapter",
    "load_backbone",
    "load_tokenizer",
    "prepare_task",
    "save_backbone",
]
