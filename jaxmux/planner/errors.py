"""The exception that planning raises."""

from ..errors import InputError


class PlanningError(InputError):
    """Nothing can be planned with these tasks, sizes or limits. The message names the value or the
    limit at fault and, where possible, a change that would help."""
