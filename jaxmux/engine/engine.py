"""The engine: a loop of rounds with tasks that come and go, and can be read."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import suppress

import jax

from jaxmux.data import Sample
from jaxmux.data.batches import GivenBatches
from jaxmux.data.rollouts import ADVANTAGES, LOGPROBS
from jaxmux.errors import OutOfDeviceMemory, ran_out_of_memory
from jaxmux.models import Backbone, device_peak, planned_remat
from jaxmux.peft import Adapter, SlotArrays, adapter_of
from jaxmux.planner import PlanningError
from jaxmux.planner.costs.admission import Admission
from jaxmux.planner.costs.pool_spec import PoolSpec, refuse_stages
from jaxmux.planner.numbers import numbered
from jaxmux.sharding import PlacedBackbone
from jaxmux.tasks import TaskError

from .devices.programs_ahead import ProgramsAhead
from .engine_options import EngineOptions, EngineSize
from .round_loop import RoundLoop
from .state.slots import (
    SuspendedTask,
    after_last_update,
    kept_arrays,
    refuse_outgrowing,
    without_kept,
)
from .state.train_state import SlotState, TrainState
from .tasks.prepared_task import PreparedTask
from .tasks.progress import TaskProgress, TaskUpdate

# What samples of rollouts say of their tokens.
_VALUES = LOGPROBS, ADVANTAGES


class Engine(RoundLoop):
    """Trains several tasks together. Their adapters and training state can be copied out and put
    back at any time.

    A *task* is one fine-tuning job. A *step* of a task is one global batch (the samples of one
    optimizer update) with its update. A *round* is a *turn* of every live task, packed into
    *microbatches*, the units of one forward and backward pass. A turn is a global batch, or as much
    of it as `options.round_tokens` allows; the update follows the last turn. A task is live while
    it has not failed and has steps left. The arrays of all tasks are stacked in a *pool*; each task
    has a *slot* of it.

    The device runs one round ahead of the host: `train_round` dispatches a round, and returns the
    results of the round before it. `drain` fetches the results of the last round. Tasks may come
    and go between two rounds (`register_tasks`, `release`, `suspend`, `resume`). The devices do not
    wait while the tasks fit into the pool, except that several devices first finish their work if a
    program for the change has not run yet; `warm_up` runs all of them in advance.

    Methods that take the name of a task raise TaskError if no task of this name is registered.
    Methods that add, remove or change tasks raise RuntimeError if a round is unfinished.

    Attributes:
      backbone: the frozen backbone; with several replicas, the first one.
      admission: predicts whether a new task fits into memory; None without such a check. The engine
        replaces it when rounds show how much memory they need.
      rounds, microbatches: numbers dispatched so far, the latter summed over data shards.
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
          admission: predicts whether a round of all tasks fits into the device's memory.
            `register_tasks` refuses tasks that do not fit. None admits every task.
          programs: programs that are being compiled for the tasks that will be registered. None
            compiles them when they are needed.
          more_admissions: the same as `admission`, for the memory of further replicas.
        """
        super().__init__(backbone, options, programs, self._observe_memory)
        self.admission = admission
        self._more_admissions = more_admissions
        self._peak = 0
        self._refuse_stages({"reserved_adapters": options.reserved})

    def register_tasks(self, tasks: Sequence[PreparedTask], begin: bool = True) -> None:
        """Adds tasks to be trained from their first step, between two rounds. If they do not fit
        into the arrays, the devices finish their work, the arrays are enlarged and the programs are
        compiled again. If there is an error, no task is added.

        Args:
          begin: False leaves out the initial adapters, until `restore_task` puts the tasks back or
            `begin_tasks` is called.

        Raises:
          TaskError: a name is registered already or occurs twice, or a sample is longer than a row
            (`options.shape.row_len`).
          PlanningError: a round of all tasks, new and registered, would not fit into the device's
            memory, or a pipeline cannot train a task (`refuse_stages`).
        """
        self._refuse_tasks(tasks)
        self._make_room(tasks)
        self._slots.add(tasks, begin)

    def begin_tasks(self) -> None:
        """Writes the initial adapters of all tasks, none of which may have been trained. TaskError
        if a task cannot make its adapter."""
        self._slots.begin()

    def warm_up(self) -> None:
        """Allocates the pool of `options.reserved`, and compiles and runs all programs once.
        Afterwards nothing is compiled when tasks that fit into the pool come and go. Call it before
        any task is registered. Errors are those of `train_round`."""
        slots = self._slots
        if slots.names or slots.left:
            raise RuntimeError("an engine can be warmed up only before tasks are registered")
        self.register_tasks([])
        self._warm_up()

    @property
    def size(self) -> EngineSize:
        """The present number of slots of the pool, and of rows of a microbatch."""
        return EngineSize(self._slots.pool.slots, self.options.shape.rows)

    def compile_ahead(self, size: EngineSize) -> ProgramsAhead:
        """Begins to compile the programs for another size in a thread, for `resize`. PlanningError
        if the replicas have different shapes, or the engine trains in several processes."""
        if jax.process_count() > 1:
            raise PlanningError("programs for another size are compiled ahead in one process only")
        slots, options = self._slots, self.options.of_size(size)
        pool, sizes = slots.pool._replace(slots=size.slots), (self.size, size)
        kinds, stored = slots.optimizers, slots.stored
        return ProgramsAhead.of_size(sizes, self._replicas, options, pool, kinds, stored)

    def refusal_of(self, size: EngineSize) -> str | None:
        """Why rounds of another size would not fit into the devices' memory, as predicted by
        `admission`; None if they would fit, or if nothing is predicted."""
        reserved = self._slots.pool
        for admission in self._admissions:
            with_pool = dataclasses.replace(admission, reserved=reserved)
            if reason := with_pool.refusal(size.slots, size.rows):
                return reason
        return None

    @property
    def microbatches_at_once(self) -> int:
        """Number of microbatches that keep all devices busy. Each data shard counts one; in a
        pipeline of S stages, it counts 2 S."""
        count = 0
        for replica_input in self._executor.replicas:
            stages = len(replica_input.replica.stages)
            count += replica_input.replica.shards * (1 if stages == 1 else 2 * stages)
        return count

    def resize(self, size: EngineSize, programs: ProgramsAhead | None = None) -> None:
        """Changes the number of slots and of the rows of a microbatch between two rounds. The
        devices finish their work, then the state moves. Tasks continue where they are; their later
        results may differ in the last bits from those at another size.

        Args:
          size: the new size, with at least as many slots as there are tasks.
          programs: from `compile_ahead` for this size; None compiles missing programs now.

        Raises:
          ValueError: there are more tasks, or `programs` are for another size.
          PlanningError: the replicas have different shapes.
          OutOfDeviceMemory: a device has too little memory. The engine has its old size.
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
            # If the old size does not fit any more either, the next round raises the error.
            with suppress(OutOfDeviceMemory):
                self._take_size(before, None)
            self._lose_gradients()
            raise OutOfDeviceMemory(
                f"a device has too little memory for {numbered(size.slots, 'slot')} and "
                f"microbatches of {size.rows * self.options.shape.row_len} tokens"
            ) from None

    def _take_size(self, size: EngineSize, programs: ProgramsAhead | None) -> None:
        options = self.options.of_size(size)
        self._take_options(options, self._slots.resize(size.slots), programs)

    def refuse_implementations(self) -> None:
        """Raises PlanningError if the configured implementations of attention or of the linears
        with adapters cannot serve the registered tasks. Without this call, the first round raises
        the error."""
        self._executor.refuse_implementations(self._slots.pool.dropout)

    def release(self, name: str) -> None:
        """Removes a task and its adapter; another task can then take its slot. Results of the task
        that have not been fetched are still returned later."""
        self._refuse_unfinished_round()
        number = self._slots.remove(name)
        self._position.restore(number, ())
        self._position.discard_plans()
        self._clear_left_slots()

    def train_on(self, name: str, samples: Sequence[Sample]) -> list[TaskUpdate]:
        """Trains one step of a task from `driven_task` on a global batch that is given now, for
        example on rollouts of its present adapter. Other live tasks take their turns meanwhile.
        Waits for the devices.

        Args:
          samples: the samples of the step, at least one. For a `Policy` they have the values
            "logprobs" and "advantages" (`Sample.values`).

        Returns:
          The results of all tasks that have arrived, that of this step last among those of the
          task.

        Raises:
          TaskError: the task has failed or has data of its own; or a sample does not fit into a
            row, has no target token, or lacks values.
          RuntimeError, PlanningError, ValueError, OutOfDeviceMemory: as for `train_round`.
        """
        self._refuse_unfinished_round()
        slot = self._slots.named(name)
        if not isinstance(slot.prepared.batches, GivenBatches):
            raise TaskError(f"task {name!r}: has data of its own, so no batch can be given to it")
        if slot.progress.status == "failed":
            raise TaskError(f"task {name!r}: has failed: {slot.progress.error}")
        batch = self._fitting(name, slot.prepared, samples)
        objective = slot.prepared.task.objective
        if len(batch) % objective.members or not all(sample.target_tokens for sample in batch):
            raise TaskError(
                f"task {name!r}: a batch needs whole {objective.unit}s, and target tokens in each "
                "sample"
            )
        if objective.records == "rollouts" and not all(
            {*_VALUES} <= sample.values.keys() for sample in batch
        ):
            raise TaskError(f"task {name!r}: samples need the values {' and '.join(_VALUES)}")
        slot.weighted = None
        updates = self.drain()
        step = slot.steps_dispatched
        batches = GivenBatches(step, batch)
        slot.prepared = dataclasses.replace(slot.prepared, batches=batches, steps=step + 1)
        slot.progress.status = "running"
        self._position.discard_plans()
        while slot.progress.step == step and slot.running:
            updates += self.train_round()
            updates += self.drain()
        return updates

    def snapshot(self, name: str) -> Callable[[], SlotArrays]:
        """Begins to copy a task's adapter and optimizer state to the host, as they are after the
        last update that was dispatched. The devices do not wait for the copy. The host waits if the
        memory for copies in flight is used up (`snapshot_waits`). The returned function waits for
        the copy, and returns NumPy arrays by path, like `task_arrays` but without accumulated
        gradients and the best adapter."""
        copied = self._slots.copy_to_host(name, ("adapter", "optimizer"))
        return self._copies.submit(lambda: after_last_update(copied())).result

    def snapshot_waits(self, name: str) -> bool:
        """Whether a snapshot would wait until earlier ones have arrived on the host, because the
        memory for copies in flight is used up."""
        kind = self._slots.named(name).kind
        return self._slots.stored.copies.waits((kind, ("adapter", "optimizer")))

    def with_kept(self, name: str, snapshot: Callable[[], SlotArrays]) -> Callable[[], SlotArrays]:
        """Adds to a snapshot what is kept of the task besides its slot, so that `SuspendedTask.of`
        can continue the task: the best adapter, if the task keeps it, and the reference of its
        objective. The results of all updates before the snapshot must have been fetched. The
        returned function waits for the snapshot, and returns its arrays."""
        kept = kept_arrays(self._slots.named(name))
        return lambda: snapshot() | kept()

    def result(
        self, name: str, snapshot: Callable[[], SlotArrays] | None = None
    ) -> Callable[[], Adapter]:
        """Begins to copy the adapter that a task has trained so far to the host: the one with the
        best value of `Task.best_metric` if the task keeps it, else the one after the last update
        that was dispatched. The devices do not wait for it. The returned function waits for the
        copy, and returns the adapter as `adapter` does. With a recent `snapshot`, its adapter is
        used instead of a new copy."""
        slot = self._slots.named(name)
        copied = slot.best or snapshot or self._slots.copy_to_host(name, ("adapter",))
        spec = slot.prepared.task.adapter
        return self._copies.submit(lambda: adapter_of(copied(), spec, self.backbone.config)).result

    def suspend(self, name: str) -> SuspendedTask:
        """Removes a task and keeps everything that it needs to continue after its last update, or
        after its last turn if its global batch is not complete. Another task can then take its
        slot. `resume` takes the result.

        On meshes with dp, fsdp or tp, and with several replicas, an incomplete global batch begins
        again. There a gradient is the sum of the accumulators of several devices, and adding them
        up now would change the order of later sums.
        """
        self._refuse_unfinished_round()
        slot, number = self._slots.named(name), self._slots.number(name)
        accumulated: list[int] = []
        if self._position.goes_on(number) and self._sums_at_one_place:
            # The gradients of the next turn's started microbatches are kept too, so these
            # microbatches must be finished.
            self._settle()
            accumulated = self._position.accumulated(number)
        copied = self._copies.submit(self._slots.copy_to_host(name)).result if accumulated else None
        suspended = SuspendedTask(slot, copied or self.snapshot(name), accumulated)
        slot.count_seconds()
        self.release(name)
        return suspended

    def resume(self, suspended: SuspendedTask) -> None:
        """Continues a task that an engine with the same backbone has suspended, with the bits that
        it would have had without the break. With several replicas, its samples may go to other
        replicas than without the break, which changes the order of sums. Raises TaskError if a task
        of this name is registered, and PlanningError if a round of all tasks would not fit into the
        device's memory."""
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
        """Lets a task train up to `steps` steps, including those that it has trained. The learning
        rates of all updates that have not been dispatched follow a schedule over the new number of
        steps. Raises TaskError if the task has ended, or has at least as many steps already."""
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
        """Number of steps of a task whose updates have been dispatched. `task` is the name of a
        registered task, or a suspended task."""
        slot = self._slots.named(task) if isinstance(task, str) else task.slot
        return slot.steps_dispatched

    def refuse_outgrowing(self, prepared: PreparedTask) -> None:
        """Raises a TaskError that names the setting at fault if a task does not fit into the
        present microbatches and one slot of the present pool, and PlanningError if a pipeline
        cannot train it."""
        prepared.refuse_rows_of(self.options.shape.row_len)
        self._refuse_stages({f"task {prepared.task.name!r}": prepared.pool})
        refuse_outgrowing(prepared.task.name, prepared.pool, self._slots.pool)

    @property
    def names(self) -> list[str]:
        """Names of the registered tasks, in the order of their registration."""
        return self._slots.names

    @property
    def begun(self) -> list[str]:
        """Names of the registered tasks that have had a slot, and therefore arrays. Only a
        `QueuedEngine` has other tasks."""
        return self.names

    @property
    def state(self) -> TrainState | None:
        """The arrays that training changes, on the only device; None before the first registration.

        The next `train_round` reuses the memory of these arrays, so copy values that must outlive
        it.
        """
        return self._slots.state

    def prepared(self, name: str) -> PreparedTask:
        """The task as it was registered, or as `extend` has changed it."""
        return self._slots.named(name).prepared

    def progress(self, name: str) -> TaskProgress:
        """A task's position in its training, and its results so far. The engine changes this object
        whenever results are fetched."""
        return self._slots.named(name).progress

    def _observe_memory(self, pools: Sequence[PoolSpec]) -> None:
        """Tells `admission` a new peak of memory use in a round. The device reports only the
        highest peak so far. `pools` has, for each task of the round, the pool that would hold only
        this task."""
        peak = device_peak() if self.admission and self._slots.stored.alone else None
        # `remat` is None before compilation: a restored round may consist of updates alone.
        if peak and peak > self._peak and self.remat:
            self._peak = peak
            self.admission = self.admission.observe(pools, planned_remat(self.remat), peak)

    def adapter(self, name: str) -> Adapter:
        """A task's current adapter, for `export_adapter` or a `Request`: by path of a linear within
        a layer ("mlp.up_proj"), `Factors` of the float32 NumPy arrays a [L, k, r] and b [L, r, n],
        for L layers, input width k, output width n and the task's rank r."""
        copied = self._slots.copy_to_host(name, ("adapter",))
        return adapter_of(copied(), self.prepared(name).task.adapter, self.backbone.config)

    def task_arrays(self, name: str) -> SlotArrays:
        """All arrays of a task that a checkpoint must hold: its adapter, the gradients and the loss
        accumulated over the current global batch, and its optimizer state. Call `drain` before, so
        that `progress` belongs to the same moment. The result has NumPy arrays by path, at the
        task's own rank and for its own linears, for example "adapter/mlp.up_proj/a" [L, k, r]
        (layers, input width, rank). `restore_task` takes them, also in an engine with other tasks
        or other sizes."""
        self._executor.collect()
        copied = self._slots.copy_to_host(name)
        return copied() | kept_arrays(self._slots.named(name))()

    def task_specs(self, name: str) -> SlotState:
        """Shapes, dtypes and axes of `task_arrays` without reading the arrays, as a `SlotState` of
        `LeafSpec`. `peft.leaves.named_leaves` makes a dict of it with the paths of
        `task_arrays`."""
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
          arrays: the task's arrays by path, from `task_arrays`.
          progress: the task's progress at that moment. The engine keeps and changes this object.
          accumulated: the result of the method `accumulated` at that moment. These samples of the
            current global batch are not trained again, because `arrays` contains their gradients.
            Turns that consist of such samples do not count in `TaskUpdate.computed_tokens`.

        Raises:
          ValueError: the engine's pool has no such array, or a scalar is missing.
          RuntimeError: a round is unfinished or its results have not been fetched.
        """
        slot = self._slots.named(name)
        self._refuse_unfinished_round()
        if self._position.begun_ahead or self._results.awaits(slot):
            raise RuntimeError("drain the engine before a task is restored")
        self._position.discard_plans()
        current, (slot.best, slot.reference) = without_kept(arrays)
        slot.restore(progress)
        slot.lose_gradients()
        self._slots.write(name, current)
        if slot.running:
            self._position.restore(self._slots.number(name), accumulated)

    def _refuse_tasks(self, tasks: Sequence[PreparedTask]) -> None:
        names = self._slots.names
        for prepared in tasks:
            name = prepared.task.name
            if name in names:
                raise TaskError(f"task {name!r}: a task of this name is registered already")
            prepared.refuse_rows_of(self.options.shape.row_len)
            names.append(name)
        self._refuse_stages({f"task {p.task.name!r}": p.pool for p in tasks})
        # The state never shrinks here, so tasks that fit into its present size take no memory.
        reserved = self._slots.pool
        if self.admission:
            self.admission = dataclasses.replace(self.admission, reserved=reserved)
        if not self._slots.have_room_for(tasks):
            for admission in self._admissions:
                with_pool = dataclasses.replace(admission, reserved=reserved)
                with_pool.require({p.task.name: p.pool for p in tasks}, self._slots.pools)
        self._refuse_unfinished_round()

    def _refuse_stages(self, pools: dict[str, PoolSpec]) -> None:
        for replica in self._replicas:
            refuse_stages(pools, len(set(replica.homes)), len(replica.parts))

    @property
    def _sums_at_one_place(self) -> bool:
        (first, *others) = self._executor.replicas
        return not others and all(stage.devices == 1 for stage in first.replica.stages)

    @property
    def _admissions(self) -> tuple[Admission, ...]:
        return (*filter(None, [self.admission]), *self._more_admissions)

    def _make_room(self, tasks: Sequence[PreparedTask]) -> None:
        """Prepares for new tasks: discards planned rounds that have not begun. If only slots of
        tasks that have just left are free, the devices first finish their work; if the state has to
        grow, they also free memory."""
        if not self._slots.have_room_for(tasks):
            self._settle()
            self._clear_left_slots()
        if not self._slots.have_room_for(tasks):
            self._executor.release()
            self._peak = device_peak() or 0
        self._position.discard_plans()
