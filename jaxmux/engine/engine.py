"""The engine: plans rounds over the slots, and hands out and takes back tasks."""

import dataclasses
import logging
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxmux.errors import OutOfDeviceMemory, ran_out_of_memory
from jaxmux.models import Backbone, device_peak, planned_remat
from jaxmux.peft import Adapter, SlotArrays, adapter_of
from jaxmux.planner import PlanningError
from jaxmux.planner.costs.admission import Admission
from jaxmux.sharding import PlacedBackbone, consecutive_parts
from jaxmux.tasks import TaskError

from .compile_ahead import ProgramsAhead
from .engine_options import EngineOptions
from .executor import Executor
from .prepared_task import PreparedTask
from .progress import TaskProgress, TaskUpdate, record_update
from .round_position import RoundPosition
from .round_stream import RoundStream
from .rounds import RoundPlan
from .single_device import SingleDevice
from .slots import Slots
from .stored_state import StoredState
from .train_state import SlotState, TrainState
from .updates import DueUpdates, UpdateStats

_log = logging.getLogger("jaxmux")


@dataclasses.dataclass(frozen=True)
class _Pending:
    """A dispatched update whose results have not been fetched yet.

    Attributes:
      index: number of the round, from 0.
      plan: the round.
      slots: the slots of the update.
      learning_rates: by slot, the learning rate of the update.
      stats: losses and gradient norms, on the device.
    """

    index: int
    plan: RoundPlan
    slots: tuple[int, ...]
    learning_rates: dict[int, float]
    stats: UpdateStats


