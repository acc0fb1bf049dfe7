"""A task outside the engine, and how its arrays are kept there."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxmux.peft import SlotArrays

from .prepared_task import PreparedTask
from .progress import TaskProgress
from .slot import Slot

# What the paths of the best adapter begin with, among the arrays of a task.
BEST = "best/"
# And those of the gradients of the current global batch.
ACCUMULATED = "accumulators/"


class SuspendedTask(NamedTuple):
    """A task that has left the engine, with all that it needs to go on.

    Attributes:
      slot: the task and its progress. The engine may still enter the results of the task's last
        update into the progress.
      arrays: function that waits for the task's arrays, and returns them by path.
      accumulated: indices of the samples of its current global batch whose gradients are among
        these arrays.
    """

    slot: Slot
    arrays: Callable[[], SlotArrays]
    accumulated: Sequence[int] = ()

    @classmethod
    def of(
        cls, prepared: PreparedTask, progress: TaskProgress, arrays: Callable[[], SlotArrays]
    ) -> "SuspendedTask":
        """A task that another engine has suspended.

        Args:
          prepared: the task.
          progress: its progress.
          arrays: function that returns what `with_best` has returned at this progress, as NumPy
            arrays on the host.
        """
        own, best = without_best(arrays())
        slot = Slot(prepared, TaskProgress(), best=best)
        slot.restore(progress)
        return cls(slot, lambda: own)

    def with_best(self) -> Callable[[], SlotArrays]:
        """What has to be kept of the task, as from `Engine.with_best`."""
        best = best_arrays(self.slot)
        return lambda: after_last_update(self.arrays()) | best()


def after_last_update(arrays: SlotArrays) -> SlotArrays:
    """The arrays of a task without what has been accumulated since its last update."""
    kept = {path: array for path, array in arrays.items() if not path.startswith(ACCUMULATED)}
    return kept | {"loss": np.zeros((), np.float32)}


def best_arrays(slot: Slot) -> Callable[[], SlotArrays]:
    """A function that returns the best adapter of a task, if it is kept, as it is saved."""
    if (best := slot.best) is None:
        return dict
    return lambda: {f"{BEST}{path}": array for path, array in best().items()}


def without_best(arrays: SlotArrays) -> tuple[SlotArrays, Callable[[], SlotArrays] | None]:
    """The arrays of a task that lie on the devices, and a function that returns those of its best
    adapter, if there is one."""
    own = {path: array for path, array in arrays.items() if not path.startswith(BEST)}
    best = {path.removeprefix(BEST): x for path, x in arrays.items() if path.startswith(BEST)}
    return own, (lambda: best) if best else None
