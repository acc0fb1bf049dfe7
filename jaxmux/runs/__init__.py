"""Training runs: one call of `fine_tune` trains tasks from their data to exported adapters, with
checkpoints, metrics and reports in a run directory."""

from jaxmux.errors import Interrupted

from .checkpoints import read_task
from .joined_processes import join_processes
from .run import fine_tune
from .run_directory import RunDirectory, RunDirectoryError, read_record
from .run_options import RunOptions, check_names
from .run_shape import best_shape
from .server import tuning_server
from .server_options import ServerOptions
from .serving import serve
from .specification_limits import SpecificationLimits
from .summary import Summary
from .task_json import read_specification, task_from_json, task_to_json
from .task_schema import task_schema
from .tenant_files import copy_files
from .tenant_limits import TenantLimits
from .training_notes import notes_of_record
from .watched_specification import watched_schema

__all__ = [
    "Interrupted",
    "RunDirectory",
    "RunDirectoryError",
    "RunOptions",
    "ServerOptions",
    "SpecificationLimits",
    "Summary",
    "TenantLimits",
    "best_shape",
    "check_names",
    "copy_files",
    "fine_tune",
    "join_processes",
    "notes_of_record",
    "read_record",
    "read_specification",
    "read_task",
    "serve",
    "task_from_json",
    "task_schema",
    "task_to_json",
    "tuning_server",
    "watched_schema",
]