class Engine:
    """Trains several tasks together, and hands out and takes back their adapters and training
    state.

    A *task* is one fine-tuning job. A *step* of a task is one global batch (the samples of one
    optimizer update) with its update. A *round* is one step of every live task, packed into
    *microbatches*, the units of one forward and backward pass. A task is live while it has not
    failed and has steps left. The arrays of all tasks are stacked in a *pool*; the place of a task
    in it is its *slot*.

    The device runs one round ahead of the host: `train_round` dispatches a round, and returns the
    results of the round before it. `drain` fetches the results of the last round. Tasks may be
    registered, released and restored between two rounds, after `drain`.

    Attributes:
      backbone: the frozen backbone; of several replicas, the first one.
      options: the settings that the constructor was given.
      admission: predicts whether a new task fits into memory; None without such a check. The engine
        replaces it when rounds show how much memory they need.
      rounds: number of rounds dispatched so far.
      microbatches: number of microbatches dispatched so far, those of all data shards together.
      computed_tokens: number of tokens of these microbatches, with padding.
    """

    def __init__(
        self,
        backbone: Backbone | PlacedBackbone | Sequence[PlacedBackbone],
        options: EngineOptions,
        admission: Admission | None = None,
        programs: ProgramsAhead | None = None,
        more_admissions: Sequence[Admission] = (),
    ):
        """Creates an engine without tasks; the first task allocates its arrays.

        Args:
          backbone: the frozen backbone, from `load_backbone`, or, for several devices, from
            `sharding.load_placed_backbone`. A list of the latter are replicas, which train
            different samples; the first one has the optimizer states.
          options: sizes of the microbatches, and other settings.
          admission: a `jaxmux.planner.costs.admission.Admission`, which predicts whether a round of
            all tasks fits into the device's memory. `register_tasks` refuses tasks that do not fit.
            None admits every task.
          more_admissions: the same for the memory of further replicas.
          programs: programs that are being compiled for the tasks that will be registered. The
            engine waits for them when it needs them. None lets the engine compile them then.
        """
        self.options = options
        self.admission = admission
        self._more_admissions = more_admissions
        self.rounds = 0
        self.microbatches = 0
        self.computed_tokens = 0
        self._executor: Executor
        if isinstance(backbone, Backbone):
            (options,) = options.of_replicas(1)
            self.backbone = backbone
            stored = StoredState(consecutive_parts([backbone.config.num_layers]), [None])
            self._executor = SingleDevice(backbone, options, stored, programs)
        else:
            # Training on one device needs neither schedules nor their planner.
            from .several_devices import SeveralDevices

            replicas = [backbone] if isinstance(backbone, PlacedBackbone) else list(backbone)
            if not replicas:
                raise PlanningError("an engine needs at least one replica of the backbone")
            self.backbone = replicas[0]
            stored = StoredState(replicas[0].parts, replicas[0].homes)
            self._executor = SeveralDevices(replicas, options, stored)
        self._slots = Slots(self.backbone.config, options.reserved, stored)
        self._stream = RoundStream(self._slots, options, self._executor)
        self._pending: list[_Pending] = []
        # Results that were fetched while a round was dispatched, and not yet returned.
        self._fetched: list[TaskUpdate] = []
        self._position = RoundPosition(self._slots, self._stream)
        # By the slots of an update that is being dispatched, the learning rate of each slot.
        self._learning_rates: dict[tuple[int, ...], dict[int, float]] = {}
        self._peak = 0

    def register_tasks(self, tasks: Sequence[PreparedTask]) -> None:
        """Adds tasks to be trained from their first step.

        Call it between two rounds, after `drain`. The training of the registered tasks goes on
        undisturbed. If the new tasks do not fit into the arrays, the arrays are enlarged and the
        programs are compiled again. If there is an error, no task is added.

        Args:
          tasks: the tasks, from `prepare_task`.

        Raises:
          TaskError: a name is registered already or occurs twice, or a sample is longer than a row
            (`options.shape.row_len`).
          PlanningError: a round of all tasks, new and registered, would not fit into the device's
            memory.
          RuntimeError: a round is unfinished or its results have not been fetched.
        """
        names = self.names
        for prepared in tasks:
            name = prepared.task.name
            if name in names:
                raise TaskError(f"task {name!r}: a task of this name is registered already")
            prepared.refuse_rows_of(self.options.shape.row_len)
            names.append(name)
        # The state keeps the size that it has reached.
        reserved = self._slots.pool
        if self.admission:
            self.admission = dataclasses.replace(self.admission, reserved=reserved)
        for admission in (*filter(None, [self.admission]), *self._more_admissions):
            own = dataclasses.replace(admission, reserved=reserved)
            own.require({p.task.name: p.pool for p in tasks}, self._slots.pools)
        self._pause()
        self._peak = device_peak() or 0
        self._slots.add(tasks)

    def refuse_implementations(self) -> None:
        """Checks that the implementations of attention and of the linears with adapters that the
        options name can serve the registered tasks. Call it before training, which would end there.

        Raises:
          PlanningError: an implementation cannot serve this device, these dtypes or sizes.
        """
        self._executor.refuse_implementations(self._slots.pool.dropout)

    def release(self, name: str) -> None:
        """Removes a task, whose place another task can then take. The engine no longer has its
        adapter.

        Args:
          name: name of the task.

        Raises:
          TaskError: no task of this name is registered.
          RuntimeError: a round is unfinished or its results have not been fetched.
        """
        self._pause()
        self._position.restore(self._slots.number(name), ())
        self._slots.remove(name)

    @property
    def names(self) -> list[str]:
        """Names of the registered tasks, in the order of their registration."""
        return self._slots.names

    @property
    def state(self) -> TrainState | None:
        """The arrays that training changes, on the only device; None before the first registration.

        The next `train_round` reuses the memory of these arrays, so copy values that must outlive
        it.
        """
        return self._slots.state

    def prepared(self, name: str) -> PreparedTask:
        """Returns the prepared task that was registered.

        Args:
          name: name of the task.

        Raises:
          TaskError: no task of this name is registered.
        """
        return self._slots.named(name).prepared

    def progress(self, name: str) -> TaskProgress:
        """Returns a task's position in its training, and its results so far.

        The engine changes this object whenever results are fetched.

        Args:
          name: name of the task.

        Raises:
          TaskError: no task of this name is registered.
        """
        return self._slots.named(name).progress

    @property
    def finished(self) -> bool:
        """True if every task has succeeded, has failed or has had its last step dispatched. The
        results of the last round may still have to be fetched with `drain`."""
        return not self._live()

    @property
    def seconds_waited(self) -> float:
        """Seconds that `train_round` has waited for rounds to be packed. The device may still be
        busy with earlier rounds in this time."""
        return self._stream.seconds_waited

    @property
    def remat(self) -> str | tuple[str, ...] | None:
        """The remat policy of every layer, or one policy for all layers, with which the training
        program is compiled; None before it is."""
        return self._executor.remat

    def train_round(
        self, stop: Callable[[], bool] = lambda: False, stream: bool = True
    ) -> list[TaskUpdate]:
        """Dispatches a round (one global batch of every live task), and returns the results of the
        round before it.

        The call returns before the device has finished the round. It compiles the programs if
        necessary. If no task is live, it only calls `drain`.

        Args:
          stop: function without arguments that is called after every microbatch, for example to
            react to a signal. Once it returns True, `train_round` fetches the results of the round
            before and returns with this round unfinished. The next call continues with the
            remaining microbatches. If the fetched results end a task of this round, the round is
            finished all the same.
          stream: whether a pipeline may begin the round after this one before this one has ended.
            False leaves no gradients of that round behind, so that a checkpoint after this call is
            restored to the same bits on the same devices.

        Returns:
          One `TaskUpdate` for each task of the round before, except tasks that had failed before
          that round was updated. Empty for the first round, and if these results have been fetched
          already.

        Raises:
          PlanningError: `options.attention` cannot serve this device, dtype or row length.
          ValueError: `options.grouped_lora` or `options.remat` is unknown, or
            `options.grouped_lora` cannot serve these tasks on this device.
        """
        position = self._position
        if position.current is None and self.finished:
            return self.drain()
        while True:
            current = position.begin(self._live())
            done, before = position.done, len(position.done)
            try:
                outcome = self._executor.run(
                    current,
                    done,
                    stop,
                    self._due,
                    position.plan_following if stream else lambda: None,
                )
            finally:
                self._count(current, done[before:])
            self._count(position.following, outcome.ahead)
            for slots, stats in outcome.updates.items():
                rates = self._learning_rates.pop(slots)
                self._pending.append(_Pending(self.rounds, current, slots, rates, stats))
            if outcome.lost:
                self._begin_again()
                if self.finished:
                    return self.drain()
                continue
            updates = tuple(u for u in current.updates if u.slots not in outcome.updates)
            if not updates:
                break
            position.stop(updates, outcome.ahead)
            self._fetch()
            # A round that has lost a task would be packed otherwise next time: finish it first.
            if all(self._slots[slot].running for slot in current.steps):
                return self._take_fetched()
            stop = lambda: False  # noqa: E731
        position.end(outcome.ahead)
        self.rounds += 1
        return self._take_fetched()

    def _count(self, plan: RoundPlan | None, dispatched: Sequence[int], times: int = 1) -> None:
        """Counts what all data shards have trained of microbatches with these indices."""
        for i in dispatched:
            replica = self._executor.replicas[plan.microbatches[i].replica]
            self.microbatches += times * replica.replica.shards
            self.computed_tokens += times * replica.tokens

    def _settle(self) -> None:
        """Ends what the executor has begun of the current round before the round before had ended.
        The round is then planned anew, without the samples that are trained."""
        position = self._position
        if position.begun_ahead:
            # A stopped executor has ended everything that had begun.
            ended = self._executor.settle() or position.done
            self._count(position.current, ended[len(position.done) :])
            position.settle(ended)

    def _due(self, slots: tuple[int, ...]) -> DueUpdates:
        """The numbers of the updates of these slots."""
        self._fetch()
        own = self._slots
        due = np.zeros(own.pool.slots, bool)
        due[[number for number in slots if own[number].running]] = True
        rates = {number: slot.prepared.learning_rate(slot.progress.updates) for number, slot in own}
        if slots:
            self._learning_rates[slots] = rates
        return DueUpdates(due, own.rates(rates), own.hyperparameters, own.members)

    def _begin_again(self) -> None:
        """Plans the round anew, from its first microbatch, after the device ran out of memory."""
        self._fetch()
        self._executor.recover()
        _log.warning(
            "the device ran out of memory; round %d begins again, with more recomputation",
            self.rounds,
        )
        self._count(self._position.current, self._position.done, times=-1)
        self._position.begin_again()

    def accumulated(self, name: str) -> list[int]:
        """The samples of a task's unfinished global batch whose gradients are already accumulated.

        A checkpoint in the middle of a round stores this list, for `restore_task`.

        Args:
          name: name of the task.

        Returns:
          Indices of these samples in the task's current global batch, ascending; empty between
          rounds.

        Raises:
          TaskError: no task of this name is registered.
        """
        return self._position.accumulated(self._slots.number(name))

    def drain(self) -> list[TaskUpdate]:
        """Waits for the last round whose update was dispatched, and records its results in the
        `progress` of its tasks.

        Returns:
          One `TaskUpdate` for each task of that round, except tasks that had failed before its
          update. Empty if all results have been fetched already.
        """
        self._settle()
        self._fetch()
        return self._take_fetched()

    def _take_fetched(self) -> list[TaskUpdate]:
        fetched, self._fetched = self._fetched, []
        return fetched

    def _fetch(self) -> None:
        """Waits for all dispatched updates, and records their results."""
        for pending in self._pending:
            try:
                stats = jax.device_get(pending.stats)
            except jax.errors.JaxRuntimeError as e:
                if not ran_out_of_memory(e):
                    raise
                raise OutOfDeviceMemory(
                    f"a device ran out of memory in round {pending.index}; try remat='full', "
                    f"tokens_per_microbatch={self.options.shape.tokens // 2}, or fewer or smaller "
                    "tasks"
                ) from None
            self._observe_memory()
            for number in pending.slots:
                slot = self._slots[number]
                if not slot.running:
                    continue
                done = TaskUpdate(
                    step=pending.index,
                    task=slot.name,
                    task_step=pending.plan.steps[number] + 1,
                    loss=float(stats.loss[number]),
                    lr=pending.learning_rates[number],
                    grad_norm=float(stats.grad_norm[number]),
                    target_tokens=pending.plan.target_tokens[number],
                    tokens=pending.plan.tokens[number],
                    skipped=not stats.applied[number],
                )
                record_update(slot.progress, done, slot.prepared.steps, self.options.max_bad_steps)
                self._fetched.append(done)
        self._pending = []

    def _observe_memory(self) -> None:
        """Tells `admission` a new peak of memory use. The device reports only the highest peak so
        far."""
        one_device = self._slots.stored.homes == [None]
        peak = device_peak() if self.admission and one_device else None
        # A restored round without microbatches may have been updated before anything was compiled.
        if peak and peak > self._peak and self.remat:
            self._peak = peak
            pools = list(self._slots.pools.values())
            self.admission = self.admission.observe(pools, planned_remat(self.remat), peak)

    def evaluate(self, names: Sequence[str]) -> dict[str, float]:
        """The loss of tasks on their held-out samples, with their current adapters and without
        dropout.

        Args:
          names: names of registered tasks.

        Returns:
          By name, the mean cross entropy in nats per target token (token that counts in the loss);
          NaN if the forward pass was not finite. Tasks without held-out samples are left out.

        Raises:
          TaskError: a name is not registered.
          PlanningError: `options.attention` cannot serve this device, dtype or row length.
          ValueError: `options.grouped_lora` is unknown or cannot serve these tasks on this device.
        """
        named = {self._slots.number(name): self._slots.named(name).prepared for name in names}
        tasks = {slot: task for slot, task in named.items() if task.eval_samples}
        if not tasks:
            return {}
        found = self._executor.evaluate(tasks)
        return {task.task.name: float(found[slot]) for slot, task in tasks.items()}

    def adapter(self, name: str) -> Adapter:
        """A task's current adapter, for `export_adapter` or a `Request`.

        Args:
          name: name of the task.

        Returns:
          By path of a linear within a layer ("mlp.up_proj"), `Factors` of the float32 NumPy arrays
          a [L, k, r] and b [L, r, n], for L layers, input width k, output width n and the task's
          rank r.

        Raises:
          TaskError: no task of this name is registered.
        """
        spec = self.prepared(name).task.adapter
        return adapter_of(self.task_arrays(name), spec, self.backbone.config)

    def task_arrays(self, name: str) -> SlotArrays:
        """All arrays of a task that a checkpoint must hold.

        These are its adapter, the gradients and the loss accumulated over the current global batch,
        and its optimizer state. Call `drain` before, so that `progress` belongs to the same moment.

        Args:
          name: name of the task.

        Returns:
          NumPy arrays by path, at the task's own rank and for its own linears, for example
          "adapter/mlp.up_proj/a" [L, k, r] (layers, input width, rank). `restore_task` takes them,
          also in an engine with other tasks or other sizes.

        Raises:
          TaskError: no task of this name is registered.
        """
        return self._slots.read(name)

    def task_specs(self, name: str) -> SlotState:
        """Shapes and dtypes of `task_arrays`, without reading the arrays from the device.

        Args:
          name: name of the task.

        Returns:
          A tree with a `LeafSpec` (shape, dtype, names of axes) in place of each array: a
          `SlotState` with the fields adapter, accumulators (gradients), loss and optimizer.
          `peft.leaves.named_leaves` turns it into a dict with the paths of `task_arrays` as keys.

        Raises:
          TaskError: no task of this name is registered.
        """
        return self._slots.own_specs(name)

    def restore_task(
        self,
        name: str,
        arrays: SlotArrays,
        progress: TaskProgress,
        accumulated: Sequence[int] = (),
    ) -> None:
        """Puts a registered task back to the moment at which its checkpoint was taken.

        Args:
          name: name of the task.
          arrays: the task's arrays by path, from `task_arrays`.
          progress: the task's progress at that moment. The engine keeps and changes this object.
          accumulated: the result of the method `accumulated` at that moment: indices of the samples
            in the current global batch whose gradients are part of `arrays`. Empty between rounds.

        Raises:
          TaskError: no task of this name is registered.
          ValueError: the engine has no place for an array, or a scalar is missing.
          RuntimeError: a round is unfinished or its results have not been fetched.
        """
        self._pause()
        slot = self._slots.named(name)
        slot.progress = progress
        self._slots.write(name, arrays)
        if slot.running:
            self._position.restore(self._slots.number(name), accumulated)

    def _live(self) -> dict[int, int]:
        """The next step of every slot whose task has one."""
        pending = {number for update in self._pending for number in update.slots}
        steps = {number: slot.progress.step + (number in pending) for number, slot in self._slots}
        return {
            number: step
            for number, step in steps.items()
            if self._slots[number].running and step < self._slots[number].prepared.steps
        }

    def _pause(self) -> None:
        """Discards the rounds that are packed ahead; the next round is packed from the tasks'
        progress."""
        if self._pending or self._fetched or self._position.done:
            raise RuntimeError("drain the engine, at the end of a round, before its tasks change")
        self._position.discard_plans()
        # Tasks may need the memory.
        self._executor.release()

    def close(self) -> None:
        """Ends the thread that prepares microbatches ahead of the device. Call it when training
        ends; a later `train_round` starts a new thread."""
        self._stream.close()
        self._executor.release()
