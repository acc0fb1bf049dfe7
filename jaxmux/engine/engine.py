"""The engine: runs rounds over the slots, and hands out and takes back tasks."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxmux.data import Prefetch
from jaxmux.models import Backbone, ForwardOptions, device_peak, planned_remat
from jaxmux.pallas_kernels.compilation import compiled
from jaxmux.peft import Adapter, SlotArrays, adapter_of
from jaxmux.planner.costs.admission import Admission
from jaxmux.tasks import TaskError

from .compile import compile_accumulate, forward_options
from .engine_options import EngineOptions
from .prepared_task import PreparedTask
from .programs import UpdateStats, accumulate, evaluate, update
from .progress import TaskProgress, TaskUpdate, record_update
from .rounds import Round, fill_microbatches, slot_table, training_rounds
from .slots import Slots
from .train_state import SlotState, TrainState


@dataclasses.dataclass(frozen=True)
class _Pending:
    """A dispatched update whose results have not been fetched yet.

    Attributes:
      index: of the round.
      learning_rates: of the update, by slot.
    """

    index: int
    round: Round
    learning_rates: dict[int, float]
    stats: UpdateStats


class Engine:
    """Trains registered tasks together.

    The device runs ahead of the host by one round: `train_round` dispatches a round and returns the
    results of the one before it. `drain` fetches the last.

    Attributes:
      rounds: rounds dispatched so far.
      microbatches: microbatches dispatched so far.
      seconds_waited: time that training has waited for rounds to be planned and packed, which
        happens while the device is busy.

    Args:
      admission: which tasks the device has room for; it learns from the memory that rounds are seen
        to need. None admits every task.
    """

    def __init__(
        self, backbone: Backbone, options: EngineOptions, admission: Admission | None = None
    ):
        self.backbone = backbone
        self.options = options
        self.admission = admission
        self.rounds = 0
        self.microbatches = 0
        self.seconds_waited = 0.0
        self._slots = Slots(backbone.config, options.reserved)
        self._pending: _Pending | None = None
        self._current: Round | None = None
        # Microbatches of the current round that have been dispatched.
        self._dispatched = 0
        # By slot, the samples that were in the accumulators when the current round began.
        self._accumulated: dict[int, list[int]] = {}
        self._stream: Prefetch[Round] | None = None
        self._stream_tasks: set[int] = set()
        # The forward pass that training is compiled for, until a task does not fit it.
        self._forward: ForwardOptions | None = None
        self._peak = 0

    def register_tasks(self, tasks: Sequence[PreparedTask]) -> None:
        """Gives each task a slot; tasks already in training go on undisturbed.

        Raises:
          TaskError: a name is taken, or a sample does not fit a row.
          PlanningError: a task does not fit into the device's memory beside the others.
        """
        names = self.names
        for prepared in tasks:
            name = prepared.task.name
            if name in names:
                raise TaskError(f"task {name!r}: a task of this name is registered already")
            prepared.refuse_rows_of(self.options.shape.row_len)
            names.append(name)
        if self.admission:
            # The state keeps the size that it has reached.
            self.admission = dataclasses.replace(self.admission, reserved=self._slots.pool)
            self.admission.require({p.task.name: p.pool for p in tasks}, self._slots.pools)
        self._pause()
        self._peak = device_peak() or 0
        before = self._slots.layout, self._slots.pool.dropout
        self._slots.add(tasks)
        if before != (self._slots.layout, self._slots.pool.dropout):
            self._forward = None

    def release(self, name: str) -> None:
        """Frees the slot of a task; its adapter is gone from the engine."""
        self._pause()
        self._slots.remove(name)

    @property
    def names(self) -> list[str]:
        """Names of the registered tasks, in the order in which they came."""
        return self._slots.names

    @property
    def state(self) -> TrainState | None:
        """Everything that training changes, on the device; None until the first task comes."""
        return self._slots.state

    def prepared(self, name: str) -> PreparedTask:
        return self._slots.named(name).prepared

    def progress(self, name: str) -> TaskProgress:
        return self._slots.named(name).progress

    @property
    def finished(self) -> bool:
        """Whether no task has steps left to dispatch."""
        return not self._live()

    def train_round(self, stop: Callable[[], bool] = lambda: False) -> list[TaskUpdate]:
        """Dispatches one global batch of every live task; returns the updates of the round before.

        Args:
          stop: asked after every microbatch. Once it returns True, the round is left where it is,
            and the next call goes on with its other microbatches.
        """
        if self._current is None and self.finished:
            return self.drain()
        current = self._current = self._current or self._next_round()
        updates: list[TaskUpdate] = []
        slots = jax.device_put(current.slots)
        if self._forward is None and current.microbatches:
            self._forward = compile_accumulate(
                self.backbone,
                self.options,
                self._slots.pool.dropout,
                self.state,
                current.microbatches[0].arrays,
                slots,
            )
        config, forward, weights = self.backbone.config, self._forward, self.backbone.weights
        for microbatch in current.microbatches[self._dispatched :]:
            state = self._slots.state
            accumulators, loss = accumulate(
                config,
                forward,
                weights,
                state.adapters,
                state.accumulators,
                state.loss,
                microbatch.arrays,
                slots,
            )
            self._slots.state = state._replace(accumulators=accumulators, loss=loss)
            self.microbatches += 1
            self._dispatched += 1
            if stop():
                updates += self.drain()
                # A round that has lost a task would be packed otherwise next time: finish it first.
                if all(self._slots[slot].running for slot in current.steps):
                    return updates
        updates += self.drain()
        self._dispatch_update(current)
        return updates

    def accumulated(self, name: str) -> list[int]:
        """The samples of the task's current global batch, by index, whose gradients are in its
        accumulators."""
        number = self._slots.number(name)
        done = self._current.microbatches[: self._dispatched] if self._current else []
        samples = [i for microbatch in done for i in microbatch.samples.get(number, ())]
        return sorted([*self._accumulated.get(number, ()), *samples])

    def drain(self) -> list[TaskUpdate]:
        """Waits for the dispatched update, if any, and records its results."""
        if self._pending is None:
            return []
        pending, self._pending = self._pending, None
        stats = jax.device_get(pending.stats)
        self._observe_memory()
        updates = []
        for number, step in pending.round.steps.items():
            slot = self._slots[number]
            if not slot.running:
                continue
            done = TaskUpdate(
                step=pending.index,
                task=slot.name,
                task_step=step + 1,
                loss=float(stats.loss[number]),
                lr=pending.learning_rates[number],
                grad_norm=float(stats.grad_norm[number]),
                target_tokens=pending.round.target_tokens[number],
                tokens=pending.round.tokens[number],
                skipped=not stats.applied[number],
            )
            record_update(slot.progress, done, slot.prepared.steps, self.options.max_bad_steps)
            updates.append(done)
        return updates

    def _observe_memory(self) -> None:
        """Tells `admission` of a new peak; the device knows only the highest peak so far."""
        peak = device_peak() if self.admission else None
        if peak and peak > self._peak:
            self._peak = peak
            pools = list(self._slots.pools.values())
            self.admission = self.admission.observe(pools, planned_remat(self._forward.remat), peak)

    def evaluate(self, names: Sequence[str]) -> dict[str, float]:
        """Mean cross entropy, in nats per target token, of the held-out samples of each named task
        that has any."""
        named = {self._slots.number(name): self.prepared(name) for name in names}
        tasks = {slot: t for slot, t in named.items() if t.eval_samples}
        options = forward_options(self.backbone, self.options)
        capacity = self._slots.pool.slots
        slots = jax.device_put(slot_table(tasks, None, capacity))
        losses = jnp.zeros(capacity)
        batches = {slot: t.eval_samples for slot, t in tasks.items()}
        for i, microbatch in enumerate(fill_microbatches(batches, self.options.shape)):
            arguments = (
                self.backbone.config,
                options,
                self.backbone.weights,
                self.state.adapters,
                losses,
                jax.device_put(microbatch.arrays),
                slots,
            )
            if i == 0:
                compiled(evaluate.lower(*arguments))
            losses = evaluate(*arguments)
        found = jax.device_get(losses)
        return {t.task.name: float(found[slot]) for slot, t in tasks.items()}

    def adapter(self, name: str) -> Adapter:
        """The task's adapter as NumPy arrays, at its own rank."""
        spec = self.prepared(name).task.adapter
        return adapter_of(self.task_arrays(name), spec, self.backbone.config)

    def task_arrays(self, name: str) -> SlotArrays:
        """Everything that a checkpoint must hold of a task besides its progress, at the task's own
        rank. Call `drain` before."""
        return self._slots.read(name)

    def task_specs(self, name: str) -> SlotState:
        """The description of `task_arrays`, a tree of `LeafSpec`."""
        return self._slots.own_specs(name)

    def restore_task(
        self,
        name: str,
        arrays: SlotArrays,
        progress: TaskProgress,
        accumulated: Sequence[int] = (),
    ) -> None:
        """Puts a task back to where `task_arrays`, `progress` and `accumulated` were taken."""
        self._pause()
        slot = self._slots.named(name)
        slot.progress = progress
        self._slots.write(name, arrays)
        if slot.running:
            self._accumulated[self._slots.number(name)] = list(accumulated)

    def _next_round(self) -> Round:
        live = self._live()
        if self._stream is None or self._stream_tasks != live.keys():
            # Tasks that end as planned leave the stream by themselves; others make it begin again.
            self.close()
            tasks = {number: self._slots[number].prepared for number in live}
            self._stream = Prefetch(
                training_rounds(
                    tasks,
                    live,
                    self._slots.pool.slots,
                    self.options.shape,
                    self.options.packing,
                    self._accumulated,
                )
            )
        asked = time.perf_counter()
        following = next(self._stream)
        self.seconds_waited += time.perf_counter() - asked
        self._stream_tasks = {
            number
            for number, step in following.steps.items()
            if step + 1 < self._slots[number].prepared.steps
        }
        return following

    def _live(self) -> dict[int, int]:
        """The next step of every slot whose task has one."""
        pending: Mapping[int, int] = self._pending.round.steps if self._pending else {}
        steps = {number: slot.progress.step + (number in pending) for number, slot in self._slots}
        return {
            number: step
            for number, step in steps.items()
            if self._slots[number].running and step < self._slots[number].prepared.steps
        }

    def _dispatch_update(self, current: Round) -> None:
        slots = self._slots
        due = np.zeros(slots.pool.slots, bool)
        due[[number for number in current.steps if slots[number].running]] = True
        optimizers = {number: slot.prepared.task.optimizer for number, slot in slots}
        hyper = {}
        for kind, members in slots.members.items():
            rows = [optimizers[number].hyperparameters() for number in members]
            hyper[kind] = {
                name: np.asarray([row[name] for row in rows], np.float32) for name in rows[0]
            }
        learning_rates = {
            number: slot.prepared.learning_rate(slot.progress.updates) for number, slot in slots
        }
        rates = slots.rates(learning_rates)
        slots.state, stats = update(slots.state, slots.layout, due, rates, hyper, slots.members)
        self._pending = _Pending(self.rounds, current, learning_rates, stats)
        self._current = None
        self._dispatched = 0
        self._accumulated = {}
        self.rounds += 1

    def _pause(self) -> None:
        """Ends the host's work ahead; it begins again, from the tasks' progress, with the next
        round."""
        if self._pending is not None or self._dispatched:
            raise RuntimeError("drain the engine, at the end of a round, before its tasks change")
        self._current = None
        self.close()

    def close(self) -> None:
        """Ends the thread that works ahead."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
