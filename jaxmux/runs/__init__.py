"""Training runs: one call of `fine_tune` trains tasks from their data to exported adapters, with
checkpoints, metrics and reports in a run directory."""

from jaxmux.errors import Interrupted

from .checkpoints import read_task
from .processes import join_processes
from .run import fine_tune
from .run_directory import RunDirectory, RunDirectoryError, read_record
from .run_options import RunOptions, check_names
from .run_shape import best_shape
from .summary import Summary, notes_of_record

__all__ = [
    "Interrupted",
    "RunDirectory",
    "RunDirectoryError",
    "RunOptions",
    "Summary",
    "best_shape",
    "check_names",
    "fine_tune",
    "join_processes",
    "notes_of_record",
    "read_record",
    "read_task",
]
