"""Checks of what a run is given, before anything is read."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxmux.models import REMAT_POLICIES
from jaxmux.planner import PlanningError
from jaxmux.tasks import Task, TaskError

_CHOICES = {"dtype": ("auto", "bfloat16", "float32"), "remat": ("auto", *REMAT_POLICIES)}
_COUNTS = (
    "tokens_per_microbatch",
    "checkpoint_every",
    "keep_checkpoints",
    "max_bad_steps",
    "sample_tokens",
)


def check_options(options: Mapping[str, Any]) -> None:
    """Checks arguments of `fine_tune`, by name; those of other names are left alone.

    Raises:
      PlanningError: one is outside its range.
    """
    for name, known in _CHOICES.items():
        if options[name] not in known:
            expected = ", ".join(known)
            raise PlanningError(f"{name} should be one of {expected}, found {options[name]!r}")
    for name in _COUNTS:
        if type(options[name]) is not int or options[name] < 1:
            raise PlanningError(
                f"{name} should be an integer of at least 1, found {options[name]!r}"
            )
    memory_gib = options["memory_gib"]
    if memory_gib is not None and not memory_gib > 0:
        raise PlanningError(f"memory_gib should be positive, found {memory_gib!r}")


def check_names(tasks: Sequence[Task]) -> None:
    """Checks that no two tasks have one name.

    Raises:
      TaskError: they have.
    """
    names = [task.name for task in tasks]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise TaskError(f"task {repeated[0]!r}: {names.count(repeated[0])} tasks have this name")
