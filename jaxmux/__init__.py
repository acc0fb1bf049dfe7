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
from pathlib import Path
from typing import Any

# In a checkout, some packages of jaxmux, such as jaxmux.data, stand beside jaxmux/, not in it. This
# makes them importable if Python finds the checkout before an installation, as it does for a
# command that is run in the checkout.
_CHECKOUT = Path(__file__).resolve().parent.parent
if all((_CHECKOUT / name).exists() for name in ("pyproject.toml", "data", "sharding")):
    __path__.append(str(_CHECKOUT))

# By module, the public names that it defines.
_NAMES = {
    "data": ("DataError", "Sample", "Source", "load_tokenizer", "rollout"),
    "distributions": ("Integers", "LogUniform", "Uniform"),
    "engine": (
        "Engine",
        "EngineOptions",
        "PreparedTask",
        "TaskUpdate",
        "driven_task",
        "prepare_task",
    ),
    "generation": ("Generator", "Request", "Sampling", "complete"),
    "models": ("Backbone", "BackboneConfig", "BackboneError", "load_backbone", "save_backbone"),
    "objectives": ("CPO", "CustomLoss", "DPO", "KTO", "ORPO", "Policy", "SFT", "SimPO"),
    "optimizers": ("AdamW", "Lion", "SGD", "Schedule"),
    "peft": (
        "IA3",
        "AdapterError",
        "Bottleneck",
        "DiffPruning",
        "DoRA",
        "LNTuning",
        "LoRA",
        "PromptTuning",
        "SparseDiff",
        "TrainedTokens",
        "VeRA",
        "export_adapter",
        "import_adapter",
    ),
    "planner": ("PlanningError",),
    "planner.costs": ("PoolSpec",),
    "planner.packing": ("ShapeClass",),
    "runs": (
        "Interrupted",
        "RunDirectoryError",
        "RunOptions",
        "Summary",
        "best_shape",
        "fine_tune",
    ),
    "server": ("Event", "LiveTraining", "Meter", "ServerOptions", "TaskStatus", "tuning_server"),
    "sweeps": ("Sweep",),
    "tasks": ("Task", "TaskError"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        reason = import_module(".field_checks", __name__).why_left_out(name)
        hint = reason and f"; {reason}"
        raise AttributeError(f"module 'jaxmux' has no attribute {name!r}{hint}")
    value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
