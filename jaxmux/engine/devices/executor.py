"""The executor, which runs the compiled programs of rounds on all replicas of the backbone, and the
replicas whose backbone is one part on one device."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxmux.data import Sample
from jaxmux.data.batches import Microbatch
from jaxmux.errors import fits, raise_unless_full
from jaxmux.models import Backbone, SlotTable
from jaxmux.pallas_kernels.compilation import compiled
from jaxmux.peft import Layout
from jaxmux.planner import PlanningError
from jaxmux.sharding import PlacedBackbone, in_threads

from ..engine_options import EngineOptions
from ..rounds.results import DispatchedPass, Scores
from ..rounds.rounds import (
    Dispatch,
    PackedMicrobatch,
    ReplicaInput,
    RoundPlan,
    SampleIndices,
    Text,
    empty_microbatch,
    fill_microbatches,
    shares_of_replicas,
    slot_table,
)
from ..state.stored_state import StoredState
from ..state.updates import DueUpdates, UpdateStats, no_stats, update_parts
from ..tasks.prepared_task import PreparedTask
from .programs import (
    CompiledStep,
    StepPrograms,
    forward_options,
    log_probs,
    refuse_implementations,
)
from .replica_state import ReplicaState, filled_up

if TYPE_CHECKING:
    from .compiled_stages import StagePrograms
    from .programs_ahead import ProgramsAhead
    from .replica_pipeline import ReplicaPipeline


class RoundOutcome(NamedTuple):
    """The result of a call of `Executor.run`.

    Attributes:
      updates: by the slots of an update that was due, its results on the device.
      ahead: indices of the microbatches of the following round that have ended.
      lost: True if the device ran out of memory and the accumulated gradients were lost. Slots that
        have not been updated begin their global batches again.
    """

    updates: dict[tuple[int, ...], UpdateStats]
    ahead: tuple[int, ...] = ()
    lost: bool = False


class DispatchedLogProbs(NamedTuple):
    """Forward passes without gradients that have been dispatched.

    Attributes:
      scores: function that waits for the scores of the samples' tokens, by slot in the order of
        the samples.
      tokens: by slot, number of tokens of the chunks that hold the samples, with padding.
    """

    scores: Callable[[], dict[int, list[Scores]]]
    tokens: Mapping[int, int]


class Queued(NamedTuple):
    """A microbatch that has not ended. `tables` has the round's `SlotTable` on each stage."""

    plan: RoundPlan
    index: int
    tables: list[SlotTable]

    @property
    def microbatch(self) -> PackedMicrobatch:
        return self.plan.microbatches[self.index]


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


