"""The engine: it owns the slots, runs rounds over them, and hands out and takes back tasks."""

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxmux.data import Prefetch
from jaxmux.data.microbatch import Microbatch
from jaxmux.models import (
    Backbone,
    ForwardOptions,
    SlotTable,
    device_memory,
    device_peak,
    pick_implementation,
    reckoned,
)
from jaxmux.pallas_kernels.compilation import compiled
from jaxmux.peft import Adapter, SlotArrays, adapter_of, slot_arrays, slot_tree
from jaxmux.planner import ShapeClass
from jaxmux.planner.admission import Admission
from jaxmux.planner.pool import Pool
from jaxmux.planner.remat_choice import USABLE
from jaxmux.tasks import TaskError

from .memory import choose_remat
from .prepare import PreparedTask
from .progress import TaskProgress, TaskUpdate, book
from .rounds import Packing, Round, pack_batches, pack_tightly, slot_table, training_rounds
from .state import SlotState, TrainState, empty_state, fresh_optimizer, read_slot, write_slot
from .step import UpdateStats, accumulate, evaluate, update


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """How the engine runs; none of it changes what a task learns beyond rounding.

    Attributes:
      shape: shape class of the microbatches.
      remat: "none", "norms", "dots", "lean" or "full": what is kept from forward to backward.
        "auto" picks for every layer what recomputes least in `memory`; "dots" where that is
        unknown.
      memory: bytes that weights, train state and step may take; None for all that JAX may use of
        the device.
      attention: "xla", "cudnn" or "short"; None picks by device, dtype and shape class.
      grouped_lora: implementation of the grouped LoRA linear; None picks the fastest.
      unroll: whether every layer is compiled on its own; None where it pays, on GPU.
      max_bad_steps: consecutive skipped updates after which a task has failed.
      packing: lays out the samples of training rounds; others are what benchmarks compare with.
      slots, rank, modules, dropout: what the compiled step has room for at least: slots, pool rank,
        adapted modules, and whether it can drop. A task that fits arrives without compiling the
        step again, and on CPU trains to the same bits in any company.
    """

    shape: ShapeClass
    slots: int = 1
    rank: int = 1
    modules: tuple[str, ...] = ()
    dropout: bool = False
    remat: str = "auto"
    memory: int | None = None
    attention: str | None = None
    grouped_lora: str | None = None
    unroll: bool | None = None
    max_bad_steps: int = 10
    packing: Packing = pack_tightly


