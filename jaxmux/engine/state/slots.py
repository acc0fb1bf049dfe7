"""Which task is in which slot, the sizes of the pool of all slots, and what does not fit into
it."""

from collections.abc import Callable, Iterator, Sequence, Set

import numpy as np
from jaxtyping import Bool, Float

from jaxmux.models import MODULES, BackboneConfig
from jaxmux.optimizers import OPTIMIZERS
from jaxmux.peft import KINDS, Layout, LeafSpec, SlotArrays, crop, kind_of, own_leaves, pad
from jaxmux.peft.leaves import named_leaves
from jaxmux.planner.costs.pool_spec import PoolSpec, merge_pool_specs
from jaxmux.tasks import TaskError

from ..tasks.prepared_task import PreparedTask
from ..tasks.progress import TaskProgress
from .slot import Slot
from .stored_state import StoredState
from .train_state import SlotState, TrainState, pool_specs, slot_specs, state_specs, written_specs
from .updates import Hyperparameters, SlotsByOptimizer


def pool_of(
    config: BackboneConfig,
    tasks: Sequence[PoolSpec],
    reserved: PoolSpec,
    keep_moments: bool = False,
) -> tuple[PoolSpec, TrainState]:
    """The pool that holds tasks, and the description of its arrays.

    Args:
      config: configuration of the backbone.
      tasks: by task, the pool that would hold only this task.
      reserved: smallest sizes of the pool.
      keep_moments: whether the pool has room for the moments of `reserved.optimizer`.
    """
    pool = merge_pool_specs(tasks, reserved)
    if keep_moments and moments_of(reserved) > moments_of(pool):
        pool = pool._replace(optimizer=reserved.optimizer)
    modules = MODULES if pool.modules is None else sorted(pool.modules)
    sizes = pool.slots, pool.rank, pool.optimizer, pool.others
    return pool, pool_specs(config, modules, *sizes)


def refuse_outgrowing(name: str, own: PoolSpec, pool: PoolSpec) -> None:
    """Checks that a task fits into a pool.

    Args:
      name: name of the task.
      own: the pool that would hold only this task.
      pool: the pool.

    Raises:
      TaskError: the task needs another rank, linear, dropout or optimizer than the pool has.
    """
    modules = MODULES if pool.modules is None else pool.modules
    missing = ", ".join(sorted({*own.modules} - {*modules}))
    lacking = "; ".join(_missing_kinds(own, pool))
    adapts = f"it adapts {missing}"
    # By option of a server, what a task needs beyond it.
    problems = {
        "reserved_rank": f"its rank is {own.rank}, the pool's is {pool.rank}"
        * (own.rank > pool.rank),
        "reserved_targets": f"{adapts}, for which the pool has no arrays" * bool(missing),
        "reserved_adapters": lacking,
        "reserved_dropout": "it has dropout, for which the pool was not made"
        * (own.dropout and not pool.dropout),
    }
    for option, problem in problems.items():
        if problem:
            raise TaskError(f"task {name!r}: {problem} (option {option})")
    if moments_of(own) > moments_of(pool):
        raise TaskError(
            f"task {name!r}: its optimizer {own.optimizer} has more moments than the pool"
        )


def _missing_kinds(own: PoolSpec, pool: PoolSpec) -> Iterator[str]:
    """What a task needs of other adapter kinds than LoRA, and the pool lacks: a clause for each."""
    there = {size.kind: size for size in pool.others}
    for size in own.others:
        adapter, found = f"its adapter of the kind {size.kind!r}", there.get(size.kind)
        if found is None:
            yield f"{adapter} needs arrays that the pool does not have"
            continue
        if size.rank > found.rank:
            field = KINDS[size.kind].size_field
            yield f"{adapter} has size {size.rank} ({field}), the pool's is {found.rank}"
        points = {point.point for point in found.points}
        if missing := ", ".join(each.point for each in size.points if each.point not in points):
            yield f"{adapter} changes {missing}, for which the pool has no arrays"


def moments_of(pool: PoolSpec) -> int:
    """Number of moments for which a pool has room."""
    return OPTIMIZERS[pool.optimizer].moments


