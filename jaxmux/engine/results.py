"""The results of dispatched updates, which the host fetches one round later."""

import dataclasses
from collections.abc import Iterator, Mapping

import jax

from jaxmux.planner.costs.pool_spec import PoolSpec

from .progress import TaskUpdate, record_update
from .rounds import RoundPlan
from .slots import Slot
from .updates import UpdateStats


@dataclasses.dataclass(frozen=True)
class DispatchedUpdate:
    """An update of several slots in a round, whose results have not been fetched.

    Attributes:
      index: number of the round, from 0.
      plan: the round.
      tasks: by slot number, the tasks that are updated. A task may have left its slot since.
      learning_rates: by slot number, the learning rate of the update.
      pools: the pool that each task of the round needs alone.
      stats: losses and gradient norms, on the device.
    """

    index: int
    plan: RoundPlan
    tasks: Mapping[int, Slot]
    learning_rates: Mapping[int, float]
    pools: list[PoolSpec]
    stats: UpdateStats


class Results:
    """Fetches the results of updates, and records them in the progress of their tasks."""

    def __init__(self, max_bad_steps: int):
        """Creates it without updates.

        Args:
          max_bad_steps: number of consecutive skipped updates after which a task has failed.
        """
        self._max_bad_steps = max_bad_steps
        self._dispatched: list[DispatchedUpdate] = []
        # Results that have been fetched and not yet taken.
        self._fetched: list[TaskUpdate] = []

    def add(self, update: DispatchedUpdate) -> None:
        """Adds an update that has been dispatched."""
        self._dispatched.append(update)

    def awaits(self, slot: Slot) -> bool:
        """Whether a result of this task has not been fetched."""
        return any(slot is own for update in self._dispatched for own in update.tasks.values())

    def fetch(self) -> Iterator[DispatchedUpdate]:
        """Waits for all updates, records their results, and yields each update when that is done.

        Raises:
          jax.errors.JaxRuntimeError: a round has failed on the device.
        """
        while self._dispatched:
            update = self._dispatched[0]
            self._record(update, jax.device_get(update.stats))
            del self._dispatched[0]
            yield update

    def take(self) -> list[TaskUpdate]:
        """The results that have been fetched since the last call."""
        fetched, self._fetched = self._fetched, []
        return fetched

    def _record(self, update: DispatchedUpdate, stats: UpdateStats) -> None:
        for number, slot in update.tasks.items():
            if not slot.running:
                continue
            done = TaskUpdate(
                step=update.index,
                task=slot.name,
                task_step=update.plan.steps[number] + 1,
                loss=float(stats.loss[number]),
                lr=update.learning_rates[number],
                grad_norm=float(stats.grad_norm[number]),
                target_tokens=update.plan.target_tokens[number],
                tokens=update.plan.tokens[number],
                computed_tokens=update.plan.computed_tokens[number],
                skipped=not stats.applied[number],
            )
            record_update(slot.progress, done, slot.prepared.steps, self._max_bad_steps)
            self._fetched.append(done)
