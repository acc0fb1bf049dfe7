"""The exception of planning."""

from ..errors import InputError


class PlanningError(InputError):
    """No plan exists for these tasks under these limits; the message names the limit."""
