"""Tasks as JSON: reading, limits of tenants, their files, and the JSON Schema."""

from .files import copy_files
from .limits import SpecificationLimits, TenantLimits
from .reading import read_specification, task_from_json, task_to_json
from .schema import task_schema, watched_schema

__all__ = [
    "SpecificationLimits",
    "TenantLimits",
    "copy_files",
    "read_specification",
    "task_from_json",
    "task_schema",
    "task_to_json",
    "watched_schema",
]