class Slots:
    """All slots that are taken, and the train state that holds their arrays.

    A task keeps its slot number from `add` to `remove`, unless `resize` moves it. A slot is written
    in place, and the state shrinks only by `resize`, so programs are not compiled again while a new
    task fits.

    Attributes:
      stored: the arrays that training changes, on their devices.
      pool: sizes of the state.
      coming: the optimizer kinds that tasks may have; None for all for which the pool has room.
    """

    def __init__(self, config: BackboneConfig, reserved: PoolSpec, stored: StoredState):
        """Creates slots without tasks.

        Args:
          config: configuration of the backbone.
          reserved: smallest sizes of the state.
          stored: where the state is kept; it has no arrays yet.
        """
        self.stored = stored
        self.pool = reserved
        self.coming: Set[str] | None = None
        self._config = config
        self._slots: dict[int, Slot] = {}
        # By number, the tasks that have left slots that are not empty yet.
        self._left: dict[int, Slot] = {}

    def __contains__(self, number: int) -> bool:
        """Whether a slot is taken."""
        return number in self._slots

    def __iter__(self) -> Iterator[tuple[int, Slot]]:
        """The slots that are taken, with their numbers, in the order in which their tasks were
        added."""
        return iter(self._slots.items())

    def __getitem__(self, number: int) -> Slot:
        return self._slots[number]

    @property
    def layout(self) -> Layout | None:
        """The description of the state, a `TrainState` of `LeafSpec`; None until the first task is
        added."""
        return self.stored.layout

    @property
    def state(self) -> TrainState | None:
        """The arrays of the state on one device; None until the first task is added. Raises
        RuntimeError if there are several devices."""
        if self.stored.homes != [None]:
            raise RuntimeError("the state lies on several devices; read tasks with task_arrays")
        return self.stored.states[0] if self.stored.states else None

    @state.setter
    def state(self, state: TrainState) -> None:
        self.stored.states = [state]

    @property
    def names(self) -> list[str]:
        return [slot.name for _, slot in self]

    @property
    def pools(self) -> dict[str, PoolSpec]:
        """By name of the task, the pool that would hold only this task."""
        return {slot.name: slot.prepared.pool for _, slot in self}

    @property
    def members(self) -> SlotsByOptimizer:
        """By optimizer kind, the numbers of the slots that use it."""
        members: dict[str, list[int]] = {}
        for number, slot in self:
            members.setdefault(slot.kind.optimizer, []).append(number)
        return {kind: np.asarray(numbers, np.int32) for kind, numbers in members.items()}

    @property
    def hyperparameters(self) -> Hyperparameters:
        """By optimizer kind, the numbers of the optimizers of `members`, as `DueUpdates` has
        them."""
        hyper = {}
        for kind, numbers in self.members.items():
            optimizers = (self[number].prepared.task.optimizer for number in numbers)
            rows = [optimizer.hyperparameters() for optimizer in optimizers]
            hyper[kind] = {name: np.float32([row[name] for row in rows]) for name in rows[0]}
        return hyper

    @property
    def left(self) -> dict[int, Slot]:
        """By number, the tasks that have left, until `clear` empties their slots."""
        return dict(self._left)

    def runs(self, number: int) -> bool:
        """Whether a slot has a task that is running."""
        return number in self._slots and self._slots[number].running

    def number(self, name: str) -> int:
        """The slot number of a task.

        Raises:
          TaskError: no slot has this task.
        """
        for number, slot in self:
            if slot.name == name:
                return number
        raise TaskError(f"task {name!r}: not registered; registered are {', '.join(self.names)}")

    def named(self, name: str) -> Slot:
        return self[self.number(name)]

    def add(self, tasks: Sequence[PreparedTask], begin: bool = True) -> None:
        """Gives each task the free slot with the lowest number, and writes its initial adapter
        there. If one of them cannot make its adapter, none gets a slot.

        Args:
          tasks: the tasks; the state is enlarged if they do not fit.
          begin: False leaves the slots empty until `begin` or `write`.
        """
        self._make_room(tasks)
        added: list[str] = []
        try:
            for prepared in tasks:
                number = self._lowest_free()
                slot = Slot(prepared, TaskProgress())
                if begin:
                    self._write_initial(number, slot)
                self._slots[number] = slot
                added.append(slot.name)
        except BaseException:
            for name in added:
                self.clear(self.remove(name))
            raise

    def begin(self) -> None:
        """Writes the initial adapters of all tasks."""
        for number, slot in self:
            self._write_initial(number, slot)

    def _write_initial(self, number: int, slot: Slot) -> None:
        """Writes the initial adapter to an empty slot."""
        adapter = named_leaves(slot.prepared.make_adapter())
        arrays = {f"adapter/{name}": value for name, value in adapter.items()}
        self.stored.write(slot.kind, number, self._missing_in_empty(slot, arrays))

    def _missing_in_empty(self, slot: Slot, arrays: SlotArrays) -> SlotArrays:
        """What an empty slot lacks of the arrays of a task, at sizes from `written_specs`. The rest
        is not sent, since the next round waits for it: higher ranks, and zeros, which are half of a
        new LoRA.

        Args:
          slot: the task.
          arrays: its arrays by path, for a slot of any size.
        """
        specs = named_leaves(slot_specs(self.layout.tree, slot.kind))
        if unknown := arrays.keys() - specs.keys():
            raise ValueError(f"task {slot.name!r}: no place for {min(unknown)}")
        sizes = {
            name: _written(specs[name], value)
            for name, value in arrays.items()
            if specs[name].padding or not _is_zero(value)
        }
        return pad({name: arrays[name] for name in sizes}, sizes)

    def put_back(self, slot: Slot, arrays: SlotArrays) -> None:
        """Gives a task that has left the free slot with the lowest number.

        Args:
          slot: the task with its progress.
          arrays: its arrays by path, from `copy_to_host`.
        """
        self._refuse_incomplete(slot, arrays)
        self._make_room([slot.prepared])
        number = self._lowest_free()
        self._slots[number] = slot
        try:
            self.stored.write(slot.kind, number, self._missing_in_empty(slot, arrays))
        except BaseException:
            self.clear(self.remove(slot.name))
            raise

    def remove(self, name: str) -> int:
        """Takes a task out of its slot, which no other task can take until `clear` empties it.
        Returns the number of the slot."""
        number = self.number(name)
        self._left[number] = self._slots.pop(number)
        return number

    def clear(self, number: int) -> None:
        """Empties a slot whose task has left, so that another task can take it."""
        self.stored.clear(number)
        del self._left[number]

    def resize(self, slots: int) -> dict[int, int]:
        """Gives the state another number of slots. A task keeps its slot if there still is one of
        this number; else it moves to the free one with the lowest number. No slot may be waiting
        for `clear`.

        Args:
          slots: the number of slots, at least that of the tasks.

        Returns:
          By old number, the new number of every slot that is taken.

        Raises:
          ValueError: there are more tasks.
          jax.errors.JaxRuntimeError: a device has too little memory; nothing has changed.
        """
        if slots < len(self._slots):
            raise ValueError(f"{len(self._slots)} tasks have no room in {slots} slots")
        free = iter(sorted(set(range(slots)) - self._slots.keys()))
        numbers = {old: old if old < slots else next(free) for old in sorted(self._slots)}
        sources = np.full(slots, self.pool.slots, np.int32)
        sources[list(numbers.values())] = list(numbers)
        pool, specs = pool_of(self._config, [], self.pool._replace(slots=slots), keep_moments=True)
        self.stored.resize(specs, sources)
        self.pool = pool
        self._slots = {numbers[old]: slot for old, slot in self._slots.items()}
        return numbers

    def own_specs(self, name: str) -> SlotState:
        """Shapes and dtypes of the arrays that a checkpoint holds of a task: a `SlotState` of
        `LeafSpec`."""
        return self.specs_of(self.named(name))

    def specs_of(self, slot: Slot) -> SlotState:
        """The same of a task that need not have a place."""
        task = slot.prepared.task
        own = own_leaves(task.adapter, list(slot.prepared.targets), self._config)
        pools = kind_of(task.adapter).in_pools(own)
        specs = state_specs(pools, 1, slot.kind.optimizer)
        return slot_specs(specs, slot.kind)

    def copy_to_host(
        self, name: str, fields: tuple[str, ...] = SlotState._fields
    ) -> Callable[[], SlotArrays]:
        """Begins to copy the arrays of a task to the host.

        Args:
          name: name of the task.
          fields: the fields of `SlotState` to copy.

        Returns:
          A function that waits for the copy, and returns the arrays by path, at the task's own rank
          and modules.
        """
        number, slot = self.number(name), self.named(name)
        own = {field: getattr(self.own_specs(name), field) for field in fields}
        specs = slot_specs(self.layout.tree, slot.kind)
        copied = self.stored.copy_to_host(slot.kind, number, specs, fields)
        return lambda: crop(copied(), own)

    def copy_waits(self, name: str, fields: tuple[str, ...]) -> bool:
        """Whether `copy_to_host` would wait until other copies have arrived on the host.

        Args:
          name: name of the task.
          fields: the fields of `SlotState` to copy.
        """
        return self.stored.copy_waits(self.named(name).kind, fields)

    def write(self, name: str, arrays: SlotArrays) -> None:
        """Replaces all arrays of a task.

        Args:
          name: name of the task.
          arrays: arrays from `copy_to_host`, of a state of any size. Those that are left out become
            empty.

        Raises:
          ValueError: an array of the adapter or a scalar is missing, or there is no place for an
            array.
        """
        number, slot = self.number(name), self.named(name)
        self._refuse_incomplete(slot, arrays)
        leaves = self._missing_in_empty(slot, arrays)
        self.stored.clear(number)
        self.stored.write(slot.kind, number, leaves)

    def _refuse_incomplete(self, slot: Slot, arrays: SlotArrays) -> None:
        """ValueError if an array of the adapter or a scalar is missing."""
        own = named_leaves(self.specs_of(slot))
        wanted = {
            leaf for leaf, spec in own.items() if leaf.startswith("adapter/") or not spec.axes
        }
        if missing := wanted - arrays.keys():
            raise ValueError(f"task {slot.name!r}: {min(missing)} is missing")

    def rates(self, learning_rates: dict[int, float]) -> Float[np.ndarray, "leaves L T"]:
        """The learning rate of every trained leaf, layer and slot, as `DueUpdates` has it.

        Args:
          learning_rates: by slot number, the task's learning rate; other slots have rate 0.
        """
        rows = {name: i for i, name in enumerate(named_leaves(self.layout.tree.accumulators))}
        rates = np.zeros((len(rows), self._config.num_layers, self.pool.slots), np.float32)
        for number, rate in learning_rates.items():
            for name, relative in self._slots[number].prepared.relative_rates.items():
                rates[rows[name], :, number] = np.float32(rate) * relative
        return rates

    def own_leaves(self) -> Bool[np.ndarray, "leaves L T"]:
        """Whether a slot's task trains a leaf in a layer, as `DueUpdates` has it."""
        return self.rates(dict.fromkeys(self._slots, 1.0)) > 0

    def have_room_for(self, tasks: Sequence[PreparedTask]) -> bool:
        """Whether tasks can be added without another pool, for which programs would be compiled."""
        pool, specs = self._pool_with(tasks)
        return Layout(specs) == self.layout and pool.dropout == self.pool.dropout

    def warm_up(self) -> None:
        """Reads, writes and clears a slot once, so that nothing is compiled when tasks come and
        go. If all slots are taken, nothing is done."""
        if len(self._slots) < self.pool.slots:
            self.stored.warm_up(self.optimizers, self._lowest_free())

    @property
    def optimizers(self) -> list[str]:
        """The optimizer kinds that tasks may have."""
        kinds = [kind for kind in OPTIMIZERS if OPTIMIZERS[kind].moments <= moments_of(self.pool)]
        return [kind for kind in kinds if self.coming is None or kind in self.coming]

    def _make_room(self, tasks: Sequence[PreparedTask]) -> None:
        """Creates the state, or enlarges it if the tasks do not fit."""
        self.pool, specs = self._pool_with(tasks)
        self.stored.make_room(specs)

    def _pool_with(self, tasks: Sequence[PreparedTask]) -> tuple[PoolSpec, TrainState]:
        """The pool that has room for further tasks, and the description of its arrays."""
        needed = [*self.pools.values(), *(prepared.pool for prepared in tasks)]
        # A slot that is not empty yet cannot be taken.
        slots = max(self.pool.slots, len(needed) + len(self._left))
        reserved = self.pool._replace(slots=slots)
        return pool_of(self._config, needed, reserved, keep_moments=self.layout is not None)

    def _lowest_free(self) -> int:
        return min(set(range(self.pool.slots)) - self._slots.keys() - self._left.keys())


def _written(spec: LeafSpec, value: np.ndarray) -> LeafSpec:
    """The smallest size at which an array can be written to its empty slot."""
    sizes = written_specs(spec)
    return next((own for own in sizes if np.all(np.less_equal(value.shape, own.shape))), spec)


def _is_zero(value: np.ndarray) -> bool:
    """Whether all bits of an array are 0."""
    return not np.ascontiguousarray(value).view(np.bool_).any()
