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

Public names are imported when they are first used, so that `import jaxmux`, the planner and the
help of the commands load no device code.
"""

from importlib import import_module
from typing import Any

from . import optimizers

# By public name, the module that defines it.
_MODULES = {
    "AdapterError": "peft",
    "Backbone": "models",
    "BackboneConfig": "models",
    "BackboneError": "models",
    "DataError": "data",
    "Engine": "engine",
    "EngineOptions": "engine",
    "Interrupted": "runs",
    "LoRA": "peft",
    "PlanningError": "planner",
    "PoolSpec": "planner.costs",
    "PreparedTask": "engine",
    "Request": "completion",
    "RunDirectoryError": "runs",
    "RunOptions": "runs",
    "ShapeClass": "planner.packing",
    "Source": "data",
    "Summary": "runs",
    "Task": "tasks",
    "TaskError": "tasks",
    "TaskUpdate": "engine",
    "best_shape": "runs",
    "complete": "completion",
    "export_adapter": "peft",
    "fine_tune": "runs",
    "import_adapter": "peft",
    "load_backbone": "models",
    "load_tokenizer": "data",
    "prepare_task": "engine",
    "save_backbone": "models",
} | dict.fromkeys(optimizers.__all__, "optimizers")

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxmux' has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
