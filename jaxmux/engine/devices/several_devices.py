"""The executor of several devices, whose replicas are pipelines of stages; and the programs for
another size of an engine on several devices, compiled ahead."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import jax
import numpy as np

from jaxmux.errors import fits
from jaxmux.peft import Layout
from jaxmux.planner import PlanningError
from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.replicas import TokenCosts, assign_samples
from jaxmux.sharding import PlacedBackbone, in_threads, only_compiling

from ..engine_options import EngineOptions, EngineSize
from ..rounds.results import DispatchedPass
from ..rounds.rounds import (
    PackedMicrobatch,
    ReplicaInput,
    RoundPlan,
    SampleIndices,
    empty_microbatch,
    fill_microbatches,
    shares_of_replicas,
    slot_table,
)
from ..state.slots import pool_of
from ..state.stored_state import StoredState
from ..state.updates import DueUpdates, UpdateStats, no_stats, no_updates, update_parts
from ..tasks.prepared_task import PreparedTask
from .compiled_stages import StagePrograms
from .executor import DispatchedLosses, RoundOutcome
from .replica_pipeline import Queued, ReplicaPipeline
from .replica_state import ReplicaState, filled_up
from .size_ahead import SizeAhead


class _Waiting(NamedTuple):
    """An update that has not been dispatched, and the indices of the microbatches with samples of
    its slots that have not ended."""

    slots: tuple[int, ...]
    microbatches: set[int]

    @classmethod
    def of(cls, slots: tuple[int, ...], plan: RoundPlan, done: Sequence[int]) -> "_Waiting":
        with_samples = {
            i for i, m in enumerate(plan.microbatches) if not m.samples.keys().isdisjoint(slots)
        }
        return cls(slots, with_samples - {*done})


class SeveralDevices:
    """Runs rounds on replicas of a backbone: the `Executor` of several devices.

    The first replica has the train state; the others have copies of the adapters, see
    `replica_state`. With 1F1B and LoRAPP, rounds follow each other without a gap: a microbatch
    begins as soon as its tasks have had their updates of the round before.
    """

    def __init__(
        self,
        backbones: Sequence[PlacedBackbone],
        options: EngineOptions,
        stored: StoredState,
        ahead: Sequence[StagePrograms] | None = None,
    ):
        """Creates an executor; nothing is compiled yet. `stored` has the parts of the first
        replica's backbone. `ahead` are, for each replica, the compiled `programs` of another
        executor. Raises PlanningError if `options.schedule` or `options.replica_shapes` does not
        suit the replicas."""
        self._options, self._stored = options, stored
        self._weights = backbones[0].weights
        self._copies = [
            ReplicaState(StoredState(backbone.parts, backbone.homes), stored)
            for backbone in backbones[1:]
        ]
        states = [stored, *(copy.own for copy in self._copies)]
        self._replicas = [
            ReplicaPipeline(backbone, own_options, state, number, programs, len(backbones))
            for number, (backbone, own_options, state, programs) in enumerate(
                zip(
                    backbones,
                    options.of_replicas(len(backbones)),
                    states,
                    ahead or [None] * len(backbones),
                    strict=True,
                )
            )
        ]
        shapes = {replica.input.replica: replica.input.shape for replica in self._replicas}
        if any(shapes[r.input.replica] != r.input.shape for r in self._replicas):
            raise PlanningError("equal replicas should have one shape class in replica_shapes")
        costs = options.sequence_costs or TokenCosts(shapes)
        configurations = [replica.input.replica for replica in self._replicas]
        several = len(configurations) > 1
        self.dispatch = partial(assign_samples, configurations, costs) if several else None
        # The round that has begun before the current one has ended, and its ended microbatches.
        self._ahead: RoundPlan | None = None
        self._ahead_done: list[int] = []
        # All programs have run for this layout of the state, dropout and these optimizer kinds.
        self._warm_for: tuple[Layout | None, bool, frozenset[str]] = None, False, frozenset()
        # The layout of the state for which held-out losses have been measured.
        self._measured_for: Layout | None = None
        # False if accumulators have become empty since the programs were warmed up.
        self._kept = True
        # Replicas whose devices have run out of memory.
        self._full: list[ReplicaPipeline] = []
        # Whether all replicas other than the first one have no gradients.
        self._collected = True
        # True if a round ended in an exception, which may leave microbatches between two parts.
        self._broken = False

    @property
    def remat(self) -> str | tuple[str, ...] | None:
        return self._replicas[0].compiled.remat

    @property
    def replicas(self) -> list[ReplicaInput]:
        return [replica.input for replica in self._replicas]

    @property
    def programs(self) -> list[StagePrograms | None]:
        return [replica.compiled.programs for replica in self._replicas]

    def refuse_implementations(self, dropout: bool) -> None:
        if self._options.attention or self._options.grouped_lora:
            self._refresh()
            for replica in self._replicas:
                replica.refuse_implementations(dropout)

    def run(
        self,
        plan: RoundPlan,
        done: list[int],
        stop: Callable[[], bool],
        due: Callable[[tuple[int, ...]], DueUpdates],
        following: Callable[[], RoundPlan | None],
    ) -> RoundOutcome:
        if self._broken:
            raise RuntimeError(
                "an earlier round ended in an exception; restore a checkpoint in a new engine"
            )
        # The flag stays if the call ends in an exception between two passes of a microbatch.
        self._broken, self._collected = True, False
        outcome = self._run(plan, done, stop, due, following)
        self._broken = False
        return outcome

    def _run(self, plan, done, stop, due, following) -> RoundOutcome:
        self._refresh()
        if not self._compile(plan.dropout):
            return RoundOutcome({}, lost=True)
        if not self._is_warm_for(plan):
            self._warm_up(due(()), plan.dropout)
        if self._ahead is plan:
            self._ahead = None
        else:
            self._add(plan, [i for i in range(len(plan.microbatches)) if i not in done])
        left, updates = [_Waiting.of(due.slots, plan, done) for due in plan.updates], {}
        asked = stopped = False

        def may_begin(queued: Queued) -> bool:
            if stopped:
                return False
            waiting = {slot for update in left for slot in update.slots}
            return queued.plan is plan or waiting.isdisjoint(queued.microbatch.samples)

        while True:
            for update in [] if stopped else [u for u in left if not u.microbatches]:
                left.remove(update)
                updates[update.slots] = self._update(due(update.slots))
            if not left and not stopped and len(done) == len(plan.microbatches):
                break
            advanced = False
            # The replicas take turns, so that none waits for another one's dispatches.
            for replica in self._replicas:
                if replica.begun_all and not asked and not stopped:
                    asked, self._ahead_done = True, []
                    next_plan = following()
                    # While stages exchange arrays nothing may be compiled.
                    is_warm = next_plan and self._is_warm_for(next_plan)
                    self._ahead = next_plan if is_warm else None
                    if self._ahead:
                        self._add(self._ahead, range(len(self._ahead.microbatches)))
                dispatched, ended = replica.advance(may_begin)
                advanced |= dispatched
                if ended:
                    if ended.plan is plan:
                        done.append(ended.index)
                        for update in left:
                            update.microbatches.discard(ended.index)
                    else:
                        self._ahead_done.append(ended.index)
                    stopped = stop() or stopped
            if not advanced:
                break
        ahead = tuple(self._ahead_done) if self._ahead else ()
        if stopped:
            self._forget()
        return RoundOutcome(updates, ahead=ahead)

    def _compile(self, dropout: bool) -> bool:
        """Prepares all replicas for rounds; returns whether they fit into memory. Several processes
        cannot tell each other whether they fit, so there the exception of one ends them all."""

        def compiled(replica: ReplicaPipeline) -> bool:
            if jax.process_count() == 1:
                return fits(replica.compiled.compile, dropout)
            replica.compiled.compile(dropout)
            return True

        pairs = zip(self._replicas, in_threads(compiled, self._replicas), strict=True)
        self._full = [replica for replica, fit in pairs if not fit]
        return not self._full

    def marker(self) -> list[jax.Array]:
        return [state.marker() for state in (self._stored, *(copy.own for copy in self._copies))]

    def take_passes(self) -> list[DispatchedPass]:
        passes = [each for replica in self._replicas for each in replica.take_passes()]
        return sorted(passes, key=lambda each: each.seconds)

    def settle(self) -> tuple[int, ...]:
        if not self._ahead:
            return ()
        self._collected = False
        for replica in self._replicas:
            while True:
                dispatched, ended = replica.advance(lambda _: False)
                if not dispatched:
                    break
                if ended:
                    self._ahead_done.append(ended.index)
        ahead = tuple(self._ahead_done)
        self._forget()
        return ahead

    def collect(self) -> None:
        for copy in [] if self._collected else self._copies:
            copy.refresh()
            slots = np.arange(*self._stored.layout.tree.loss.shape, dtype=np.int32)
            copy.send_gradients(slots)
        self._collected = True

    def recover(self) -> None:
        for replica in self._full:
            replica.compiled.recompute_more()
        # The whole round begins again, so the gradients of all replicas are dropped.
        for state in (self._stored, *(copy.own for copy in self._copies)):
            state.empty_accumulators()

    def _refresh(self) -> None:
        for copy in self._copies:
            copy.refresh()

    def _add(self, plan: RoundPlan, indices: Iterable[int]) -> None:
        of_replicas: list[list[int]] = [[] for _ in self._replicas]
        for index in indices:
            of_replicas[plan.microbatches[index].replica].append(index)
        for replica, of_replica in zip(self._replicas, of_replicas, strict=True):
            replica.add(plan, of_replica)

    def _update(self, updates: DueUpdates) -> UpdateStats:
        if not updates.due.any():
            return no_stats(len(updates.due))
        slots = filled_up(np.flatnonzero(updates.due), len(updates.due))
        for copy in self._copies:
            copy.send_gradients(slots)
        stats = update_parts(self._stored, updates, self._weights)
        for copy in self._copies:
            copy.receive_adapters(slots)
        return stats

    def _is_warm_for(self, plan: RoundPlan) -> bool:
        layout, dropout, optimizers = self._warm_for
        same = (layout, dropout) == (self._stored.layout, plan.dropout)
        return same and plan.optimizers <= optimizers

    def _warm_up(self, none_due: DueUpdates, dropout: bool) -> None:
        """Runs the programs of all updates without a slot, because nothing may be compiled or
        loaded while stages exchange arrays."""
        self._wait()
        for replica in self._replicas:
            replica.compiled.warm_moves()
        # Results of programs may have other shardings than arrays that were put on the devices, and
        # only in the second run all arguments are results of programs.
        for _ in range(2):
            for copy in self._copies:
                copy.warm_up()
            update_parts(self._stored, none_due, self._weights, warm=True)
            self.marker()
        self._warm_for = self._stored.layout, dropout, frozenset(none_due.members)

    def _wait(self) -> None:
        for replica in self._replicas:
            replica.state.wait()

    def _forget(self) -> None:
        for replica in self._replicas:
            replica.forget()
        self._ahead, self._ahead_done = None, []

    def evaluate(
        self, tasks: Mapping[int, PreparedTask], samples: SampleIndices
    ) -> DispatchedLosses:
        self._refresh()
        if self._measured_for != self._stored.layout:
            # While stages exchange arrays nothing may be compiled.
            self._wait()
            self._measured_for = self._stored.layout
        batches = {slot: task.eval_samples for slot, task in tasks.items()}
        shares = shares_of_replicas(batches, samples, self.dispatch)
        tokens: Counter[int] = Counter()

        def microbatches() -> Iterator[PackedMicrobatch]:
            for microbatch in fill_microbatches(batches, self.replicas, shares):
                tokens.update(microbatch.tokens)
                yield microbatch

        table = slot_table(tasks, None, *self._stored.layout.tree.loss.shape)
        losses = [
            self._replicas[i].evaluate(of_replica, table)
            for i, of_replica in groupby(microbatches(), key=lambda each: each.replica)
        ]
        return DispatchedLosses(
            lambda: sum(copies.sum(axis=0) for copies in jax.device_get(losses)), tokens
        )

    def try_memory(self, dropout: bool) -> bool:
        self._refresh()
        if not all(replica.compiled.serves(dropout) for replica in self._replicas):
            return False
        if self._compile(dropout):
            return True
        # Accumulators that were donated to the failed programs are lost.
        self.recover()
        self._kept = False
        return False

    def warm_up(self, none_due: DueUpdates, dropout: bool) -> bool:
        self._refresh()
        kept, self._kept = self._kept, True
        while not self._compile(dropout):
            self.recover()
            kept = False
        self._warm_up(none_due, dropout)
        table = slot_table({}, None, len(none_due.due))
        for i, replica in enumerate(self._replicas):
            empty = [empty_microbatch(replica.input.shape)] * replica.input.replica.shards
            jax.block_until_ready(replica.evaluate([PackedMicrobatch(i, empty, {}, {})], table))
        self._measured_for = self._stored.layout
        return kept

    def release(self) -> None:
        for replica in self._replicas:
            replica.compiled.release()


class MeshSizeAhead(SizeAhead):
    """The programs of an engine on several devices. Its thread does the same as the engine when its
    size changes, but only compiles: see `sharding.only_compiling`. Arguments are as for
    `DeviceSizeAhead`."""

    def __init__(
        self,
        sizes: tuple[EngineSize, EngineSize],
        backbones: Sequence[PlacedBackbone],
        options: EngineOptions,
        pool: PoolSpec,
        kinds: Sequence[str],
        stored: StoredState,
    ):
        shapes = stored.without_arrays()
        super().__init__(sizes, partial(_compile, backbones, options, pool, kinds, shapes))

    @property
    def programs(self) -> list[StagePrograms] | None:
        return None if self._compiled.exception() else self._compiled.result()


def _compile(
    backbones: Sequence[PlacedBackbone],
    options: EngineOptions,
    pool: PoolSpec,
    kinds: Sequence[str],
    stored: StoredState,
) -> list[StagePrograms]:
    config = backbones[0].config
    _, specs = pool_of(config, [], pool, keep_moments=True)
    with only_compiling():
        (slots,) = stored.layout.tree.loss.shape
        stored.resize(specs, np.full(pool.slots, slots, np.int32))
        stored.warm_up(kinds, 0)
        executor = SeveralDevices(backbones, options, stored)
        executor.warm_up(no_updates(stored.layout, config.num_layers, kinds), pool.dropout)
    return executor.programs
