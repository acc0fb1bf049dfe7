"""The exception of planning."""

from ..errors import InputError


class PlanningError(InputError):
    """Tasks, sizes or limits with which nothing can be planned.

    Examples are tasks that do not fit into memory and a chunk length that is not a power of two.
    The message names the value or the limit at fault, and where possible a change that would help.
    """
