"""Measures this machine's devices for the planner's cost models, and checks the models'
predictions.

`complete_profile` measures the points of a `Grid` and writes them to a profile, a JSON file (see
`jaxmux.planner.costs.device_profile`). The models of `jaxmux.planner.costs` are fitted to the
profile. `compare` trains rounds (`CheckedCase`) that the profile does not hold, and compares their
time and memory with the predictions. `random_task` makes tasks on random tokens for such
measurements. The command `jaxmux profile` does all of this.
"""

from .grid import CPU_GRID, Grid
from .prediction_check import CheckedCase, Comparison, compare, default_cases, mean_absolute_error
from .profiler import complete_profile
from .random_tasks import in_other_names, random_samples, random_task

__all__ = [
    "CPU_GRID",
    "CheckedCase",
    "Comparison",
    "Grid",
    "compare",
    "complete_profile",
    "default_cases",
    "in_other_names",
    "mean_absolute_error",
    "random_samples",
    "random_task",
]