class Executor:
    """Runs the compiled programs. The engine decides what is trained; the executor decides where
    and when. The first replica has the train state; the others have copies of the adapters, see
    `replica_state`.

    A replica of one part on one device runs forward and backward pass of a microbatch as one
    program (`FusedReplica`); others are pipelines (`ReplicaPipeline`). With several devices and a
    schedule that streams, rounds follow each other without a gap: a microbatch begins as soon as
    its tasks have had their updates of the round before.

    Several devices run every program once before a round, because none may be compiled or loaded
    while devices exchange arrays. If one of them has too little memory, this shows before the
    round. An only device runs programs for the first time when they are needed, and reports that it
    ran out of memory in the round, which is then repeated.

    Attributes:
      dispatch: divides the samples of a round among the replicas; None if there is only one.
    """

    dispatch: Dispatch | None = None

    def __init__(
        self,
        backbones: Sequence[PlacedBackbone],
        options: EngineOptions,
        stored: StoredState,
        ahead: "ProgramsAhead | None" = None,
    ):
        """Creates an executor; nothing is compiled yet.

        Args:
          backbones: the replicas.
          stored: the train state, with the parts of the first replica's backbone.
          ahead: programs that are compiled ahead for these replicas; without them, programs are
            compiled when they are needed.

        Raises:
          PlanningError: `options.schedule` or `options.replica_shapes` does not suit the replicas.
        """
        self._options, self._stored, self._ahead_programs = options, stored, ahead
        self._weights = backbones[0].weights
        count = len(backbones)
        self._copies = [
            ReplicaState(StoredState(backbone.parts, backbone.homes), stored)
            for backbone in backbones[1:]
        ]
        states = [stored, *(copy.own for copy in self._copies)]
        self._replicas: list[FusedReplica | ReplicaPipeline] = []
        for number, backbone in enumerate(backbones):
            own_options = options.of_replicas(count)[number]
            make = FusedReplica if backbone.is_fused else _pipeline_class()
            self._replicas.append(make(backbone, own_options, states[number], number, count))
        # The replica, if there is no other device.
        self._alone: FusedReplica | None = self._replicas[0] if stored.alone else None
        if count > 1:
            self._divide_samples()
        # The round that has begun before the current one has ended, and its ended microbatches.
        self._ahead: RoundPlan | None = None
        self._ahead_done: list[int] = []
        # All programs have run for this layout of the state, dropout and these optimizer kinds.
        self._warm_for: tuple[Layout | None, bool, frozenset[str]] = None, False, frozenset()
        # Layouts of the state, and whether with dropout, for which `log_probs` has run.
        self._measured_for: set[tuple[Layout, bool]] = set()
        # False if accumulators have become empty since the programs were warmed up.
        self._kept = True
        # With other schedules, a round begins when the round before has ended.
        self._streams = all(replica.streams for replica in self._replicas)
        # Replicas whose devices have run out of memory.
        self._full: list[FusedReplica | ReplicaPipeline] = []
        # Whether all replicas other than the first one have no gradients.
        self._collected = True
        # True if a round ended in an exception, which may leave microbatches between two parts.
        self._broken = False

    def _divide_samples(self) -> None:
        from jaxmux.planner.replicas import TokenCosts, assign_samples

        shapes = {replica.input.replica: replica.input.shape for replica in self._replicas}
        if any(shapes[r.input.replica] != r.input.shape for r in self._replicas):
            raise PlanningError("equal replicas should have one shape class in replica_shapes")
        costs = self._options.sequence_costs or TokenCosts(shapes)
        configurations = [replica.input.replica for replica in self._replicas]
        self.dispatch = partial(assign_samples, configurations, costs)

    @property
    def remat(self) -> str | tuple[str, ...] | None:
        """The remat policy of every layer, or one for all, with which the training programs are
        compiled; None before they are."""
        return self._replicas[0].compiled.remat

    @property
    def replicas(self) -> list[ReplicaInput]:
        return [replica.input for replica in self._replicas]

    @property
    def programs(self) -> "list[StepPrograms | StagePrograms | None]":
        """The programs of each replica; None for one without any."""
        return [replica.compiled.programs for replica in self._replicas]

    def refuse_implementations(self, dropout: bool) -> None:
        """Raises PlanningError if an implementation that the options name cannot serve the state on
        these devices. `dropout` tells whether the pool has dropout."""
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
        """Dispatches microbatches and updates of a round, and returns before they are finished.

        Args:
          done: indices of its microbatches that earlier calls have dispatched. The call appends
            those that it dispatches, even if it ends in an exception.
          stop: function that is called after every microbatch. Once it returns True, no further
            microbatch begins and no further update is dispatched.
          due: function that returns an update's arrays for the given slots, which may be empty. It
            may wait for the results of earlier rounds.
          following: function that returns the round after this one, or None if there is none. The
            call may begin its microbatches. If it was not stopped, the next call is given this
            round; microbatches that have begun end in that call, or in `settle`.
        """
        if self._broken:
            raise RuntimeError(
                "an earlier round ended in an exception; restore a checkpoint in a new engine"
            )
        # Unless `_alone`, `_broken` stays True if the call raises: passes may be missing.
        self._broken, self._collected = not self._alone, False
        try:
            outcome = self._run(plan, done, stop, due, following)
        finally:
            if self._alone:
                self._forget()
        self._broken = False
        return outcome

    def _run(self, plan, done, stop, due, following) -> RoundOutcome:
        self._refresh()
        # On one device, a restored round that only awaits its updates needs no training programs.
        trains = not self._alone or len(done) < len(plan.microbatches)
        if trains and not self.compile(plan.dropout, run=not self._alone):
            return RoundOutcome({}, lost=True)
        if not self._alone and not self._is_warm_for(plan):
            self.warm_up_updates(due(()), plan.dropout)
        if self._ahead is plan:
            self._ahead = None
        else:
            self._add(plan, [i for i in range(len(plan.microbatches)) if i not in done])
        left, updates = [_Waiting.of(due.slots, plan, done) for due in plan.updates], {}
        asked = stopped = False

        def may_begin(queued: Queued) -> bool:
            if stopped or queued.plan is plan:
                return not stopped
            waiting = {slot for update in left for slot in update.slots}
            return waiting.isdisjoint(queued.microbatch.samples)

        while True:
            for update in [] if stopped else [u for u in left if not u.microbatches]:
                numbers = due(update.slots)
                if not self._has_fit():
                    return RoundOutcome(updates, lost=True)
                left.remove(update)
                updates[update.slots] = self._update(numbers)
            if not left and not stopped and len(done) == len(plan.microbatches):
                break
            advanced = False
            # The replicas take turns, so that none waits for another one's dispatches.
            for replica in self._replicas:
                if self._streams and replica.begun_all and not asked and not stopped:
                    asked, self._ahead_done = True, []
                    next_plan = following()
                    # While stages exchange arrays nothing may be compiled.
                    is_warm = next_plan and self._is_warm_for(next_plan)
                    self._ahead = next_plan if is_warm else None
                    if self._ahead:
                        self._add(self._ahead, range(len(self._ahead.microbatches)))
                step = self._advance(replica, may_begin)
                if step is None:
                    return RoundOutcome(updates, lost=True)
                dispatched, ended = step
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
        elif self._alone:
            if not plan.updates and not self._has_fit():
                return RoundOutcome(updates, lost=True)
            self._alone.compiled.trial_rounds = max(0, self._alone.compiled.trial_rounds - 1)
        return RoundOutcome(updates, ahead=ahead)

    def _advance(
        self, replica: "FusedReplica | ReplicaPipeline", may_begin: Callable[[Queued], bool]
    ) -> tuple[bool, Queued | None] | None:
        """`advance` of a replica; None if the only device ran out of memory."""
        if not self._alone:
            return replica.advance(may_begin)
        try:
            return replica.advance(may_begin)
        except jax.errors.JaxRuntimeError as e:
            self._note_full(e)
            return None

    def _has_fit(self) -> bool:
        """Whether the memory has sufficed for all dispatched microbatches. A GPU reports only
        afterwards that it ran out of memory, so in trial rounds the host waits; before the update,
        the round can still be repeated."""
        if not (self._alone and self._alone.compiled.trial_rounds):
            return True
        try:
            jax.block_until_ready(self._stored.states[-1].sums)
        except jax.errors.JaxRuntimeError as e:
            self._note_full(e)
            return False
        return True

    def _note_full(self, error: Exception) -> None:
        """Takes note that the only device has too little memory; raises other errors."""
        raise_unless_full(error)
        self._full = [self._alone]

    def compile(self, dropout: bool, run: bool = True) -> bool:
        """Prepares those replicas for rounds that are not ready; returns whether they fit into
        memory. `run` tells whether programs that have never run are run once. Several processes
        cannot tell each other whether they fit, so there the exception of one ends them all."""

        def compile_replica(replica: "FusedReplica | ReplicaPipeline") -> bool:
            if jax.process_count() == 1:
                return fits(replica.compiled.compile, dropout, run)
            replica.compiled.compile(dropout, run)
            return True

        self._take_programs()
        left = [each for each in self._replicas if not each.compiled.is_ready(dropout, run)]
        pairs = zip(left, in_threads(compile_replica, left), strict=True)
        self._full = [replica for replica, fit in pairs if not fit]
        return not self._full

    def _take_programs(self) -> None:
        """Waits for the programs that are compiled ahead."""
        ahead, self._ahead_programs = self._ahead_programs, None
        if ahead:
            for replica, programs in zip(self._replicas, ahead.programs(), strict=True):
                replica.compiled.take(programs)

    def marker(self) -> Any:
        """Small arrays that are ready when the devices of the last part of every replica have
        finished all dispatched microbatches."""
        return [state.marker() for state in (self._stored, *(copy.own for copy in self._copies))]

    def take_passes(self) -> list[DispatchedPass]:
        passes = [each for replica in self._replicas for each in replica.take_passes()]
        return sorted(passes, key=lambda each: each.seconds)

    def settle(self) -> tuple[int, ...]:
        """Finishes the microbatches of the following round that have begun, so that tasks can be
        changed, and discards the round. Returns the indices of its microbatches that have ended, in
        this call and before."""
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
        """Moves the gradients of all replicas into the `StoredState`, so that they can be read.
        Later sums then have another order."""
        for copy in [] if self._collected else self._copies:
            copy.refresh()
            slots = np.arange(self._stored.layout.tree.count.shape[0], dtype=np.int32)
            copy.send_gradients(slots)
        self._collected = True

    def recover(self) -> None:
        """Prepares for another try after the outcome of `run` was `lost`: empties the accumulators,
        and lets layers recompute more from now on."""
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
        if not self._copies:
            return update_parts(self._stored, updates, self._weights)
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

    def warm_up_updates(self, none_due: DueUpdates, dropout: bool) -> None:
        """Runs the programs of all updates without a slot, because nothing may be compiled or
        loaded while stages exchange arrays."""
        self._wait()
        for replica in self._replicas:
            replica.compiled.warm_moves()
        # Results of programs may have other shardings than arrays that were put on the devices, and
        # only in the second run all arguments are results of programs.
        for _ in range(1 if self._alone else 2):
            for copy in self._copies:
                copy.warm_up()
            update_parts(self._stored, none_due, self._weights, warm=True)
            self.marker()
        self._warm_for = self._stored.layout, dropout, frozenset(none_due.members)

    def warm_up_evaluation(self) -> None:
        """Runs the programs of `log_probs` once, with an empty microbatch."""
        table = slot_table({}, None, self._stored.layout.tree.count.shape[0])
        for i, replica in enumerate(self._replicas):
            empty = [empty_microbatch(replica.input.shape)] * replica.input.replica.shards
            packed = PackedMicrobatch(i, empty, {}, {})
            jax.block_until_ready(replica.log_probs([packed], table, dropout=False))
        self._measured_for = {(self._stored.layout, False)}

    def _wait(self) -> None:
        for replica in self._replicas:
            replica.state.wait()

    def _forget(self) -> None:
        for replica in self._replicas:
            replica.forget()
        self._ahead, self._ahead_done = None, []

    def log_probs(
        self,
        tasks: Mapping[int, PreparedTask],
        batches: Mapping[int, Sequence[Sample]],
        samples: SampleIndices,
        steps: Mapping[int, int] | None = None,
        dropout: bool = False,
    ) -> DispatchedLogProbs:
        """Dispatches the forward passes of tasks' samples with their current adapters.

        Args:
          batches: by slot, samples of the task.
          samples: by slot, which of them are read.
          steps: by slot, the step whose dropout masks are used; without them, dropout is off.
          dropout: whether the programs have code for dropout. They need it if a task has a rate.
        """
        if self._ahead_programs:
            self._ahead_programs.wait_for_evaluation()
        self._refresh()
        if (made_for := (self._stored.layout, dropout)) not in self._measured_for:
            if not self._alone:
                # While stages exchange arrays nothing may be compiled.
                self._wait()
            self._measured_for.add(made_for)
        table = slot_table(tasks, steps, self._stored.layout.tree.count.shape[0])
        shares = shares_of_replicas(batches, samples, self.dispatch)
        tokens: Counter[int] = Counter()
        texts: list[Sequence[Text]] = []

        def microbatches() -> Iterator[PackedMicrobatch]:
            for microbatch in fill_microbatches(batches, self.replicas, shares):
                tokens.update(microbatch.tokens)
                texts.append(microbatch.texts)
                yield microbatch

        found: list[jax.Array] = []
        for i, of_replica in groupby(microbatches(), key=lambda each: each.replica):
            found += self._replicas[i].log_probs(of_replica, table, dropout)
        return DispatchedLogProbs(partial(_by_sample, found, texts), tokens)

    def try_memory(self, dropout: bool) -> bool:
        """Tries whether the programs that have been compiled ahead for the state get their memory.
        On several devices they are run once, because none may be loaded while stages exchange
        arrays. Returns False if `warm_up` has to prepare programs: none have been compiled ahead
        for this state, or those of several devices need too much. Raises JaxRuntimeError if the
        only device has too little."""
        self._refresh()
        self._take_programs()
        if not all(replica.compiled.serves(dropout) for replica in self._replicas):
            return False
        if self._alone:
            self._alone.compiled.try_memory()
            return True
        if self.compile(dropout):
            return True
        # Accumulators that were donated to the failed programs are lost.
        self.recover()
        self._kept = False
        return False

    def warm_up(self, none_due: DueUpdates, dropout: bool) -> bool:
        """Compiles all programs and runs them once, so that no later round, update or measurement
        compiles anything while the state keeps its size. `none_due` has all optimizer kinds that
        tasks may have. Returns False if accumulators and losses are empty now, because the devices
        ran out of memory and layers recompute more."""
        self._refresh()
        kept, self._kept = self._kept, True
        while not self.compile(dropout):
            self.recover()
            kept = False
        self.warm_up_updates(none_due, dropout)
        self.warm_up_evaluation()
        return kept

    def release(self) -> None:
        """Frees the memory that the executor keeps from round to round besides the state. The next
        round allocates it again. Call it only between two rounds, after `settle`."""
        for replica in self._replicas:
            replica.compiled.release()


