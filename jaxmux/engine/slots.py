"""The slots: who trains in which, and the train state that they share."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jaxmux.models import BackboneConfig
from jaxmux.peft import SlotArrays, slot_arrays, slot_tree
from jaxmux.planner.costs.pool_spec import PoolSpec, merge_pool_specs
from jaxmux.tasks import TaskError

from .prepared_task import PreparedTask
from .progress import TaskProgress
from .train_state import (
    KindSlots,
    SlotState,
    TrainState,
    empty_state,
    fresh_optimizer,
    read_slot,
    write_slot,
)


@dataclasses.dataclass
class Slot:
    """The task of a slot, and how far it has come."""

    prepared: PreparedTask
    progress: TaskProgress

    @property
    def name(self) -> str:
        return self.prepared.task.name

    @property
    def kind(self) -> str:
        return self.prepared.task.optimizer.kind

    @property
    def running(self) -> bool:
        return self.progress.status == "running"


class Slots:
    """The slots that are taken, in order, and the train state in which they lie.

    Attributes:
      state: what steps change; None while no slot is taken.

    Args:
      least_pool: what the state has room for at least.
    """

    def __init__(self, config: BackboneConfig, least_pool: PoolSpec):
        self.state: TrainState | None = None
        self._config = config
        self._least_pool = least_pool
        self._slots: list[Slot] = []

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __getitem__(self, index: int) -> Slot:
        return self._slots[index]

    @property
    def names(self) -> list[str]:
        return [slot.name for slot in self]

    @property
    def pools(self) -> dict[str, PoolSpec]:
        """By name, what each task needs alone."""
        return {slot.name: slot.prepared.pool for slot in self}

    @property
    def pool(self) -> PoolSpec:
        """What the state has room for."""
        return merge_pool_specs(list(self.pools.values()), self._least_pool)

    @property
    def kinds(self) -> KindSlots:
        kinds: dict[str, list[int]] = {}
        for i, slot in enumerate(self):
            kinds.setdefault(slot.kind, []).append(i)
        return {kind: np.asarray(members, np.int32) for kind, members in kinds.items()}

    def index(self, name: str) -> int:
        """Which slot a task has.

        Raises:
          TaskError: none.
        """
        if name not in self.names:
            raise TaskError(
                f"task {name!r}: not registered; registered are {', '.join(self.names)}"
            )
        return self.names.index(name)

    def named(self, name: str) -> Slot:
        return self[self.index(name)]

    def add(self, tasks: Sequence[PreparedTask]) -> None:
        """Gives each task a slot, at its beginning; the others keep what they hold."""
        self._rebuild([*self, *(Slot(prepared, TaskProgress()) for prepared in tasks)])
        for prepared in tasks:
            self.write(prepared.task.name, _fresh_arrays(prepared))

    def remove(self, name: str) -> None:
        """Frees the slot of a task; those behind it move up and keep what they hold."""
        leaver = self.named(name)
        self._rebuild([slot for slot in self if slot is not leaver])

    def read(self, name: str) -> SlotArrays:
        """What the state holds of a task, at true rank."""
        slot = self.named(name)
        tree = read_slot(self.state, slot.kind, self.index(name))
        return _own_arrays(tree, slot.prepared)

    def write(self, name: str, arrays: SlotArrays) -> None:
        """Puts a task where `read` took these arrays, from this state or another."""
        index, kind = self.index(name), self.named(name).kind
        template = jax.eval_shape(lambda: read_slot(self.state, kind, index))
        self.state = write_slot(self.state, kind, index, slot_tree(template, arrays))

    def _rebuild(self, slots: list[Slot]) -> None:
        staying = {slot.name for slot in slots}
        kept = {name: self.read(name) for name in self.names if name in staying}
        self._slots = slots
        self.state = None  # Its memory is needed for the next one.
        self.state = self._empty_state() if slots else None
        for name, arrays in kept.items():
            self.write(name, arrays)

    def _empty_state(self) -> TrainState:
        pool = self.pool
        modules = sorted(pool.modules)
        return empty_state(self._config, modules, self.kinds, pool.slots, pool.rank)


def _fresh_arrays(prepared: PreparedTask) -> SlotArrays:
    kind, adapter = prepared.task.optimizer.kind, prepared.adapter
    zeros = jax.tree.map(np.zeros_like, adapter)
    fresh = SlotState(adapter, zeros, np.float32(0), fresh_optimizer(kind, zeros))
    return _own_arrays(fresh, prepared)


def _own_arrays(tree: SlotState, prepared: PreparedTask) -> SlotArrays:
    return slot_arrays(tree, list(prepared.targets), prepared.task.adapter.rank)
