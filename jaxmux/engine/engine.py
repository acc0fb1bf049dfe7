"""The engine: a loop of rounds with tasks that come and go, and can be read."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import suppress

import jax

from jaxmux.errors import OutOfDeviceMemory, ran_out_of_memory
from jaxmux.models import Backbone, device_peak, planned_remat
from jaxmux.peft import Adapter, SlotArrays, adapter_of
from jaxmux.planner import PlanningError
from jaxmux.planner.costs.admission import Admission
from jaxmux.planner.costs.pool_spec import PoolSpec, refuse_stages
from jaxmux.planner.numbers import numbered
from jaxmux.sharding import PlacedBackbone
from jaxmux.tasks import TaskError

from .devices.size_ahead import DeviceSizeAhead, ProgramsAhead, SizeAhead
from .engine_options import EngineOptions, EngineSize
from .round_loop import RoundLoop
from .state.slots import (
    SuspendedTask,
    after_last_update,
    best_arrays,
    refuse_outgrowing,
    without_best,
)
from .state.train_state import SlotState, TrainState
from .tasks.prepared_task import PreparedTask
from .tasks.progress import TaskProgress


class Engine(RoundLoop):
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
    not wait for it while the tasks fit into the pool. Several devices first end what they do if a
    program for such a change has not run yet; `warm_up` runs all of them in advance.

    Attributes:
      backbone: the frozen backbone; of several replicas, the first one.
      options: the settings; `resize` changes their sizes.
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
        super().__init__(backbone, options, programs, self._observe_memory)
        self.admission = admission
        self._more_admissions = more_admissions
        self._peak = 0
        self._refuse_stages({"reserved_adapters": options.reserved})

    def register_tasks(self, tasks: Sequence[PreparedTask], begin: bool = True) -> None:
        """Adds tasks to be trained from their first step.

        Call it between two rounds. The training of the registered tasks goes on undisturbed. If the
        new tasks do not fit into the arrays, the devices end what has begun, the arrays are
        enlarged and the programs are compiled again. If there is an error, no task is added.

        Args:
          tasks: the tasks, from `prepare_task`.
          begin: False leaves out the initial adapters, until `restore_task` puts the tasks back or
            `begin_tasks` is called.

        Raises:
          TaskError: a name is registered already or occurs twice, or a sample is longer than a row
            (`options.shape.row_len`).
          PlanningError: a round of all tasks, new and registered, would not fit into the device's
            memory, or a pipeline cannot train a task (`refuse_stages`).
          RuntimeError: a round is unfinished.
        """
        self._refuse_tasks(tasks)
        self._make_room(tasks)
        self._slots.add(tasks, begin)

    def begin_tasks(self) -> None:
        """Writes the initial adapters of all tasks, none of which has been trained.

        Raises:
          TaskError: a task cannot make its adapter.
        """
        self._slots.begin()

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
        self._warm_up()

    @property
    def size(self) -> EngineSize:
        """The size of the pool and of the microbatches as they are."""
        return EngineSize(self._slots.pool.slots, self.options.shape.rows)

    def compile_ahead(self, size: EngineSize) -> SizeAhead:
        """Begins to compile the programs for another size in a thread, for `resize`.

        Args:
          size: the size.

        Raises:
          PlanningError: the replicas have different shapes, or the engine trains in several
            processes.
        """
        if jax.process_count() > 1:
            raise PlanningError("programs for another size are compiled ahead in one process only")
        own, options = self._slots, self.options.of_size(size)
        pool, sizes = own.pool._replace(slots=size.slots), (self.size, size)
        if self._replicas is None:
            backbone = self.backbone
            return DeviceSizeAhead(sizes, backbone, options, pool, own.optimizers, own.layout)
        from .devices.several_devices import MeshSizeAhead

        return MeshSizeAhead(sizes, self._replicas, options, pool, own.optimizers, own.stored)

    def refusal_of(self, size: EngineSize) -> str | None:
        """Why rounds of another size would not fit into the devices' memory, as `admission`
        predicts; None if they would, or if nothing is predicted.

        Args:
          size: the size.
        """
        reserved = self._slots.pool
        for admission in self._admissions:
            own = dataclasses.replace(admission, reserved=reserved)
            if reason := own.refusal(size.slots, size.rows):
                return reason
        return None

    @property
    def microbatches_at_once(self) -> int:
        """Number of microbatches that keep all devices busy: one for each data shard, and twice as
        many for each stage of a pipeline."""
        found = 0
        for own in self._executor.replicas:
            stages = len(own.replica.stages)
            found += own.replica.shards * (1 if stages == 1 else 2 * stages)
        return found

    def resize(self, size: EngineSize, programs: SizeAhead | None = None) -> None:
        """Changes the number of slots and of the rows of a microbatch between two rounds. Tasks go
        on where they are; their later results may differ in the last bits from those of another
        size.

        The devices end what has begun. Then the state moves.

        Args:
          size: the new size, with at least as many slots as there are tasks.
          programs: from `compile_ahead`; None compiles what is missing now, and runs it once.

        Raises:
          ValueError: there are more tasks, or `programs` are for another size.
          PlanningError: the replicas have different shapes.
          OutOfDeviceMemory: a device has too little memory. The engine has its old size.
          RuntimeError: a round is unfinished.
        """
        if programs and programs.sizes[1] != size:
            raise ValueError(f"the programs are for {programs.sizes[1]}, the engine gets {size}")
        self._refuse_unfinished_round()
        self._settle()
        self._executor.collect()
        self._fetch()
        self._clear_left_slots()
        before = self.size
        self._executor.release()
        try:
            self._take_size(size, programs)
        except (OutOfDeviceMemory, jax.errors.JaxRuntimeError) as e:
            if not ran_out_of_memory(e):
                raise
            # If the old size does not fit any more either, the next round says so.
            with suppress(OutOfDeviceMemory):
                self._take_size(before, None)
            self._lose_gradients()
            raise OutOfDeviceMemory(
                f"a device has too little memory for {numbered(size.slots, 'slot')} and "
                f"microbatches of {size.rows * self.options.shape.row_len} tokens"
            ) from None

    def _take_size(self, size: EngineSize, programs: SizeAhead | None) -> None:
        """Moves the state to the slots of another size, and goes on with its programs."""
        options = self.options.of_size(size)
        self._take_options(options, self._slots.resize(size.slots), programs)

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
        last update that was dispatched. The devices do not wait for it, but if as many copies as
        fit are on their way, the host does (`snapshot_waits`).

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

    def snapshot_waits(self, name: str) -> bool:
        """Whether a snapshot would wait until earlier ones have arrived on the host, because as
        many copies as fit are on their way.

        Args:
          name: name of the task.

        Raises:
          TaskError: no task of this name is registered.
        """
        return self._slots.copy_waits(name, ("adapter", "optimizer"))

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

    def result(
        self, name: str, snapshot: Callable[[], SlotArrays] | None = None
    ) -> Callable[[], Adapter]:
        """Begins to copy the adapter to the host that the training of a task has given so far: the
        one with the lowest held-out loss if the task keeps it, else the one after the last update
        that was dispatched. The devices do not wait for it.

        Args:
          name: name of the task.
          snapshot: from `snapshot`, if it has just been called: its adapter need not be copied
            once more.

        Returns:
          A function that waits for the copy, and returns the adapter as `adapter` does.

        Raises:
          TaskError: no task of this name is registered.
        """
        slot = self._slots.named(name)
        copied = slot.best or snapshot or self._slots.copy_to_host(name, ("adapter",))
        spec = slot.prepared.task.adapter
        return self._copies.submit(lambda: adapter_of(copied(), spec, self.backbone.config)).result

    def suspend(self, name: str) -> SuspendedTask:
        """Removes a task, whose place another task can then take, and keeps all that it needs to go
        on from its last update, or from its last turn if its global batch is not complete.

        On meshes with dp, fsdp or tp, and with several replicas, an incomplete global batch begins
        again: there a gradient is the sum of what several devices have accumulated, and to form it
        now would change the order of later sums.

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
        if self._position.goes_on(number) and self._sums_at_one_place:
            # What has begun of the next turn must have ended, because its gradients are kept too.
            self._settle()
            accumulated = self._position.accumulated(number)
        copied = self._copies.submit(self._slots.copy_to_host(name)).result if accumulated else None
        suspended = SuspendedTask(slot, copied or self.snapshot(name), accumulated)
        slot.count_seconds()
        self.release(name)
        return suspended

    def resume(self, suspended: SuspendedTask) -> None:
        """Lets a suspended task go on, with the bits that it would have had without a break. With
        several replicas its samples may go to others than they would have, which changes the order
        of sums.

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
        if not suspended.accumulated:
            slot.lose_gradients()
        self._make_room([slot.prepared])
        slot.leave_out_seconds()
        self._slots.put_back(slot, suspended.arrays())
        self._position.restore(self._slots.number(slot.name), suspended.accumulated)

    def extend(self, name: str, steps: int) -> None:
        """Lets a task train more steps. The learning rates of the updates that have not been
        dispatched follow a schedule that spreads over all of them.

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
        slot.prepared = slot.prepared.extended(steps, self.steps_dispatched(name))

    def steps_dispatched(self, task: str | SuspendedTask) -> int:
        """Number of steps of a task whose updates have been dispatched.

        Args:
          task: name of a registered task, or a task that has been suspended.

        Raises:
          TaskError: no task of this name is registered.
        """
        slot = self._slots.named(task) if isinstance(task, str) else task.slot
        return slot.steps_dispatched

    def refuse_outgrowing(self, prepared: PreparedTask) -> None:
        """Checks that a task fits into the pool and the microbatches as they are, if it has a place
        to itself.

        Args:
          prepared: the task.

        Raises:
          TaskError: it does not fit; the message names the setting at fault.
          PlanningError: a pipeline cannot train it (`refuse_stages`).
        """
        prepared.refuse_rows_of(self.options.shape.row_len)
        self._refuse_stages({f"task {prepared.task.name!r}": prepared.pool})
        refuse_outgrowing(prepared.task.name, prepared.pool, self._slots.pool)

    @property
    def names(self) -> list[str]:
        """Names of the registered tasks, in the order of their registration."""
        return self._slots.names

    @property
    def begun(self) -> list[str]:
        """Names of the registered tasks that have had a place, so that they have arrays. Only a
        `QueuedEngine` has others."""
        return self.names

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
        self._executor.collect()
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
            in the current global batch whose gradients are part of `arrays`. Turns of the batch
            that are over then do not count in `TaskUpdate.computed_tokens`.

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
        slot.restore(progress)
        slot.lose_gradients()
        own, slot.best = without_best(arrays)
        self._slots.write(name, own)
        if slot.running:
            self._position.restore(self._slots.number(name), accumulated)

    def _refuse_tasks(self, tasks: Sequence[PreparedTask]) -> None:
        """Raises an error if tasks cannot be added."""
        names = self._slots.names
        for prepared in tasks:
            name = prepared.task.name
            if name in names:
                raise TaskError(f"task {name!r}: a task of this name is registered already")
            prepared.refuse_rows_of(self.options.shape.row_len)
            names.append(name)
        self._refuse_stages({f"task {p.task.name!r}": p.pool for p in tasks})
        # The state keeps the size that it has reached, and what fits into it takes no memory.
        reserved = self._slots.pool
        if self.admission:
            self.admission = dataclasses.replace(self.admission, reserved=reserved)
        if not self._slots.have_room_for(tasks):
            for admission in self._admissions:
                own = dataclasses.replace(admission, reserved=reserved)
                own.require({p.task.name: p.pool for p in tasks}, self._slots.pools)
        self._refuse_unfinished_round()

    def _refuse_stages(self, pools: dict[str, PoolSpec]) -> None:
        """Raises PlanningError if a pipeline of this engine cannot train tasks with these pools."""
        for own in self._replicas or ():
            refuse_stages(pools, len(set(own.homes)), len(own.parts))

    @property
    def _sums_at_one_place(self) -> bool:
        """Whether each gradient is summed up on one device."""
        (first, *others) = self._executor.replicas
        return not others and all(stage.devices == 1 for stage in first.replica.stages)

    @property
    def _admissions(self) -> tuple[Admission, ...]:
        """What predicts whether something fits into the memory of each kind of replica."""
        return (*filter(None, [self.admission]), *self._more_admissions)

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
