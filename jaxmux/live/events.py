"""What happens to tasks, for any number of readers in other threads."""

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

# A reader that falls behind by more events loses the oldest ones.
MOST_UNREAD = 100_000


class Event(NamedTuple):
    """Something that has happened to a task.

    Attributes:
      number: number of the event, from 0. If a reader finds a gap in the numbers, it has lost
        events because it read too slowly.
      time: when it happened, in seconds since 1970.
      task: name of the task.
      kind: "state" (the task's state or its reason has changed), "warning" (something about the
        task is legal but suspicious), "update" (a step of the task has been trained) or
        "evaluation" (its held-out loss has been measured).
      fields: what the event tells: for "state", `state`, `reason`, `priority`, `steps` (None until
        the data have been read), `adapter` (its kind) and `rank` (None if the kind has none); for
        "warning", `warnings`, a list of texts that have not been told before;
        for the others, the fields of `TaskUpdate` or `TaskEvaluation` without the name of the task.
    """

    number: int
    time: float
    task: str
    kind: str
    fields: dict[str, Any]


class EventStream:
    """Passes events on to readers. All methods may be called in any thread."""

    def __init__(self):
        """Creates a stream without readers."""
        self._changed = threading.Condition()
        # By identity, the unread events of each reader. A reader that nobody holds vanishes.
        self._readers: WeakValueDictionary[int, deque[Event]] = WeakValueDictionary()
        self._number = 0
        self._closed = False

    def add(self, time: float, task: str, kind: str, fields: dict[str, Any]) -> Event:
        """Passes an event on to all readers.

        Args:
          time: when it happened, in seconds since 1970.
          task: name of the task.
          kind: kind of the event.
          fields: what it tells.

        Returns:
          The event.
        """
        with self._changed:
            event = Event(self._number, time, task, kind, fields)
            self._number += 1
            for unread in self._readers.values():
                unread.append(event)
            self._changed.notify_all()
        return event

    def read(self) -> Iterator[Event]:
        """Iterates over the events from this call on. The iterator waits for further events until
        the stream is closed."""
        unread: deque[Event] = deque(maxlen=MOST_UNREAD)
        with self._changed:
            self._readers[id(unread)] = unread
        return self._events(unread)

    def close(self) -> None:
        """Ends all iterators when they have passed on their events."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _events(self, unread: deque[Event]) -> Iterator[Event]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: unread or self._closed)
                if not unread:
                    return
                event = unread.popleft()
            yield event
