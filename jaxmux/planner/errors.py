"""The exception of planning."""


class PlanningError(ValueError):
    """No plan exists for these tasks under these limits; the message names the limit."""
