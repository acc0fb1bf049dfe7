"""Measures what the cost models of `jaxmux.planner` are fitted to, and how well they predict."""

from .grid import CPU_GRID, Grid
from .prediction_check import Case, Comparison, compare, default_cases, mean_absolute_error
from .profiler import complete_profile
from .random_tasks import in_other_names, random_samples, random_task

__all__ = [
    "CPU_GRID",
    "Case",
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