@dataclasses.dataclass
class _Slot:
    prepared: PreparedTask
    progress: TaskProgress

    @property
    def kind(self) -> str:
        return self.prepared.task.optimizer.kind


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
        self._slots: list[_Slot] = []
        self.state: TrainState | None = None
        self._pending: _Pending | None = None
        self._current: Round | None = None
        self._stream: Prefetch[Round] | None = None
        self._stream_tasks: set[int] = set()
        self._remat: str | tuple[str, ...] | None = None
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
            self.admission.require({p.task.name: p.pool for p in tasks}, self._live_pools)
        self._pause()
        self._remat = None
        kept = [self.task_arrays(name) for name in self.names]
        self._slots += [_Slot(prepared, TaskProgress()) for prepared in tasks]
        self._peak = device_peak() or 0
        self.state = None  # Its memory is needed for the next one.
        self.state = self._empty_state()
        for name, arrays in zip(self.names, kept, strict=False):
            self._write(name, arrays)
        for prepared in tasks:
            self._write_fresh(prepared)

    def release(self, name: str) -> None:
        """Frees the slot of a task; its adapter is gone from the engine."""
        self._pause()
        self._remat = None
        kept = {other: self.task_arrays(other) for other in self.names if other != name}
        del self._slots[self._index(name)]
        self.state = None
        self.state = self._empty_state() if self._slots else None
        for other, arrays in kept.items():
            self._write(other, arrays)

    @property
    def names(self) -> list[str]:
        return [slot.prepared.task.name for slot in self._slots]

    def prepared(self, name: str) -> PreparedTask:
        return self._slots[self._index(name)].prepared

    def progress(self, name: str) -> TaskProgress:
        return self._slots[self._index(name)].progress

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
        if self._remat is None:
            self._prepare_step(current.microbatches[0], slots)
        options = self._forward_options(training=True)._replace(remat=self._remat)
        for microbatch in current.microbatches[self.microbatches_done :]:
            grads, loss = accumulate(*self._step_arguments(options, microbatch, slots))
            self.state = self.state._replace(grads=grads, loss=loss)
            self.microbatches += 1
            self.microbatches_done += 1
            if stop():
                updates += self.drain()
                # A round that has lost a task would be packed otherwise next time: finish it first.
                if all(self._slots[slot].progress.status == "running" for slot in current.steps):
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
        for slot, step in pending.round.steps.items():
            if self._slots[slot].progress.status != "running":
                continue
            updates.append(
                TaskUpdate(
                    step=pending.step,
                    task=self._slots[slot].prepared.task.name,
                    task_step=step + 1,
                    loss=float(stats.loss[slot]),
                    lr=pending.lr[slot],
                    grad_norm=float(stats.grad_norm[slot]),
                    target_tokens=pending.round.target_tokens[slot],
                    tokens=pending.round.tokens[slot],
                    skipped=not stats.applied[slot],
                )
            )
            book(
                self._slots[slot].progress,
                updates[-1],
                self._slots[slot].prepared.steps,
                self.options.max_bad_steps,
            )
        return updates

    def _observe_memory(self) -> None:
        """The device tells only of the most that was ever in use."""
        peak = device_peak() if self.admission else None
        if peak and peak > self._peak:
            self._peak = peak
            pools = list(self._live_pools.values())
            self.admission = self.admission.observe(pools, reckoned(self._remat), peak)

    @property
    def _live_pools(self) -> dict[str, Pool]:
        """By name, what each registered task needs."""
        return {slot.prepared.task.name: slot.prepared.pool for slot in self._slots}

    def evaluate(self, names: Sequence[str]) -> dict[str, float]:
        """Mean cross entropy per target token of the held-out samples of each named task that has
        any."""
        indices = [self._index(name) for name in names]
        tasks = {
            i: self._slots[i].prepared for i in indices if self._slots[i].prepared.eval_samples
        }
        options = self._forward_options(training=False)
        slots = jax.device_put(slot_table(tasks, None, self._capacity))
        losses = jnp.zeros(self._capacity)
        batches = {slot: t.eval_samples for slot, t in tasks.items()}
        for i, microbatch in enumerate(pack_batches(batches, self.options.shape)):
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
        prepared = self.prepared(name)
        return slot_arrays(self._read(name), list(prepared.targets), prepared.task.adapter.rank)

    def restore_task(self, name: str, arrays: SlotArrays, progress: TaskProgress) -> None:
        """Puts a task back where `task_arrays` and `progress` were taken."""
        self._pause()
        self._slots[self._index(name)].progress = progress
        self._write(name, arrays)

    @property
    def _capacity(self) -> int:
        return max(self.options.slots, len(self._slots))

    def _next_round(self) -> Round:
        live = self._live()
        if self._stream is None or self._stream_tasks != live.keys():
            # Tasks that end as planned leave the stream by themselves; others make it begin again.
            self._close_stream()
            tasks = {slot: self._slots[slot].prepared for slot in live}
            shape, packing = self.options.shape, self.options.packing
            rounds = training_rounds(tasks, live, self._capacity, shape, packing)
            self._stream = Prefetch(rounds)
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
            if self._slots[i].progress.status == "running" and step < self._slots[i].prepared.steps
        }

    def _dispatch_update(self, current: Round) -> None:
        due = np.zeros(self._capacity, bool)
        due[[i for i in current.steps if self._slots[i].progress.status == "running"]] = True
        rows = [slot.prepared.hyperparameters(slot.progress.updates) for slot in self._slots]
        hyper = {
            kind: {
                name: np.asarray([rows[slot][name] for slot in members], np.float32)
                for name in rows[members[0]]
            }
            for kind, members in self._kinds().items()
        }
        self.state, stats = update(self.state, due, hyper, self._kinds())
        lr = {slot: row["learning_rate"] for slot, row in enumerate(rows)}
        self._pending = _Pending(self.rounds, current, lr, stats)
        self._current = None
        self.rounds += 1
        self.microbatches_done = 0

    def _kinds(self) -> dict[str, np.ndarray]:
        kinds: dict[str, list[int]] = {}
        for i, slot in enumerate(self._slots):
            kinds.setdefault(slot.kind, []).append(i)
        return {kind: np.asarray(members, np.int32) for kind, members in kinds.items()}

    def _prepare_step(self, microbatch: Microbatch, slots: SlotTable) -> None:
        """Chooses what layers keep, and compiles the step of such microbatches."""
        options = self._forward_options(training=True)
        self._remat = self.options.remat
        if self._remat == "auto":
            self._remat = self._fitting_remat(options, microbatch, slots)
        options = options._replace(remat=self._remat)
        compiled(accumulate.lower(*self._step_arguments(options, microbatch, slots)))

    def _step_arguments(self, options: ForwardOptions, microbatch, slots) -> tuple:
        state = self.state
        return (
            self.backbone.config,
            options,
            self.backbone.weights,
            state.adapters,
            state.grads,
            state.loss,
            microbatch,
            slots,
        )

    def _fitting_remat(self, options, microbatch, slots) -> str | tuple[str, ...]:
        memory = self.options.memory or device_memory()
        if memory is None:
            return "dots"
        weights, adapters = (
            sum(array.nbytes for array in jax.tree.leaves(tree))
            for tree in (self.backbone.weights, self.state.adapters)
        )
        # Masters, accumulators, and as many moments as the neediest optimizer has: what is kept
        # does not depend on which optimizers are in use.
        room = int(USABLE * memory) - weights - 4 * adapters
        return choose_remat(self.backbone, options, self.state.adapters, microbatch, slots, room)

    def _forward_options(self, training: bool) -> ForwardOptions:
        dtype = self.backbone.weights["embed_tokens"]["weight"].dtype
        unroll, shape = self.options.unroll, self.options.shape
        return ForwardOptions(
            attention=self.options.attention
            or pick_implementation(self.backbone.config, dtype, shape.row_len),
            grouped_lora=self.options.grouped_lora,
            unroll=jax.default_backend() == "gpu" if unroll is None else unroll,
            dropout=training and (self.options.dropout or self._any_dropout),
            max_sequences=shape.max_sequences,
        )

    @property
    def _any_dropout(self) -> bool:
        return any(slot.prepared.task.adapter.dropout > 0 for slot in self._slots)

    def _empty_state(self) -> TrainState:
        used = {m for slot in self._slots for m in slot.prepared.targets}
        modules = sorted(used | set(self.options.modules))
        rank = max(self.options.rank, *(s.prepared.task.adapter.rank for s in self._slots))
        return empty_state(self.backbone.config, modules, self._kinds(), self._capacity, rank)

    def _write_fresh(self, prepared: PreparedTask) -> None:
        kind, adapter = prepared.task.optimizer.kind, prepared.adapter
        zeros = jax.tree.map(np.zeros_like, adapter)
        fresh = SlotState(adapter, zeros, np.float32(0), fresh_optimizer(kind, zeros))
        arrays = slot_arrays(fresh, list(prepared.targets), prepared.task.adapter.rank)
        self._write(prepared.task.name, arrays)

    def _read(self, name: str) -> SlotState:
        return read_slot(self.state, *self._address(name))

    def _write(self, name: str, arrays: SlotArrays) -> None:
        template = jax.eval_shape(lambda: self._read(name))
        self.state = write_slot(self.state, *self._address(name), slot_tree(template, arrays))

    def _address(self, name: str) -> tuple[str, int]:
        slot = self._index(name)
        return self._slots[slot].kind, slot

    def _index(self, name: str) -> int:
        if name not in self.names:
            raise TaskError(
                f"task {name!r}: not registered; registered are {', '.join(self.names)}"
            )
        return self.names.index(name)

    def _pause(self) -> None:
        """Ends the host's work ahead; it begins again, from the tasks' progress, with the next
        round."""
        if self._pending is not None or self.microbatches_done:
            raise RuntimeError("drain the engine, at the end of a round, before its tasks change")
        self._close_stream()

    def close(self) -> None:
        """Ends the thread that works ahead."""
        self._close_stream()

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
