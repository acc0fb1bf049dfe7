"""The engine: runs rounds over the slots, and hands out and takes back tasks."""

import dataclasses
import time
from collections.abc import Callable, Sequence

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
from .progress import TaskProgress, TaskUpdate, book
from .rounds import Round, fill_microbatches, slot_table, training_rounds
from .slots import Slots
from .train_state import TrainState


@dataclasses.dataclass(frozen=True)
class _Pending:
    """A dispatched update whose results have not been fetched yet."""

    step: int
    round: Round
    lr: dict[int, float]
    stats: UpdateStats


class Engine:
    """Trains registered tasks together.

    The device runs ahead of the host by one round: `train_round` dispatches a round and returns the
    results of the one before it. `drain` fetches the last.

    Args:
      admission: what the device has room for; it learns from the memory that rounds are seen to
        need. None admits every task.
    """

    def __init__(
        self, backbone: Backbone, options: EngineOptions, admission: Admission | None = None
    ):
        self.backbone = backbone
        self.options = options
        self.admission = admission
        self.rounds = 0
        self.microbatches = 0
        self.microbatches_done = 0
        # For rounds to be planned and packed, which happens while the device is busy.
        self.seconds_waited = 0.0
        self._slots = Slots(backbone.config, options.least_pool)
        self._pending: _Pending | None = None
        self._current: Round | None = None
        self._stream: Prefetch[Round] | None = None
        self._stream_tasks: set[int] = set()
        # Those that training is compiled for, until tasks change.
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
            self.admission.require({p.task.name: p.pool for p in tasks}, self._slots.pools)
        self._pause()
        self._forward = None
        self._peak = device_peak() or 0
        self._slots.add(tasks)

    def release(self, name: str) -> None:
        """Frees the slot of a task; its adapter is gone from the engine."""
        self._pause()
        self._forward = None
        self._slots.remove(name)

    @property
    def names(self) -> list[str]:
        return self._slots.names

    @property
    def state(self) -> TrainState | None:
        """Everything that training changes, on the device; None while there are no tasks."""
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
          stop: asked after every microbatch. Once true, the round is left where it is:
            `microbatches_done` of it are in the accumulators, and the next call goes on behind
            them.
        """
        if self._current is None and self.finished:
            return self.drain()
        current = self._current = self._current or self._next_round()
        updates: list[TaskUpdate] = []
        slots = jax.device_put(current.slots)
        if self._forward is None:
            self._forward = compile_accumulate(
                self.backbone,
                self.options,
                self._slots.pool.dropout,
                self.state,
                current.microbatches[0],
                slots,
            )
        config, forward, weights = self.backbone.config, self._forward, self.backbone.weights
        for microbatch in current.microbatches[self.microbatches_done :]:
            state = self._slots.state
            grads, loss = accumulate(
                config, forward, weights, state.adapters, state.grads, state.loss, microbatch, slots
            )
            self._slots.state = state._replace(grads=grads, loss=loss)
            self.microbatches += 1
            self.microbatches_done += 1
            if stop():
                updates += self.drain()
                # A round that has lost a task would be packed otherwise next time: finish it first.
                if all(self._slots[slot].running for slot in current.steps):
                    return updates
        updates += self.drain()
        self._dispatch_update(current)
        return updates

    def drain(self) -> list[TaskUpdate]:
        """Waits for the dispatched update, if any, and books its results."""
        if self._pending is None:
            return []
        pending, self._pending = self._pending, None
        stats = jax.device_get(pending.stats)
        self._observe_memory()
        updates = []
        for index, step in pending.round.steps.items():
            slot = self._slots[index]
            if not slot.running:
                continue
            done = TaskUpdate(
                step=pending.step,
                task=slot.name,
                task_step=step + 1,
                loss=float(stats.loss[index]),
                lr=pending.lr[index],
                grad_norm=float(stats.grad_norm[index]),
                target_tokens=pending.round.target_tokens[index],
                tokens=pending.round.tokens[index],
                skipped=not stats.applied[index],
            )
            book(slot.progress, done, slot.prepared.steps, self.options.max_bad_steps)
            updates.append(done)
        return updates

    def _observe_memory(self) -> None:
        """The device tells only of the most that was ever in use."""
        peak = device_peak() if self.admission else None
        if peak and peak > self._peak:
            self._peak = peak
            pools = list(self._slots.pools.values())
            self.admission = self.admission.observe(pools, planned_remat(self._forward.remat), peak)

    def evaluate(self, names: Sequence[str]) -> dict[str, float]:
        """Mean cross entropy per target token of the held-out samples of each named task that has
        any."""
        named = {self._slots.index(name): self.prepared(name) for name in names}
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
                jax.device_put(microbatch),
                slots,
            )
            if i == 0:
                compiled(evaluate.lower(*arguments))
            losses = evaluate(*arguments)
        found = jax.device_get(losses)
        return {t.task.name: float(found[slot]) for slot, t in tasks.items()}

    def adapter(self, name: str) -> Adapter:
        """The task's factors as NumPy arrays, at true rank."""
        return adapter_of(self.task_arrays(name))

    def task_arrays(self, name: str) -> SlotArrays:
        """All that a checkpoint must hold of a task besides its progress, at true rank. Call
        `drain` before."""
        return self._slots.read(name)

    def restore_task(self, name: str, arrays: SlotArrays, progress: TaskProgress) -> None:
        """Puts a task back where `task_arrays` and `progress` were taken."""
        self._pause()
        self._slots.named(name).progress = progress
        self._slots.write(name, arrays)

    def _next_round(self) -> Round:
        live = self._live()
        if self._stream is None or self._stream_tasks != live.keys():
            # Tasks that end as planned leave the stream by themselves; others make it begin again.
            self.close()
            tasks = {slot: self._slots[slot].prepared for slot in live}
            shape, packing = self.options.shape, self.options.packing
            self._stream = Prefetch(
                training_rounds(tasks, live, self._slots.pool.slots, shape, packing)
            )
        asked = time.perf_counter()
        following = next(self._stream)
        self.seconds_waited += time.perf_counter() - asked
        self._stream_tasks = {
            s for s, step in following.steps.items() if step + 1 < self._slots[s].prepared.steps
        }
        return following

    def _live(self) -> dict[int, int]:
        """The next step of every slot that has one."""
        pending = self._pending.round.steps if self._pending else {}
        steps = {i: slot.progress.step + (i in pending) for i, slot in enumerate(self._slots)}
        return {
            i: step
            for i, step in steps.items()
            if self._slots[i].running and step < self._slots[i].prepared.steps
        }

    def _dispatch_update(self, current: Round) -> None:
        slots, kinds = self._slots, self._slots.kinds
        due = np.zeros(slots.pool.slots, bool)
        due[[i for i in current.steps if slots[i].running]] = True
        rows = [slot.prepared.hyperparameters(slot.progress.updates) for slot in slots]
        hyper = {
            kind: {
                name: np.asarray([rows[slot][name] for slot in members], np.float32)
                for name in rows[members[0]]
            }
            for kind, members in kinds.items()
        }
        slots.state, stats = update(slots.state, due, hyper, kinds)
        lr = {slot: row["learning_rate"] for slot, row in enumerate(rows)}
        self._pending = _Pending(self.rounds, current, lr, stats)
        self._current = None
        self.rounds += 1
        self.microbatches_done = 0

    def _pause(self) -> None:
        """Ends the host's work ahead; it begins again, from the tasks' progress, with the next
        round."""
        if self._pending is not None or self.microbatches_done:
            raise RuntimeError("drain the engine, at the end of a round, before its tasks change")
        self.close()

    def close(self) -> None:
        """Ends the thread that works ahead."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
