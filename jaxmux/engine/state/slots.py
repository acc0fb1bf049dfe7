"""The slots of the engine: the task of each slot and its progress, the sizes of the pool that holds
the arrays of all tasks, and tasks that have left."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxmux.data import Rendering, Sample
from jaxmux.data.stored_samples import chained, taken, target_counts, target_tokens
from jaxmux.models import MODULES, BackboneConfig
from jaxmux.objectives import Graded, Known, TargetLogProbs
from jaxmux.objectives.token_losses import SUMS
from jaxmux.optimizers import OPTIMIZERS
from jaxmux.peft import KINDS, Layout, LeafSpec, SlotArrays, crop, own_leaves, pad
from jaxmux.peft.leaves import named_leaves
from jaxmux.planner.costs.pool_spec import PoolSpec, merge_pool_specs
from jaxmux.tasks import Task, TaskError

from ..rounds.rounds import RoundPlan
from ..tasks.prepared_task import PreparedTask
from ..tasks.progress import TaskProgress
from .renewal import slots_to_renew, slots_with_pairs
from .stored_state import StoredState
from .train_state import (
    SlotKind,
    SlotState,
    TrainState,
    pool_specs,
    slot_specs,
    state_specs,
    written_specs,
)
from .updates import DueUpdates, Hyperparameters, SlotsByOptimizer


class TrainedTask(NamedTuple):
    """A task that has been trained, without its data. Its progress does not change any more.

    Attributes:
      samples, held_out_samples: numbers of training and held-out samples or pairs.
      fingerprints: hashes of the data, from `PreparedTask.fingerprints`.
      rendering: how the records of its training data became text.
    """

    task: Task
    progress: TaskProgress
    samples: int
    held_out_samples: int
    fingerprints: Mapping[str, str]
    rendering: Rendering

    @classmethod
    def of(
        cls, prepared: PreparedTask, progress: TaskProgress, fingerprints: Mapping[str, str]
    ) -> "TrainedTask":
        return cls(
            prepared.task,
            progress,
            samples=prepared.task.objective.count(prepared.samples.samples),
            held_out_samples=prepared.task.objective.count(prepared.eval_samples),
            fingerprints=fingerprints,
            rendering=prepared.samples.rendering,
        )


@dataclasses.dataclass
class Measuring:
    """A measurement of a task's held-out loss that still has samples to dispatch. If the task's
    objective needs a reference, the first one also reads the training samples.

    Attributes:
      step: number of steps that the measured adapter has trained.
      batch: the samples that are read: those that are held out, and behind them training samples.
      held_out: number of held-out samples.
      training: indices of the training samples that are read; None if the reference is known, or is
        not needed.
      samples: number of samples of `batch` that have been dispatched.
      scores: for each of these samples, as far as results have arrived, the scores of its tokens
        (`rounds.results.Scores`).
      tokens: number of tokens in these samples' chunks, padding included.
    """

    step: int
    batch: Sequence[Sample]
    held_out: int
    training: Int[np.ndarray, " read"] | None = None
    samples: int = 0
    scores: list[np.ndarray] = dataclasses.field(default_factory=list)
    tokens: int = 0


class Reference(NamedTuple):
    """What an objective knows of its reference (`Objective.known`), float64: for each sample a
    number, or one for each target token, one sample after another. The training samples have NaN if
    the task does not train on them."""

    training: Float[np.ndarray, " numbers"]
    held_out: Float[np.ndarray, " numbers"]

    @classmethod
    def of(
        cls, prepared: PreparedTask, log_probs: Sequence[TargetLogProbs], held_out: int
    ) -> "Reference":
        """The reference of a task, from the log-probabilities of its held-out samples, of which
        there are `held_out`, and behind them of its `trained_samples`."""
        objective, is_trained = prepared.task.objective, cls._is_trained(prepared)
        training, of_held_out = map(objective.known, (log_probs[held_out:], log_probs[:held_out]))
        all_training = np.full(len(is_trained), np.nan)
        known = _joined(training)
        # NaN stands for what is unknown. With an infinite number, the update is skipped too.
        all_training[is_trained] = np.where(np.isnan(known), -np.inf, known)
        return cls(all_training, _joined(of_held_out))

    def of_training(self, prepared: PreparedTask, indices: Sequence[int]) -> Known:
        """The reference of some training samples."""
        if not prepared.task.objective.by_token:
            return self.training[indices]
        sizes = self._sizes(prepared)[0]
        ends = np.cumsum(sizes)
        return [self.training[ends[i] - sizes[i] : ends[i]] for i in indices]

    def of_held_out(self, prepared: PreparedTask) -> Known:
        if not prepared.task.objective.by_token:
            return self.held_out
        return np.split(self.held_out, np.cumsum(self._sizes(prepared)[1])[:-1])

    def lacks(self, prepared: PreparedTask) -> bool:
        """Whether a sample that the task trains on is unknown."""
        return bool(np.isnan(self.training[self._is_trained(prepared)]).any())

    @classmethod
    def of_arrays(cls, arrays: SlotArrays) -> "Reference | None":
        """The inverse of `arrays`; None without arrays."""
        if not arrays:
            return None
        found = {name: x.view(np.float64).ravel() for name, x in arrays.items()}
        return cls(*(found.get(name, np.zeros(0)) for name in cls._fields))

    @property
    def arrays(self) -> SlotArrays:
        """The bits of the numbers by name, uint32 [numbers, 2], because JAX may round float64.
        Arrays without numbers are left out, because checkpoints cannot hold them."""
        found = {name: x for name, x in self._asdict().items() if len(x)}
        return {name: x.view(np.uint32).reshape(-1, 2) for name, x in found.items()}

    @classmethod
    def specs(cls, prepared: PreparedTask) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes and dtypes of `arrays` for a task."""
        totals = zip(cls._fields, map(np.sum, cls._sizes(prepared)), strict=True)
        return {
            name: jax.ShapeDtypeStruct((int(total), 2), np.uint32)
            for name, total in totals
            if total
        }

    @classmethod
    def _is_trained(cls, prepared: PreparedTask) -> Bool[np.ndarray, " numbers"]:
        """Which numbers of `training` belong to samples on which the task trains."""
        sizes = cls._sizes(prepared)[0]
        trained = np.zeros(len(sizes), bool)
        trained[prepared.trained_samples] = True
        return np.repeat(trained, sizes)

    @staticmethod
    def _sizes(prepared: PreparedTask) -> list[Int[np.ndarray, " samples"]]:
        """Number of numbers of each training and of each held-out sample."""
        parts = prepared.samples.samples, prepared.eval_samples
        if prepared.task.objective.by_token:
            return [target_counts(samples) for samples in parts]
        return [np.ones(len(samples), np.int64) for samples in parts]


