"""The states of a task that comes and goes."""

from typing import NamedTuple

QUEUED = "queued"
PREPARING = "preparing"
RUNNING = "running"
PAUSED = "paused"
SUCCEEDED = "succeeded"
FAILED = "failed"
CANCELLED = "cancelled"

# A task in one of these states never trains again.
ENDED = frozenset({SUCCEEDED, FAILED, CANCELLED})

# By state, the states that may follow.
FOLLOWING = {
    PREPARING: {QUEUED, PAUSED, FAILED, CANCELLED},
    QUEUED: {PREPARING, RUNNING, PAUSED, FAILED, CANCELLED},
    # Where training is started again, the data of a task are read again.
    RUNNING: {PREPARING, QUEUED, PAUSED, SUCCEEDED, FAILED, CANCELLED},
    PAUSED: {PREPARING, QUEUED, FAILED, CANCELLED},
    SUCCEEDED: frozenset(),
    FAILED: frozenset(),
    CANCELLED: frozenset(),
}


class StateChange(NamedTuple):
    """The beginning of a state.

    Attributes:
      state: the state.
      reason: why the task is in it, in words; None if there is nothing to say.
      time: when it began, in seconds since 1970.
    """

    state: str
    reason: str | None
    time: float
