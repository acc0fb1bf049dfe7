"""The engine: plans rounds over the slots, and hands out and takes back tasks."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from jaxmux.errors import OutOfDeviceMemory, ran_out_of_memory
from jaxmux.models import Backbone, device_peak, planned_remat
from jaxmux.optimizers import OPTIMIZERS
from jaxmux.peft import Adapter, SlotArrays, adapter_of
from jaxmux.planner import PlanningError
from jaxmux.planner.costs.admission import Admission
from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.sharding import PlacedBackbone, consecutive_parts
from jaxmux.tasks import TaskError

from .compile_ahead import ProgramsAhead
from .engine_options import EngineOptions
from .executor import Executor
from .held_out import HeldOut
from .prepared_task import PreparedTask
from .progress import TaskEvaluation, TaskProgress, TaskUpdate
from .results import DispatchedTurns, DispatchedUpdate, Results
from .round_position import RoundPosition
from .round_stream import RoundStream
from .rounds import RoundPlan
from .single_device import SingleDevice
from .slots import Slots
from .stored_state import StoredState
from .suspended_task import SuspendedTask, after_last_update, best_arrays, without_best
from .train_state import SlotState, TrainState
from .updates import DueUpdates

_log = logging.getLogger("jaxmux")


class Engine:
    """Trains several tasks together, and hands out and takes back their adapters and training
    state.

    A *task* is one fine-tuning job. A *step* of a task is one global batch (the samples of one
    optimizer update) with its update. A *round* is a *turn* of every live task, packed into
    *microbatches*, the units of one forward and backward pass. A turn is a global batch, or as much
    of it as `options.round_tokens` allows; the update follows the last turn. A task is live while
    it has not failed and has steps left. The arrays of all tasks are stacked in a *pool*; the place
    of a task in it is its *slot*.

    The device runs one round ahead of the host: `train_round` dispatches a round, and returns the
    results of the round before it. `drain` fetches the results of the last round. Tasks may come
    and go between two rounds (`register_tasks`, `release`, `suspend`, `resume`), and the devices do
    not wait for it while the tasks fit into the pool.

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
        self._results = Results(options.max_bad_steps)
        # Waits for copies on their way to the host, so that they do not stay on the devices.
        self._copies = ThreadPoolExecutor(1)
        self._position = RoundPosition(self._stream)
        self._held_out = HeldOut(self._slots, self._results, self._executor, self._copies)
        # By the slots of an update that is being dispatched, the learning rate of each slot.
        self._learning_rates: dict[tuple[int, ...], dict[int, float]] = {}
        self._peak = 0

    def register_tasks(self, tasks: Sequence[PreparedTask]) -> None:
        """Adds tasks to be trained from their first step.

        Call it between two rounds. The training of the registered tasks goes on undisturbed. If the
        new tasks do not fit into the arrays, the devices end what has begun, the arrays are
        enlarged and the programs are compiled again. If there is an error, no task is added.

        Args:
          tasks: the tasks, from `prepare_task`.

        Raises:
          TaskError: a name is registered already or occurs twice, or a sample is longer than a row
            (`options.shape.row_len`).
          PlanningError: a round of all tasks, new and registered, would not fit into the device's
            memory.
          RuntimeError: a round is unfinished.
        """
        self._refuse_tasks(tasks)
        self._make_room(tasks)
        self._slots.add(tasks)

    def warm_up(self) -> None:
        """Allocates the pool of `options.reserved`, and compiles and runs all programs once.
        Afterwards tasks that fit into the pool compile nothing when they come and go. Call it
        before any task is registered.

        Raises:
          PlanningError, ValueError: as for `train_round`.
          OutOfDeviceMemory: the device has too little memory for a microbatch.
          RuntimeError: a task is registered.
        """
        own = self._slots
        if own.names or own.left:
            raise RuntimeError("an engine can be warmed up only before tasks are registered")
        self.register_tasks([])
        own.warm_up()
        none = np.zeros(0, np.int32)
        hyper = {
            kind: dict.fromkeys(OPTIMIZERS[kind]().hyperparameters(), none.astype(np.float32))
            for kind in own.optimizers
        }
        due = np.zeros(own.pool.slots, bool)
        none_due = DueUpdates(due, own.rates({}), hyper, dict.fromkeys(own.optimizers, none))
        self._executor.warm_up(none_due, own.pool.dropout)

    def refuse_implementations(self) -> None:
        """Checks that the implementations of attention and of the linears with adapters that the
        options name can serve the registered tasks. Call it before training, which would end there.

        Raises:
          PlanningError: an implementation cannot serve this device, these dtypes or sizes.
        """
        self._executor.refuse_implementations(self._slots.pool.dropout)

    def release(self, name: str) -> None:
        """Removes a task, whose place another task can then take. The engine no longer has its
        adapter. Results of the task that have not been fetched are returned later all the same.

        Args:
          name: name of the task.

        Raises:
          TaskError: no task of this name is registered.
          RuntimeError: a round is unfinished.
        """
        self._refuse_unfinished_round()
        number = self._slots.remove(name)
        self._position.restore(number, ())
        self._position.discard_plans()
        self._clear_left_slots()

    def snapshot(self, name: str) -> Callable[[], SlotArrays]:
        """Begins to copy a task's adapter and optimizer state to the host, as they are after the
        last update that was dispatched. The devices do not wait for it.

        Args:
          name: name of the task.

        Returns:
          A function that waits for the copy, and returns NumPy arrays by path, like `task_arrays`.
          The gradients accumulated since the last update are left out, and so is the best adapter.

        Raises:
          TaskError: no task of this name is registered.
        """
        copied = self._slots.copy_to_host(name, ("adapter", "optimizer"))
        return self._copies.submit(lambda: after_last_update(copied())).result

    def with_best(self, name: str, snapshot: Callable[[], SlotArrays]) -> Callable[[], SlotArrays]:
        """What has to be kept of a task, so that `SuspendedTask.of` can let it go on.

        Args:
          name: name of the task.
          snapshot: from `snapshot`; the results of all updates before it have been fetched.

        Returns:
          A function that waits for the snapshot, and returns its arrays with those of the best
          adapter that is known now, if the task keeps it.

        Raises:
          TaskError: no task of this name is registered.
        """
        best = best_arrays(self._slots.named(name))
        return lambda: snapshot() | best()

    def result(self, name: str) -> Callable[[], Adapter]:
        """Begins to copy the adapter to the host that the training of a task has given so far: the
        one with the lowest held-out loss if the task keeps it, else the one after the last update
        that was dispatched. The devices do not wait for it.

        Args:
          name: name of the task.

        Returns:
          A function that waits for the copy, and returns the adapter as `adapter` does.

        Raises:
          TaskError: no task of this name is registered.
        """
        slot = self._slots.named(name)
        copied = slot.best or self._slots.copy_to_host(name, ("adapter",))
        spec = slot.prepared.task.adapter
        return self._copies.submit(lambda: adapter_of(copied(), spec, self.backbone.config)).result

    def suspend(self, name: str) -> SuspendedTask:
        """Removes a task, whose place another task can then take, and keeps all that it needs to go
        on from its last update, or from its last turn if its global batch is not complete.

        Args:
          name: name of the task.

        Returns:
          The task, for `resume`.

        Raises:
          TaskError: no task of this name is registered.
          RuntimeError: a round is unfinished.
        """
        self._refuse_unfinished_round()
        slot, number = self._slots.named(name), self._slots.number(name)
        accumulated: list[int] = []
        if self._position.goes_on(number):
            # What has begun of the next turn must have ended, because its gradients are kept too.
            self._settle()
            accumulated = self._position.accumulated(number)
        copied = self._copies.submit(self._slots.copy_to_host(name)).result if accumulated else None
        suspended = SuspendedTask(slot, copied or self.snapshot(name), accumulated)
        self.release(name)
        return suspended

    def resume(self, suspended: SuspendedTask) -> None:
        """Lets a suspended task go on, with the bits that it would have had without a break.

        Args:
          suspended: the task, from `suspend` of an engine with the same backbone.

        Raises:
          TaskError: a task of this name is registered.
          PlanningError: a round of all tasks would not fit into the device's memory.
          RuntimeError: a round is unfinished.
        """
        slot = suspended.slot
        self._refuse_tasks([slot.prepared])
        if self._results.awaits(slot):
            self._fetch()
        self._make_room([slot.prepared])
        slot.timed_since = None
        self._slots.put_back(slot, suspended.arrays())
        self._position.restore(self._slots.number(slot.name), suspended.accumulated)

    def extend(self, name: str, steps: int) -> None:
        """Lets a task train more steps. Its learning-rate schedule spreads over all of them.

        Args:
          name: name of the task.
          steps: the new number of steps, those included that the task has trained.

        Raises:
          TaskError: no task of this name is registered, it has ended, or it has at least so many
            steps already.
          RuntimeError: a round is unfinished.
        """
        slot = self._slots.named(name)
        if not slot.running or steps <= slot.prepared.steps:
            raise TaskError(
                f"task {name!r}: it has {slot.prepared.steps} steps and is {slot.progress.status}; "
                "a running task can be extended to more steps"
            )
        self._refuse_unfinished_round()
        self._position.discard_plans()
        slot.prepared = slot.prepared.extended(steps)

    def refuse_outgrowing(self, prepared: PreparedTask) -> None:
        """Checks that a task fits into the pool and the microbatches as they are, if it has a place
        to itself.

        Args:
          prepared: the task.

        Raises:
          TaskError: it does not fit; the message names the setting at fault.
        """
        prepared.refuse_rows_of(self.options.shape.row_len)
        self._slots.refuse_outgrowing(prepared)

    @property
    def capacity(self) -> int:
        """Number of places for tasks in the pool as it is."""
        return self._slots.pool.slots

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
        """Dispatches a round (a turn of every live task), and returns the results of the round
        before it.

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
                    self._plan_following if stream else lambda: None,
                )
            finally:
                self._count(current, done[before:])
            self._count(position.following, outcome.ahead)
            for slots, stats in outcome.updates.items():
                rates = self._learning_rates.pop(slots)
                tasks = {number: self._slots[number] for number in slots if number in rates}
                pools = list(self._slots.pools.values())
                self._results.add(
                    DispatchedUpdate(self.rounds, current, tasks, rates, pools, stats)
                )
            if outcome.lost:
                self._begin_again()
                if self.finished:
                    return self.drain()
                continue
            updates = tuple(u for u in current.updates if u.slots not in outcome.updates)
            if not updates and len(done) == len(current.microbatches):
                break
            self._count_turns(position.following, outcome.ahead)
            position.stop(updates, outcome.ahead)
            self._fetch()
            # A round that has lost a task would be packed otherwise next time: finish it first.
            if all(self._slots.runs(slot) for slot in current.steps):
                return self._results.take()
            stop = lambda: False  # noqa: E731
        self._end_turns(current)
        position.end(outcome.ahead)
        self._clear_left_slots()
        self.rounds += 1
        self._held_out.end_round(current, position.current, self.rounds)
        return self._results.take()

    def _end_turns(self, plan: RoundPlan) -> None:
        """Takes note of the turns of a dispatched round whose global batches go on."""
        tasks = {n: self._slots[n] for n in plan.steps if n not in plan.ends and n in self._slots}
        if not tasks:
            return
        if not plan.ends:
            # No update has waited for the round before.
            self._fetch()
        self._results.add(DispatchedTurns(plan, tasks, self._executor.marker()))

    def begin_evaluation(self, names: Sequence[str]) -> None:
        """Begins to measure the held-out losses of tasks with their current adapters. The results
        arrive with those of the next round, or with `drain`. The engine does this by itself after a
        task's last step, and every `Task.eval_every` steps.

        Args:
          names: names of registered tasks. Those without held-out samples are left out.

        Raises:
          TaskError: a name is not registered.
          PlanningError, ValueError: as for `evaluate`.
          RuntimeError: a round is unfinished.
        """
        self._refuse_unfinished_round()
        self._held_out.measure([self._slots.number(name) for name in names], self.rounds)

    def take_computed_tokens(self) -> dict[str, int]:
        """By name of the task, the number of tokens, with padding, of the rounds whose results have
        arrived since the last call, by which the time of these rounds can be divided among the
        tasks. Tasks that have left since have their share, too."""
        return self._results.take_computed_tokens()

    def take_evaluations(self) -> list[TaskEvaluation]:
        """The held-out losses whose results have arrived since the last call, also of tasks that
        have left since."""
        return self._results.take_evaluations()

    def _plan_following(self) -> RoundPlan | None:
        """The round after the current one, as far as is known; None if it may not begin yet."""
        return self._position.plan_following(self._live(after=self._position.current))

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
        # A stopped executor has ended everything that had begun.
        ended = self._executor.settle() or position.done
        if position.begun_ahead:
            self._count(position.current, ended[len(position.done) :])
            self._count_turns(position.current, ended)
            position.settle(ended)

    def _count_turns(self, plan: RoundPlan | None, ended: Sequence[int]) -> None:
        """Counts the turns that have been trained of a round that is forgotten, if their global
        batches go on. They are not planned again."""
        for number in plan.trained_turns(ended) if plan else ():
            if number in self._slots:
                self._results.count(self._slots[number], plan.computed_tokens[number])

    def _due(self, slots: tuple[int, ...]) -> DueUpdates:
        """The numbers of the updates of these slots."""
        self._fetch()
        own = self._slots
        due = np.zeros(own.pool.slots, bool)
        due[[number for number in slots if own.runs(number)]] = True
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
        for _, slot in self._slots:
            slot.computed_tokens = 0

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
        return self._results.take()

    def _fetch(self) -> None:
        """Waits for all dispatched updates, and records their results."""
        try:
            for update in self._results.fetch():
                self._observe_memory(update.pools)
        except jax.errors.JaxRuntimeError as e:
            if not ran_out_of_memory(e):
                raise
            raise OutOfDeviceMemory(
                f"a device ran out of memory in round {self.rounds}; try remat='full', "
                f"tokens_per_microbatch={self.options.shape.tokens // 2}, or fewer or smaller "
                "tasks"
            ) from None

    def _observe_memory(self, pools: Sequence[PoolSpec]) -> None:
        """Tells `admission` a new peak of memory use in a round. The device reports only the
        highest peak so far.

        Args:
          pools: the pool that each task of the round needs alone.
        """
        one_device = self._slots.stored.homes == [None]
        peak = device_peak() if self.admission and one_device else None
        # A restored round without microbatches may have been updated before anything was compiled.
        if peak and peak > self._peak and self.remat:
            self._peak = peak
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
        found = self._executor.evaluate(tasks)()
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
        copied = self._slots.copy_to_host(name, ("adapter",))
        return adapter_of(copied(), self.prepared(name).task.adapter, self.backbone.config)

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
        copied = self._slots.copy_to_host(name)
        return copied() | best_arrays(self._slots.named(name))()

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
        slot = self._slots.named(name)
        self._refuse_unfinished_round()
        if self._position.begun_ahead or self._results.awaits(slot):
            raise RuntimeError("drain the engine before a task is restored")
        self._position.discard_plans()
        slot.progress = progress
        own, slot.best = without_best(arrays)
        self._slots.write(name, own)
        if slot.running:
            self._position.restore(self._slots.number(name), accumulated)

    def _live(self, after: RoundPlan | None = None) -> dict[int, int]:
        """The next step of every slot whose task has one.

        Args:
          after: a round that is being dispatched, whose steps count as trained; None if there is
            none.
        """
        trained = {} if after is None else after.steps
        steps = {
            number: trained[number] + (number in after.ends)
            if number in trained
            else slot.progress.step + self._results.steps_awaited(slot)
            for number, slot in self._slots
        }
        return {
            number: step
            for number, step in steps.items()
            if self._slots.runs(number) and step < self._slots[number].steps
        }

    def _refuse_unfinished_round(self) -> None:
        position = self._position
        if position.current is not None and not position.begun_ahead:
            raise RuntimeError("tasks may change at the end of a round, and this one is unfinished")

    def _refuse_tasks(self, tasks: Sequence[PreparedTask]) -> None:
        """Raises an error if tasks cannot be added."""
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
        self._refuse_unfinished_round()

    def _make_room(self, tasks: Sequence[PreparedTask]) -> None:
        """Prepares for tasks to be added: rounds that are planned and have not begun are planned
        anew. If the only free places are those of tasks that have just left, the devices end what
        has begun; if the state has to grow, they also free memory."""
        if not self._slots.have_room_for(tasks):
            self._settle()
            self._clear_left_slots()
        if not self._slots.have_room_for(tasks):
            self._executor.release()
            self._peak = device_peak() or 0
        self._position.discard_plans()

    def _clear_left_slots(self) -> None:
        """Empties the slots of tasks that have left, once no round that has begun uses them."""
        current = self._position.current
        for number in self._slots.left.difference(current.steps if current else ()):
            self._slots.clear(number)
            # What a round that had begun has accumulated for the task is gone too.
            self._position.restore(number, ())

    def close(self) -> None:
        """Ends the threads of the engine, and frees what it keeps from round to round. Call it when
        training ends. A later `train_round` prepares microbatches in a new thread, but no more
        snapshots can be taken."""
        self._stream.close()
        self._executor.release()
        self._copies.shutdown()
