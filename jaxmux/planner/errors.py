"""The exception of planning."""

from ..errors import InputError


class PlanningError(InputError):
    """Tasks, sizes or limits with which nothing can be planned. The message names the value or the
    limit at fault, and where possible a change that would help."""