def _joined(known: Known) -> Float[np.ndarray, " numbers"]:
    return known if isinstance(known, np.ndarray) else np.concatenate([np.zeros(0), *known])


class Weighted(NamedTuple):
    """The objective of a global batch that is trained in two passes. `weights` has, for each
    sample, the weight of the loss at each of its positions."""

    weights: Sequence[Float[np.ndarray, " read_tokens"]]
    graded: Graded


@dataclasses.dataclass
class Slot:
    """The task in a slot, and its progress.

    Attributes:
      stop_after: number of steps after which the task stops although it has more; None if it trains
        all of them.
      pause_after: number of steps after which the task waits for the decision of a rung, see
        `Bracket`; None if it need not wait.
      timed_since: the time on `time.monotonic` up to which the seconds of `progress` have been
        counted. None until the first results have arrived, because the time before them is mostly
        compilation.
      measuring: the measurement that must end before the task trains again; None if there is none.
      best: function that waits for the adapter with the best value of `Task.best_metric`, and
        returns its arrays by path; None if it is not kept, or not known yet.
      computed: by index of a global batch that has not been updated, number of its tokens that have
        been computed, with padding, as far as results have been fetched.
      part_of_turn: number of these tokens that belong to a partly computed turn.
      awaited: number of dispatched updates whose results have not been fetched: 0 or 1.
      reference: the reference of the objective; None if it needs none, or if it is not known yet.
      weighted: the current global batch, if its objective needs log-probabilities and they have
        been computed.
    """

    prepared: PreparedTask
    progress: TaskProgress
    stop_after: int | None = None
    pause_after: int | None = None
    timed_since: float | None = None
    measuring: Measuring | None = None
    best: Callable[[], SlotArrays] | None = None
    computed: Counter[int] = dataclasses.field(default_factory=Counter)
    part_of_turn: int = 0
    awaited: int = 0
    reference: Reference | None = None
    weighted: Weighted | None = None
    name: str = dataclasses.field(init=False)

    def __post_init__(self):
        self.name = self.prepared.task.name

    @property
    def kind(self) -> SlotKind:
        return SlotKind(self.prepared.kind.name, self.prepared.task.optimizer.kind)

    @property
    def steps_dispatched(self) -> int:
        """Number of steps that have been dispatched, including those before a restart."""
        return self.progress.step + self.awaited

    @property
    def running(self) -> bool:
        return self.progress.status == "running"

    @property
    def steps(self) -> int:
        return self.prepared.steps if self.stop_after is None else self.stop_after

    @property
    def steps_for_now(self) -> int:
        """Number of steps after which the task has to wait or ends."""
        return self.steps if self.pause_after is None else min(self.steps, self.pause_after)

    @property
    def lacks_reference(self) -> bool:
        return self.prepared.task.objective.needs_reference and self.reference is None

    def begin_measuring(self, step: int) -> None:
        """Begins a measurement after a number of steps, if none has begun."""
        if self.measuring is None:
            held_out, training = self.prepared.eval_samples, None
            batch = held_out
            if self.lacks_reference:
                training = self.prepared.trained_samples
                samples = self.prepared.samples.samples
                batch = chained((held_out, taken(samples, training)))
            self.measuring = Measuring(step, batch, len(held_out), training)

    @property
    def held_out_tokens(self) -> int:
        return target_tokens(self.prepared.task.objective.trained(self.prepared.eval_samples))

    def is_measured_after(self, step: int) -> bool:
        every = self.prepared.task.eval_every
        # A task may be extended when its last step has been dispatched.
        lasts = (self.steps, self.prepared.steps_at(step - 1), self.pause_after)
        return bool(self.prepared.eval_samples) and (
            step in lasts or (every is not None and step % every == 0)
        )

    def restore(self, progress: TaskProgress) -> None:
        """Continues from saved progress. If the held-out loss was being measured then, it is
        measured again."""
        self.progress, self.measuring, self.weighted = progress, None, None
        step = progress.step
        if self.lacks_reference:
            if step:
                raise ValueError(
                    f"task {self.name!r}: the log-probabilities of its reference are missing"
                )
            self.begin_measuring(0)
        elif self.reference and self.reference.lacks(self.prepared):
            raise TaskError(
                f"task {self.name!r}: has more steps than before, which were less than an epoch, "
                "and the reference of the other samples is not known; train it anew"
            )
        # The number of held-out tokens is known since the first measurement.
        known = progress.eval_step == step if step else progress.eval_target_tokens
        if self.prepared.eval_samples and not known and (not step or self.is_measured_after(step)):
            self.begin_measuring(step)

    def lose_gradients(self) -> None:
        self.computed.clear()
        self.part_of_turn = 0

    def count_seconds(self, begins: bool = False) -> None:
        """Adds the time since the last call to the seconds of the task. `begins` starts the clock
        of a task that has had no results so far."""
        now = time.monotonic()
        if self.timed_since is not None:
            self.progress.seconds += now - self.timed_since
        if begins or self.timed_since is not None:
            self.timed_since = now

    def leave_out_seconds(self) -> None:
        """Restarts a running clock, so that the time since the last `count_seconds` does not
        count."""
        if self.timed_since is not None:
            self.timed_since = time.monotonic()


