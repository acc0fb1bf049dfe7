"""The states of a task that comes and goes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxmux.printable import STOPPED_EARLY, shown_state

QUEUED = "queued"
PREPARING = "preparing"
RUNNING = "running"
PAUSED = "paused"
SUCCEEDED = "succeeded"
FAILED = "failed"
CANCELLED = "cancelled"

# A task in one of these states has given an adapter.
TRAINED = frozenset({SUCCEEDED, STOPPED_EARLY})
# A task in one of these states never trains again.
ENDED = TRAINED | {FAILED, CANCELLED}

# By state, the states that may follow.
FOLLOWING = {
    PREPARING: {QUEUED, PAUSED, FAILED, CANCELLED},
    QUEUED: {PREPARING, RUNNING, PAUSED, FAILED, CANCELLED},
    # Where training is started again, the data of a task are read again.
    RUNNING: {PREPARING, QUEUED, PAUSED} | ENDED,
    PAUSED: {PREPARING, QUEUED, FAILED, CANCELLED},
    **dict.fromkeys(ENDED, frozenset()),
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

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "StateChange":
        """The change from its fields by name, as files keep them.

        Args:
          fields: the fields. Earlier versions wrote "succeeded" for tasks that stopped early.
        """
        change = cls(**fields)
        return change._replace(state=shown_state(change.state, change.reason))