def _pipeline_class() -> "type[ReplicaPipeline]":
    # Training on one device needs neither schedules nor their planner.
    from .replica_pipeline import ReplicaPipeline

    return ReplicaPipeline


class FusedReplica:
    """A replica of one part on one device, where the forward and the backward pass of a microbatch
    are one program. It takes microbatches as a `ReplicaPipeline` does: `input` is the form in which
    it takes them, and `state` the train state that it works on."""

    streams = True

    def __init__(
        self,
        backbone: PlacedBackbone,
        options: EngineOptions,
        state: StoredState,
        number: int = 0,
        replicas: int = 1,
    ):
        """Creates a replica; nothing is compiled yet. `number` is its index among the `replicas`,
        which exchange gradients and adapters."""
        (self._home,), (weights,) = backbone.homes, backbone.weights
        self._backbone = Backbone(backbone.config, weights, backbone.name_or_path)
        self._options, self.state = options, state
        self.compiled = CompiledStep(self._backbone, options, state, replicas)
        self.input = ReplicaInput(options.shape, place=self._place)
        self._number = number
        # Passes are of interest only beside those of other replicas.
        self._passes: list[DispatchedPass] | None = [] if replicas > 1 else None
        self._waiting: deque[Queued] = deque()
        # Layouts of the state, and whether with dropout, for which `log_probs` is compiled.
        self._measured_for: set[tuple[Layout, bool]] = set()

    @property
    def begun_all(self) -> bool:
        """Whether every known microbatch has begun, so that another round may begin."""
        return not self._waiting

    def refuse_implementations(self, dropout: bool) -> None:
        (state,) = self.state.states
        refuse_implementations(self._backbone, self._options, dropout, state)

    def add(self, plan: RoundPlan, indices: Iterable[int]) -> None:
        tables = [self._home.put(plan.slots, P())]
        self._waiting += [Queued(plan, index, tables) for index in indices]

    def forget(self) -> None:
        """Drops the microbatches that have not begun."""
        self._waiting.clear()

    def advance(self, may_begin: Callable[[Queued], bool]) -> tuple[bool, Queued | None]:
        """Dispatches the next microbatch if `may_begin` says that it may begin. Returns whether it
        was dispatched, and the microbatch, which ends at once, or None."""
        if not (self._waiting and may_begin(self._waiting[0])):
            return False, None
        queued = self._waiting[0]
        self.compiled.accumulate(queued.microbatch.arrays, *queued.tables)
        if self._passes is not None:
            for forward in (True, False):
                done = DispatchedPass(
                    time.perf_counter(),
                    self._number,
                    stage=0,
                    part=0,
                    microbatch=queued.index,
                    forward=forward,
                    steps=queued.plan.steps,
                )
                self._passes.append(done)
        return True, self._waiting.popleft()

    def take_passes(self) -> list[DispatchedPass]:
        taken = self._passes or []
        self._passes = None if self._passes is None else []
        return taken

    def log_probs(
        self, microbatches: Iterable[PackedMicrobatch], slots: SlotTable, dropout: bool
    ) -> list[jax.Array]:
        """Dispatches the forward passes of microbatches without gradients. Returns for each the
        results of `microbatch_log_probs`, which every process can read."""
        home, backbone, layout = self._home, self._backbone, self.state.layout
        (state,) = self.state.states
        forward = forward_options(backbone, self._options, state.adapters, dropout)
        table, found = home.put(slots, P()), []
        for microbatch in microbatches:
            arrays, weights = self._place(microbatch.arrays), backbone.weights
            arguments = backbone.config, forward, weights, state.adapters, arrays, table
            if (layout, dropout) not in self._measured_for and home.is_local:
                compiled(log_probs.lower(*arguments))
                self._measured_for.add((layout, dropout))
            found.append(home.run(log_probs, *arguments))
        self.state.measured = found
        return home.share(found)

    def _place(self, microbatches: Sequence[Microbatch]) -> Microbatch:
        (microbatch,) = microbatches
        return self._home.put(microbatch, P())


def _by_sample(
    found: Sequence[jax.Array], texts: Sequence[Sequence[Text]]
) -> dict[int, list[Scores]]:
    """Waits for the results of microbatches, and cuts them into those of samples, by slot in the
    order of their indices. `texts` tell where in each microbatch its samples lie."""
    by_slot: dict[int, dict[int, Scores]] = {}
    for array, of_microbatch in zip(jax.device_get(list(found)), texts, strict=True):
        by_shard = array.reshape(-1, *array.shape[-3:])
        for text in of_microbatch:
            of_text = by_shard[text.shard, text.row, text.begin : text.end].copy()
            by_slot.setdefault(text.slot, {})[text.sample] = of_text
    return {slot: [of_slot[i] for i in sorted(of_slot)] for slot, of_slot in by_slot.items()}