# Among the arrays of a task, prefix of the paths of the best adapter.
BEST = "best/"
# Prefix of the paths of the reference of the task's objective.
REFERENCE = "reference/"
# Prefix of the paths of the gradients of the current global batch.
ACCUMULATED = "accumulators/"


class SuspendedTask(NamedTuple):
    """A task that has left the engine, with everything that it needs to continue.

    Attributes:
      slot: the task and its progress, into which results of its last update may still be entered.
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
        """A task that another engine has suspended. `arrays` returns the arrays of `with_kept` at
        this progress, as NumPy arrays on the host."""
        current, kept = without_kept(arrays())
        slot = Slot(prepared, TaskProgress(), best=kept.best, reference=kept.reference)
        slot.restore(progress)
        return cls(slot, lambda: current)

    def with_kept(self) -> Callable[[], SlotArrays]:
        kept = kept_arrays(self.slot)
        return lambda: after_last_update(self.arrays()) | kept()


def after_last_update(arrays: SlotArrays) -> SlotArrays:
    """The arrays of a task after its last update, without the gradients accumulated since."""
    kept = {path: array for path, array in arrays.items() if not path.startswith(ACCUMULATED)}
    return kept | {"sums": np.zeros(SUMS, np.float32)}


class Kept(NamedTuple):
    """What is kept of a task besides its slot: a function that returns the arrays of the adapter
    with the best value of `Task.best_metric`, by path, and the reference of its objective. None if
    a task has none."""

    best: Callable[[], SlotArrays] | None
    reference: Reference | None


def kept_arrays(slot: Slot) -> Callable[[], SlotArrays]:
    """A function that returns the arrays of `Kept` with the paths that a checkpoint has."""
    best, reference = slot.best, slot.reference
    arrays = reference.arrays if reference else {}
    known = {f"{REFERENCE}{name}": array for name, array in arrays.items()}
    if best is None:
        return lambda: known
    return lambda: {f"{BEST}{path}": array for path, array in best().items()} | known


def without_kept(arrays: SlotArrays) -> tuple[SlotArrays, Kept]:
    """Separates the arrays of a checkpoint into those of the slot and the others."""
    current = {p: array for p, array in arrays.items() if not p.startswith((BEST, REFERENCE))}
    best, reference = (
        {path.removeprefix(prefix): x for path, x in arrays.items() if path.startswith(prefix)}
        for prefix in (BEST, REFERENCE)
    )
    return current, Kept((lambda: best) if best else None, Reference.of_arrays(reference))


def pool_of(
    config: BackboneConfig,
    tasks: Sequence[PoolSpec],
    reserved: PoolSpec,
    keep_moments: bool = False,
) -> tuple[PoolSpec, TrainState]:
    """The pool that holds tasks, and the description of its arrays. A task is given as the pool
    that would hold only this task. `reserved` has the smallest sizes. With `keep_moments`, the pool
    has room for the moments of `reserved.optimizer`."""
    pool = merge_pool_specs(tasks, reserved)
    if keep_moments and moments_of(reserved) > moments_of(pool):
        pool = pool._replace(optimizer=reserved.optimizer)
    modules = MODULES if pool.modules is None else sorted(pool.modules)
    return pool, pool_specs(
        config, modules, pool.slots, pool.rank, optimizer=pool.optimizer, others=pool.others
    )


def refuse_outgrowing(name: str, needed: PoolSpec, pool: PoolSpec) -> None:
    """Raises TaskError if a task, for which the pool `needed` would suffice, needs another rank,
    linear, dropout or optimizer than `pool` has."""
    modules = MODULES if pool.modules is None else pool.modules
    missing = ", ".join(sorted({*needed.modules} - {*modules}))
    lacking = "; ".join(_missing_kinds(needed, pool))
    adapts = f"it adapts {missing}"
    # Keys are options of a server that reserve sizes.
    problems = {
        "reserved_rank": f"its rank is {needed.rank}, the pool's is {pool.rank}"
        * (needed.rank > pool.rank),
        "reserved_targets": f"{adapts}, for which the pool has no arrays" * bool(missing),
        "reserved_adapters": lacking,
        "reserved_dropout": "it has dropout, for which the pool was not made"
        * (needed.dropout and not pool.dropout),
    }
    for option, problem in problems.items():
        if problem:
            raise TaskError(f"task {name!r}: {problem} (option {option})")
    if moments_of(needed) > moments_of(pool):
        raise TaskError(
            f"task {name!r}: its optimizer {needed.optimizer} has more moments than the pool"
        )


def _missing_kinds(needed: PoolSpec, pool: PoolSpec) -> Iterator[str]:
    there = {size.kind: size for size in pool.others}
    for size in needed.others:
        adapter, in_pool = f"its adapter of the kind {size.kind!r}", there.get(size.kind)
        if in_pool is None:
            yield f"{adapter} needs arrays that the pool does not have"
            continue
        if size.rank > in_pool.rank:
            field = KINDS[size.kind].size_field
            yield f"{adapter} has size {size.rank} ({field}), the pool's is {in_pool.rank}"
        points = {point.point for point in in_pool.points}
        if missing := ", ".join(each.point for each in size.points if each.point not in points):
            yield f"{adapter} changes {missing}, for which the pool has no arrays"


def moments_of(pool: PoolSpec) -> int:
    return OPTIMIZERS[pool.optimizer].moments


class _Constants(NamedTuple):
    """The arrays of `DueUpdates` that stay the same until tasks come or go. `relative_rates` is the
    learning rate of every trained leaf, layer and slot, divided by that of the slot's task; 0 where
    the task does not train the leaf in the layer, so that `trained` is False there."""

    members: SlotsByOptimizer
    hyper: Hyperparameters
    relative_rates: Float[np.ndarray, "leaves L T"]
    trained: Bool[np.ndarray, "leaves L T"]


class Slots:
    """All occupied slots, and the train state that holds their arrays.

    A task keeps its slot number from `add` to `remove`, unless `resize` moves it. A slot is written
    in place, and the state shrinks only by `resize`, so programs are not compiled again while a new
    task fits.

    Attributes:
      pool: sizes of the state.
      coming: the optimizer kinds that tasks may have; None for all for which the pool has room.
      left: by number, the tasks that have left slots that `clear` has not emptied yet.
    """

    def __init__(self, config: BackboneConfig, reserved: PoolSpec, stored: StoredState):
        self.stored = stored
        self.pool = reserved
        self.coming: Set[str] | None = None
        self._config = config
        self._slots: dict[int, Slot] = {}
        self._constants: _Constants | None = None
        self.left: dict[int, Slot] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._slots

    def __iter__(self) -> Iterator[tuple[int, Slot]]:
        """The numbers and contents of the occupied slots, in the order in which their tasks were
        added."""
        return iter(self._slots.items())

    def __getitem__(self, number: int) -> Slot:
        return self._slots[number]

    @property
    def layout(self) -> Layout | None:
        """The description of the state; None until the first task is added."""
        return self.stored.layout

    @property
    def state(self) -> TrainState | None:
        """The arrays of the state on one device; None until the first task is added. Raises
        RuntimeError if there are several devices."""
        if not self.stored.alone:
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

    def live(
        self,
        after: RoundPlan | None,
        takes_turns: Callable[[Slot], bool],
    ) -> dict[int, int]:
        """By slot, the next step of every task that has one. The steps of the round `after`, which
        is being dispatched, count as trained. `takes_turns` tells whether the measurement of a
        task's held-out loss takes several turns, so that its task waits for it."""
        steps, ends = (after.steps, after.ends) if after else ({}, frozenset())
        live = {}
        for number, slot in self._slots.items():
            step = steps[number] + (number in ends) if number in steps else slot.steps_dispatched
            if not slot.running or slot.measuring or step >= slot.steps_for_now:
                continue
            if number in ends and slot.is_measured_after(step) and takes_turns(slot):
                continue
            live[number] = step
        return live

    def due(self, numbers: Sequence[int]) -> tuple[DueUpdates, dict[int, float]]:
        """The updates of slots as arrays for the compiled programs; slots whose tasks do not run
        any more get no update. Also returns, by slot, the learning rate of every task."""
        layout, constants = self.layout, self._constants
        if constants is None:
            constants = self._constants = self._make_constants()
        due = np.zeros(self.pool.slots, bool)
        due[[number for number in numbers if self.runs(number)]] = True
        rates = {
            number: slot.prepared.learning_rate(slot.progress.updates, slot.progress.step)
            for number, slot in self._slots.items()
        }
        of_slots = np.zeros(self.pool.slots, np.float32)
        of_slots[list(rates)] = list(rates.values())
        kinds = {
            number: self._slots[number].prepared.kind.name
            for number in np.flatnonzero(due).tolist()
        }
        updates = DueUpdates(
            due,
            rates=of_slots * constants.relative_rates,
            hyper=constants.hyper,
            members=constants.members,
            own=constants.trained,
            renewed=slots_to_renew(layout, kinds),
            paired=slots_with_pairs(layout, kinds),
        )
        return updates, rates

    def _make_constants(self) -> "_Constants":
        members: dict[str, list[int]] = {}
        hyper: dict[str, list[Mapping[str, float]]] = {}
        leaf_rows = {name: i for i, name in enumerate(named_leaves(self.layout.tree.accumulators))}
        relative = np.zeros((len(leaf_rows), self._config.num_layers, self.pool.slots), np.float32)
        for number, slot in self:
            optimizer = slot.prepared.task.optimizer
            members.setdefault(optimizer.kind, []).append(number)
            hyper.setdefault(optimizer.kind, []).append(optimizer.hyperparameters())
            for name, rates in slot.prepared.relative_rates.items():
                relative[leaf_rows[name], :, number] = rates
        return _Constants(
            {kind: np.asarray(numbers, np.int32) for kind, numbers in members.items()},
            {
                kind: {name: np.float32([row[name] for row in leaf_rows]) for name in leaf_rows[0]}
                for kind, leaf_rows in hyper.items()
            },
            relative,
            relative > 0,
        )

    def runs(self, number: int) -> bool:
        return number in self._slots and self._slots[number].running

    def number(self, name: str) -> int:
        """The slot number of a task. Raises TaskError if no slot has this task."""
        for number, slot in self:
            if slot.name == name:
                return number
        raise TaskError(f"task {name!r}: not registered; registered are {', '.join(self.names)}")

    def named(self, name: str) -> Slot:
        return self[self.number(name)]

    def add(self, tasks: Sequence[PreparedTask], begin: bool = True) -> None:
        """Gives each task the free slot with the lowest number, and writes its initial adapter
        there. The state is enlarged if the tasks do not fit. If a task cannot make its adapter,
        none gets a slot. Without `begin`, the slots stay empty until `begin` or `write` is
        called."""
        self._make_room(tasks)
        self._constants = None
        added: list[str] = []
        try:
            for prepared in tasks:
                number = self._lowest_free()
                slot = Slot(prepared, TaskProgress())
                if begin:
                    self._write_initial(number, slot)
                if slot.lacks_reference:
                    slot.begin_measuring(0)
                self._slots[number] = slot
                added.append(slot.name)
        except BaseException:
            for name in added:
                self.clear(self.remove(name))
            raise

    def begin(self) -> None:
        for number, slot in self:
            self._write_initial(number, slot)

    def _write_initial(self, number: int, slot: Slot) -> None:
        adapter = named_leaves(slot.prepared.make_adapter())
        arrays = {f"adapter/{name}": value for name, value in adapter.items()}
        self.stored.write(slot.kind, number, self._missing_in_empty(slot, arrays))

    def _missing_in_empty(self, slot: Slot, arrays: SlotArrays) -> SlotArrays:
        """The arrays of a task that differ from those of an empty slot, at sizes from
        `written_specs`. The rest is not sent, because the next round waits for the transfer:
        padding to higher ranks, and zeros, which are half of a new LoRA."""
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
        """Gives a task that has left the free slot with the lowest number, and writes its arrays
        (from `copy_to_host`) there."""
        self._refuse_incomplete(slot, arrays)
        self._make_room([slot.prepared])
        self._constants = None
        number = self._lowest_free()
        self._slots[number] = slot
        if slot.lacks_reference:
            slot.begin_measuring(0)
        try:
            self.stored.write(slot.kind, number, self._missing_in_empty(slot, arrays))
        except BaseException:
            self.clear(self.remove(slot.name))
            raise

    def remove(self, name: str) -> int:
        """Takes a task out of its slot and returns the slot's number. No other task can take the
        slot until `clear` empties it."""
        number = self.number(name)
        self.left[number] = self._slots.pop(number)
        self._constants = None
        return number

    def clear(self, number: int) -> None:
        self.stored.clear(number)
        del self.left[number]

    def resize(self, slots: int) -> dict[int, int]:
        """Gives the state another number of slots, at least as many as there are tasks. A task
        keeps its slot if there still is one of this number; else it moves to the free one with the
        lowest number. No slot may be waiting for `clear`. Returns, by old number, the new number of
        every occupied slot. If a device has too little memory, it raises JaxRuntimeError and
        nothing has changed."""
        if slots < len(self._slots):
            raise ValueError(f"{len(self._slots)} tasks have no room in {slots} slots")
        free = iter(sorted(set(range(slots)) - self._slots.keys()))
        numbers = {old: old if old < slots else next(free) for old in sorted(self._slots)}
        sources = np.full(slots, self.pool.slots, np.int32)
        sources[list(numbers.values())] = list(numbers)
        pool, specs = pool_of(self._config, [], self.pool._replace(slots=slots), keep_moments=True)
        self.stored.resize(specs, sources)
        self.pool, self._constants = pool, None
        self._slots = {numbers[old]: slot for old, slot in self._slots.items()}
        return numbers

    def own_specs(self, name: str) -> SlotState:
        """Specs of a task's arrays in a checkpoint: a `SlotState` of `LeafSpec`."""
        return self.specs_of(self.named(name))

    def specs_of(self, slot: Slot) -> SlotState:
        """The same as `own_specs` for a task that need not be in a slot."""
        task = slot.prepared.task
        leaves = own_leaves(task.adapter, list(slot.prepared.targets), self._config)
        pools = slot.prepared.kind.in_pools(leaves)
        specs = state_specs(pools, 1, slot.kind.optimizer)
        return slot_specs(specs, slot.kind)

    def copy_to_host(
        self, name: str, fields: tuple[str, ...] = SlotState._fields
    ) -> Callable[[], SlotArrays]:
        """Begins to copy the given fields of a task's `SlotState` to the host. The returned
        function waits for the copy, and returns the arrays by path, at the task's own rank and
        modules."""
        number, slot = self.number(name), self.named(name)
        task_specs = {field: getattr(self.own_specs(name), field) for field in fields}
        specs = slot_specs(self.layout.tree, slot.kind)
        copied = self.stored.copy_to_host(slot.kind, number, specs, fields)
        return lambda: crop(copied(), task_specs)

    def write(self, name: str, arrays: SlotArrays) -> None:
        """Replaces all arrays of a task by arrays from `copy_to_host`, of a state of any size.
        Arrays that are left out become empty. Raises ValueError if an array of the adapter or a
        scalar is missing, or the pool has no such array."""
        number, slot = self.number(name), self.named(name)
        self._refuse_incomplete(slot, arrays)
        leaves = self._missing_in_empty(slot, arrays)
        self.stored.clear(number)
        self.stored.write(slot.kind, number, leaves)

    def _refuse_incomplete(self, slot: Slot, arrays: SlotArrays) -> None:
        specs = named_leaves(self.specs_of(slot))
        wanted = {
            leaf for leaf, spec in specs.items() if leaf.startswith("adapter/") or not spec.axes
        }
        if missing := wanted - arrays.keys():
            raise ValueError(f"task {slot.name!r}: {min(missing)} is missing")

    def have_room_for(self, tasks: Sequence[PreparedTask]) -> bool:
        """Whether tasks can be added to the present pool, so that no program is compiled again."""
        pool, specs = self._pool_with(tasks)
        return Layout(specs) == self.layout and pool.dropout == self.pool.dropout

    def warm_up(self) -> None:
        """Reads, writes and clears a slot once, so that nothing is compiled when tasks come and go.
        Does nothing if no slot is free."""
        if len(self._slots) < self.pool.slots:
            self.stored.warm_up(self.optimizers, self._lowest_free())

    @property
    def optimizers(self) -> list[str]:
        kinds = [kind for kind in OPTIMIZERS if OPTIMIZERS[kind].moments <= moments_of(self.pool)]
        return [kind for kind in kinds if self.coming is None or kind in self.coming]

    def _make_room(self, tasks: Sequence[PreparedTask]) -> None:
        self.pool, specs = self._pool_with(tasks)
        self.stored.make_room(specs)

    def _pool_with(self, tasks: Sequence[PreparedTask]) -> tuple[PoolSpec, TrainState]:
        needed = [*self.pools.values(), *(prepared.pool for prepared in tasks)]
        # Slots of tasks that have left cannot be taken before `clear` empties them.
        slots = max(self.pool.slots, len(needed) + len(self.left))
        reserved = self.pool._replace(slots=slots)
        return pool_of(self._config, needed, reserved, keep_moments=self.layout is not None)

    def _lowest_free(self) -> int:
        return min(set(range(self.pool.slots)) - self._slots.keys() - self.left.keys())


def _written(spec: LeafSpec, value: np.ndarray) -> LeafSpec:
    sizes = written_specs(spec)
    return next((size for size in sizes if np.all(np.less_equal(value.shape, size.shape))), spec)


def _is_zero(value: np.ndarray) -> bool:
    """Whether all bits of an array are 0, so that -0.0 is not taken for zero."""
    return not np.ascontiguousarray(value).view(np.bool_).any()
