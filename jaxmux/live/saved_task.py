"""What a live training saves of a task."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from jaxmux.engine import TaskProgress
from jaxmux.peft import SlotArrays
from jaxmux.tasks import Task

from .meter import Meter
from .states import StateChange


class Extension(NamedTuple):
    """A command that has let a task train more steps.

    Attributes:
      step: number of the task's updates that had been dispatched.
      steps: number of steps that the task is to train since then.
    """

    step: int
    steps: int


class SavedTask(NamedTuple):
    """A task at the end of a round, with all that it needs to go on from there.

    Attributes:
      task: the task as it was registered.
      priority: its priority.
      arrival: number of its arrival.
      passes: number of later tasks of its priority that have begun before it.
      history: its states so far; the last one is the present state.
      meter: what it has used.
      fingerprints: hashes of its data, from `PreparedTask`; empty if they have not been read.
      progress: its progress; None if it has not begun.
      arrays: function that waits for its arrays, and returns them by path; None if it has not begun
        or has ended.
      reached: number of steps that it is known to have trained, some of them perhaps after it was
        saved.
      steps: number of steps that it is to train; None if that is not known yet.
      extensions: the commands that have extended it, in their order. Their steps may come after
        the progress.
      begun_tokens: number of tokens, with padding, that its meter has counted of the global batch
        that comes next. The batch begins again.
      files: its files at the time of its registration, from `file_identities`; empty if its data
        have been read.
      warnings: as in `TaskStatus`.
    """

    task: Task
    priority: int
    arrival: int
    passes: int
    history: tuple[StateChange, ...]
    meter: Meter
    fingerprints: Mapping[str, str]
    progress: TaskProgress | None
    arrays: Callable[[], SlotArrays] | None
    reached: int = 0
    steps: int | None = None
    extensions: tuple[Extension, ...] = ()
    begun_tokens: int = 0
    files: Mapping[str, str] = MappingProxyType({})
    warnings: tuple[str, ...] = ()
