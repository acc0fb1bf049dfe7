"""Trains round after round: plans them, has them run, and fetches their results."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial

import jax
import numpy as np
from jaxtyping import Float, Int

from jaxmux.data import Sample
from jaxmux.data.stored_samples import stream_lengths
from jaxmux.errors import OutOfDeviceMemory, microbatch_too_large, ran_out_of_memory
from jaxmux.models import Backbone
from jaxmux.objectives import Known
from jaxmux.planner import PlanningError
from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.sharding import PlacedBackbone
from jaxmux.tasks import TaskError

from .devices.executor import Executor
from .devices.programs_ahead import ProgramsAhead
from .engine_options import EngineOptions
from .rounds.position import RoundPosition, RoundStream
from .rounds.results import (
    COMPILING,
    EVALUATION,
    TRAINING,
    Computed,
    DeviceTime,
    DispatchedEvaluation,
    DispatchedTurns,
    DispatchedUpdate,
    LogProbs,
    RoundRecord,
    RoundResults,
    Scores,
    grade,
    of_targets,
)
from .rounds.rounds import (
    RoundPlan,
    all_samples,
    paired_slots,
    turn_from,
    waiting_slots,
    with_log_probs,
)
from .state.slots import Slot, Slots, Weighted
from .state.stored_state import StoredState
from .state.updates import DueUpdates, UpdateStats, no_updates
from .tasks.prepared_task import PreparedTask
from .tasks.progress import TaskEvaluation, TaskUpdate

_log = logging.getLogger("jaxmux")


# Most tokens of a turn in which a reference is computed. Training data may be too large for the
# memory of the devices.
_MOST_TOKENS = 2**20


class HeldOut:
    """Dispatches the measurements of held-out losses. Their results arrive with those of updates,
    and decide whether a task stops early.

    If the held-out data of a task have more tokens than `most_tokens`, they are measured in several
    turns, one in each round. The task trains again when all turns have been dispatched; other tasks
    do not wait for it.
    """

    def __init__(
        self,
        slots: Slots,
        results: RoundResults,
        executor: Executor,
        copies: ThreadPoolExecutor,
        most_tokens: int | None,
        device_time: DeviceTime,
    ):
        self._slots, self._results = slots, results
        self._executor, self._copies = executor, copies
        self._most_tokens, self._device_time = most_tokens, device_time

    @property
    def unfinished(self) -> list[int]:
        return [n for n, slot in self._slots if slot.measuring and slot.progress.status != "failed"]

    def takes_turns(self, slot: Slot) -> bool:
        if self._most_tokens is None:
            return False
        return int(self._lengths(slot).sum(dtype=np.int64)) > self._most_tokens

    def _lengths(self, slot: Slot) -> Int[np.ndarray, " samples"]:
        """The number of tokens that each held-out sample counts in a turn."""
        least = self._executor.replicas[0].shape.least_tokens
        batch = slot.measuring.batch if slot.measuring else slot.prepared.eval_samples
        return np.maximum(stream_lengths(batch), least)

    def end_round(self, plan: RoundPlan, begun: RoundPlan | None, rounds: int) -> None:
        """After a round has been dispatched, stops tasks that have reached their time limit, begins
        the measurements that are due, and continues those that have begun. `begun` is the round
        after `plan`, if it has begun, and `rounds` the number of dispatched rounds."""
        trained = plan.steps | (begun.steps if begun else {})
        self._stop_in_time({n: step + 1 for n, step in trained.items()})
        updated = {n: plan.steps[n] for n in plan.steps if n in plan.ends and self._slots.runs(n)}
        self._begin(n for n, step in updated.items() if self._slots[n].is_measured_after(step + 1))
        self.go_on(rounds)

    def measure(self, numbers: Sequence[int], rounds: int) -> None:
        """Begins to measure the held-out losses of tasks, with the adapters after everything that
        has been dispatched, and dispatches the first turns. Tasks without held-out samples are left
        out."""
        self._begin(n for n in numbers if self._slots[n].prepared.eval_samples)
        self._dispatch([n for n in self.unfinished if n in numbers], rounds)

    def go_on(self, rounds: int) -> None:
        """Dispatches the next turn of every measurement that has begun."""
        begun = {n: self._slots[n].measuring.step for n in self.unfinished}
        self._stop_in_time({n: step for n, step in begun.items() if step})
        self._dispatch(list(begun), rounds)

    def _begin(self, numbers: Iterable[int]) -> None:
        for slot in map(self._slots.__getitem__, numbers):
            slot.begin_measuring(slot.steps_dispatched)

    def _dispatch(self, numbers: Sequence[int], rounds: int) -> None:
        if not numbers:
            return
        tasks = {n: self._slots[n] for n in numbers}
        measured = {n: slot.measuring for n, slot in tasks.items()}
        turns = {n: self._next_turn(slot) for n, slot in tasks.items()}
        prepared = {n: slot.prepared for n, slot in tasks.items()}
        begun = time.monotonic()
        batches = {n: measuring.batch for n, measuring in measured.items()}
        dispatched = self._executor.log_probs(prepared, batches, turns)
        scores = self._device_time.add(EVALUATION, begun, dispatched.scores).result
        ended, adapters = [], {}
        for n, slot in tasks.items():
            slot.measuring.samples = turns[n].stop
            if turns[n].stop < len(slot.measuring.batch):
                continue
            ended.append(n)
            if slot.prepared.task.keep_best and slot.measuring.step:
                copied = self._slots.copy_to_host(slot.name, ("adapter",))
                adapters[n] = self._copies.submit(copied).result
            slot.measuring = None
        self._results.add_evaluation(
            DispatchedEvaluation(
                rounds, tasks, measured, frozenset(ended), adapters, scores, dispatched.tokens
            )
        )

    def _next_turn(self, slot: Slot) -> range:
        most = self._most_tokens
        if most is None and slot.measuring.training is not None:
            most = _MOST_TOKENS
        return turn_from(slot.measuring.samples, self._lengths(slot), most)

    def _stop_in_time(self, steps: Mapping[int, int]) -> None:
        """Stops tasks that have reached their time limit, each after its number of steps in
        `steps`."""
        for number, step in steps.items():
            if not self._slots.runs(number):
                continue
            slot = self._slots[number]
            longest = slot.prepared.task.max_seconds
            if longest and slot.stop_after is None and slot.progress.seconds >= longest:
                slot.stop_after = step


class RoundLoop:
    """Trains the tasks in the slots, round after round. `Engine` adds tasks that come and go."""

    def __init__(
        self,
        backbone: Backbone | PlacedBackbone | Sequence[PlacedBackbone],
        options: EngineOptions,
        programs: ProgramsAhead | None,
        observe: Callable[[Sequence[PoolSpec]], None],
    ):
        """Creates a loop without tasks. After the results of a round have been fetched, `observe`
        is called with the pool that each task of the round would need alone. The rest is as for
        `Engine`."""
        self.options = options
        self.rounds = 0
        self.microbatches = 0
        self.computed_tokens = 0
        self.device_time = DeviceTime()
        if isinstance(backbone, Backbone):
            self._replicas = [PlacedBackbone.on_one_device(backbone)]
            self.backbone = backbone
        else:
            self._replicas = [backbone] if isinstance(backbone, PlacedBackbone) else list(backbone)
            if not self._replicas:
                raise PlanningError("an engine needs at least one replica of the backbone")
            self.backbone = self._replicas[0]
        first, *others = self._replicas
        stored = StoredState(first.parts, first.homes, alone=first.is_fused and not others)
        self._slots = Slots(self.backbone.config, options.reserved, stored)
        self._observe = observe
        self._results = RoundResults(options.max_bad_steps)
        # This thread waits for copies to reach the host, so that their device memory becomes free.
        self._copies = ThreadPoolExecutor(1)
        self._executor = Executor(self._replicas, options, stored, programs)
        self._stream = RoundStream(self._slots, options, self._executor)
        self._position = RoundPosition(self._stream)
        self._held_out = self._measure_held_out()
        self._round: RoundRecord | None = None
        # Keys are the slots of an update that is being dispatched, values the learning rate of each
        # of these slots.
        self._learning_rates: dict[tuple[int, ...], dict[int, float]] = {}

    def _measure_held_out(self) -> HeldOut:
        return HeldOut(
            self._slots,
            self._results,
            self._executor,
            self._copies,
            self.options.round_tokens,
            self.device_time,
        )

    def _take_options(
        self, options: EngineOptions, numbers: Mapping[int, int], programs: ProgramsAhead | None
    ) -> None:
        """Continues with other options, for whose sizes the state is ready. Programs that were not
        compiled ahead are compiled and run once. Programs that were compiled ahead run for the
        first time when they are needed; here the executor only tries whether their memory can be
        allocated. `numbers` maps the old number of every occupied slot to its new one."""
        self.options = options
        self._executor = Executor(self._replicas, options, self._slots.stored, programs)
        self._stream = self._stream.resized(options, self._executor, numbers)
        self._position.renumber(numbers, self._stream)
        self._position.prepare(self._live())
        self._held_out = self._measure_held_out()
        if not self._executor.try_memory(self._slots.pool.dropout):
            self._warm_up()

    def _warm_up(self) -> None:
        slots, layers = self._slots, self.backbone.config.num_layers
        with self.device_time.waiting(COMPILING):
            slots.warm_up()
            none_due = no_updates(slots.layout, layers, slots.optimizers)
            kept = self._executor.warm_up(none_due, slots.pool.dropout)
        if not kept:
            self._lose_gradients()

    @property
    def finished(self) -> bool:
        """True if no task has a step or a measurement left to dispatch. The results of the last
        round may still have to be fetched with `drain`."""
        return not self._live() and not self._held_out.unfinished

    @property
    def seconds_waited(self) -> float:
        """Seconds that `train_round` has waited for rounds to be packed. Meanwhile the device may
        have been busy with earlier rounds."""
        return self._stream.seconds_waited

    @property
    def remat(self) -> str | tuple[str, ...] | None:
        """The remat policies with which the training program is compiled: one name for all layers,
        or one for each layer. None before it is compiled."""
        return self._executor.remat

    def train_round(
        self, stop: Callable[[], bool] = lambda: False, stream: bool = True
    ) -> list[TaskUpdate]:
        """Dispatches a round (a turn of every live task), and returns the results of the round
        before it.

        The call returns before the device has finished the round. It compiles the programs if
        necessary. If no task is live, it calls `drain` and trains nothing; if measurements of
        held-out losses continue, the call still counts as a round.

        Args:
          stop: function that is called after every microbatch. Once it returns True, `train_round`
            fetches the results of the round before and returns, although this round is unfinished.
            The next call continues with the remaining microbatches. If the fetched results end a
            task of this round, the round is finished nevertheless.
          stream: whether a pipeline may begin the next round before this one has ended. With False,
            no gradients of the next round exist after this call, so a checkpoint taken then is
            restored to the same bits on the same devices.

        Returns:
          One `TaskUpdate` for each task of the round before, except tasks that had failed before
          that round was updated. Empty for the first round, and if these results have been fetched
          already.

        Raises:
          PlanningError: `options.attention` cannot serve this device, dtype or row length.
          ValueError: `options.grouped_lora` or `options.remat` is unknown, or
            `options.grouped_lora` cannot serve these tasks on this device.
          OutOfDeviceMemory: either a device has too little memory for a microbatch; the tasks are
            then as after their last updates, and `resize` can make room. Or a device ran out of
            memory in a round whose results were fetched; then only a new engine can continue.
        """
        position = self._position
        if position.current is None and not self._live():
            drained = self.drain()
            if self._held_out.unfinished:
                self._round = RoundRecord(self.rounds, [], (), {})
                self.rounds += 1
                self._held_out.go_on(self.rounds)
            return drained
        ends: list[UpdateStats] = []
        begun = None
        while True:
            current = position.begin(self._live())
            begun = begun or time.monotonic()
            try:
                current = position.current = self._with_log_probs(current)
            except Exception:
                if not position.done:
                    # Tasks may change, although the round cannot begin.
                    position.discard_plans()
                raise
            done, before = position.done, len(position.done)
            compiles = self._executor.remat is None
            try:
                with self.device_time.waiting(COMPILING) if compiles else nullcontext():
                    outcome = self._executor.run(
                        current,
                        done,
                        stop,
                        self._due,
                        self._plan_following if stream else lambda: None,
                    )
            except OutOfDeviceMemory:
                # No program fits any more, and the accumulators are empty. If an earlier round ran
                # out of memory too, fetching its results raises the same error again.
                with suppress(OutOfDeviceMemory):
                    self._fetch()
                self._lose_gradients()
                raise
            finally:
                self._count(current, done[before:])
            self._count(position.following, outcome.ahead)
            if compiles:
                # The devices do little while the host compiles, so this is not training time.
                begun = time.monotonic()
            ends += outcome.updates.values()
            for slots, stats in outcome.updates.items():
                rates = self._learning_rates.pop(slots)
                tasks = {number: self._slots[number] for number in slots if number in rates}
                pools = list(self._slots.pools.values())
                graded = {n: slot.weighted.graded for n, slot in tasks.items() if slot.weighted}
                self._results.add(
                    DispatchedUpdate(self.rounds, current, tasks, rates, pools, stats, graded)
                )
                for slot in tasks.values():
                    slot.weighted = None
            if outcome.lost:
                self._begin_again()
                if not self._live():
                    return self.drain()
                continue
            updates = tuple(u for u in current.updates if u.slots not in outcome.updates)
            if not updates and len(done) == len(current.microbatches):
                break
            self._count_ended(position.following, outcome.ahead)
            position.stop(updates, outcome.ahead)
            self._fetch()
            if all(self._slots.runs(slot) for slot in current.steps):
                return self._results.take()
            # A run that resumes from a checkpoint of this moment would pack the rest of the round
            # differently, because a task of it has ended. So the round is finished first.
            stop = lambda: False  # noqa: E731
        self._end_turns(current)
        waited_for = ends or self._executor.marker()
        self.device_time.add(TRAINING, begun, partial(jax.block_until_ready, waited_for))
        self._note_round(current)
        position.end(outcome.ahead)
        self._clear_left_slots()
        self.rounds += 1
        self._held_out.end_round(current, position.current, self.rounds)
        return self._results.take()

    def _note_round(self, plan: RoundPlan) -> None:
        left = self._slots.left
        names = {n: (self._slots[n] if n in self._slots else left[n]).name for n in plan.steps}
        self._round = RoundRecord.of(
            self.rounds,
            plan,
            names,
            replicas=self._executor.replicas,
            passes=self._executor.take_passes(),
        )

    def take_round(self) -> RoundRecord | None:
        """Returns the record of the last dispatched round; None if it has been taken before."""
        taken, self._round = self._round, None
        return taken

    def _end_turns(self, plan: RoundPlan) -> None:
        """Records the turns of this round that no update follows, or whose tasks have left."""
        tasks = {n: self._slots[n] for n in plan.steps if n not in plan.ends and n in self._slots}
        left = self._left_in(plan)
        if not plan.ends:
            # Without an update, the results of the previous round have not been fetched yet.
            self._fetch()
        if tasks or left:
            self._results.add(DispatchedTurns(plan, tasks, left, self._executor.marker()))

    def _plan_following(self) -> RoundPlan | None:
        """Returns the round after the current one, with the tasks that are known now; None if it
        may not begin yet."""
        current = self._position.current
        live = self._live(after=current)
        tasks = {n: self._slots[n].prepared for n in live}
        paired = paired_slots(tasks, self._executor.replicas, self.options.packing)
        if waiting_slots(tasks, paired) or current.waiting - current.ends:
            # The terms of its losses may depend on the updates of this round.
            return None
        return self._position.plan_following(live)

    def _with_log_probs(self, plan: RoundPlan) -> RoundPlan:
        """Completes the terms of the losses of tasks whose objectives wait for log-probabilities,
        and puts their microbatches onto the devices. The present log-probabilities of a global
        batch are computed before its first turn, with the dropout masks of the step."""
        if not plan.waiting:
            return plan
        updated = plan.ends.difference(*(update.slots for update in plan.updates))
        waiting = plan.waiting - updated
        slots = {n: self._slots[n] for n in plan.steps if n in waiting and n in self._slots}
        scored = {
            n: slot
            for n, slot in slots.items()
            if n not in plan.paired and slot.prepared.task.objective.needs_log_probs
        }
        computed = dict(plan.computed_tokens)
        missing = {n: slot for n, slot in scored.items() if slot.weighted is None}
        if missing or any(slot.lacks_reference for slot in slots.values()):
            self._fetch()
        if missing:
            prepared = {n: slot.prepared for n, slot in missing.items()}
            steps = {n: plan.steps[n] for n in missing}
            batches = {n: task.batches[steps[n]] for n, task in prepared.items()}
            dropout = self._slots.pool.dropout
            dispatched = self._executor.log_probs(
                prepared, batches, all_samples(batches), steps, dropout
            )
            try:
                scores = dispatched.scores()
            except jax.errors.JaxRuntimeError as e:
                if not ran_out_of_memory(e):
                    raise
                raise microbatch_too_large(self.options.shape.tokens) from None
            for n, slot in missing.items():
                objective, reference = slot.prepared.task.objective, _reference_of(slot, steps[n])
                graded = grade(objective, batches[n], scores[n], reference, plan.recorded[n])
                weights = [-slopes for slopes in graded.slopes]
                slot.weighted = Weighted(_of_read_tokens(batches[n], weights), graded)
                computed[n] += dispatched.tokens[n]
        weights = {n: slot.weighted.weights for n, slot in scored.items()}
        references = {}
        for n in slots.keys() - scored.keys():
            prepared, known = slots[n].prepared, _reference_of(slots[n], plan.steps[n])
            batch = prepared.batches[plan.steps[n]]
            targets = [sample.target_tokens for sample in batch]
            of_tokens = prepared.task.objective.reference_of_tokens(targets, known)
            references[n] = _of_read_tokens(batch, of_tokens)
        replicas = self._executor.replicas
        microbatches = [
            each
            if each.is_placed
            else with_log_probs(each, weights, references, replicas[each.replica])
            for each in plan.microbatches
        ]
        return plan._replace(microbatches=microbatches, computed_tokens=computed)

    def _count(self, plan: RoundPlan | None, dispatched: Sequence[int], times: int = 1) -> None:
        for i in dispatched:
            replica = self._executor.replicas[plan.microbatches[i].replica]
            self.microbatches += times * replica.shards
            self.computed_tokens += times * replica.tokens

    def _settle(self) -> None:
        """Finishes the microbatches of this round that started early, during the previous round.
        The rest of the round is then planned again."""
        position = self._position
        # `settle` returns nothing after a stop, which has finished all started microbatches.
        ended = self._executor.settle() or position.done
        if position.begun_ahead:
            self._count(position.current, ended[len(position.done) :])
            self._count_ended(position.current, ended)
            position.settle(ended)

    def _count_ended(self, plan: RoundPlan | None, ended: Sequence[int]) -> None:
        """Records the trained microbatches of a plan that is discarded."""
        if ended:
            tasks = {n: self._slots[n] for n in plan.steps if n in self._slots}
            self._results.add(DispatchedTurns(plan, tasks, self._left_in(plan), ended=ended))

    def _left_in(self, plan: RoundPlan) -> dict[int, Slot]:
        return {n: slot for n, slot in self._slots.left.items() if n in plan.steps}

    def _due(self, slots: tuple[int, ...]) -> DueUpdates:
        self._fetch()
        due, rates = self._slots.due(slots)
        if slots:
            self._learning_rates[slots] = rates
        return due

    def _begin_again(self) -> None:
        self._fetch()
        self._executor.recover()
        _log.warning(
            "the device ran out of memory; round %d begins again, with more recomputation",
            self.rounds,
        )
        self._count(self._position.current, self._position.done, times=-1)
        self._lose_gradients()

    def _lose_gradients(self) -> None:
        """Restarts all global batches, because the accumulators are empty."""
        self._position.begin_again()
        for _, slot in self._slots:
            slot.lose_gradients()

    def drain(self) -> list[TaskUpdate]:
        """Waits for the last round whose update was dispatched, and records its results in the
        `progress` of its tasks. Returns them as `train_round` does; none if they have been fetched
        already."""
        self._settle()
        self._fetch()
        return self._results.take()

    def _fetch(self) -> None:
        try:
            for update in self._results.fetch():
                self._observe(update.pools)
        except jax.errors.JaxRuntimeError as e:
            if not ran_out_of_memory(e):
                raise
            raise OutOfDeviceMemory(
                f"a device ran out of memory in round {self.rounds}; try remat='full', "
                f"tokens_per_microbatch={self.options.shape.tokens // 2}, or fewer or smaller "
                "tasks"
            ) from None

    def accumulated(self, name: str) -> list[int]:
        """Indices of the samples in a task's current global batch whose gradients are already
        accumulated, ascending. A checkpoint within a global batch stores this list for
        `restore_task`."""
        return self._position.accumulated(self._slots.number(name))

    def begin_evaluation(self, names: Sequence[str]) -> None:
        """Begins to measure the held-out losses of tasks with their current adapters; tasks without
        held-out samples are left out. The results arrive with those of the next round, or with
        `drain`. A measurement of more than `options.round_tokens` tokens takes several rounds, one
        turn in each, and its task does not train until it has ended. After a task's last step and
        every `Task.eval_every` steps, the engine begins a measurement without this call. Errors are
        those of `evaluate`, and RuntimeError if a round is unfinished."""
        self._refuse_unfinished_round()
        self._held_out.measure([self._slots.number(name) for name in names], self.rounds)
        position = self._position
        if position.begun_ahead and position.current.steps.keys() & self._held_out.unfinished:
            # The started round must not update these tasks before they are measured.
            self._settle()

    def measures(self, name: str) -> bool:
        """Whether a task has to wait for further turns of its measurement before it trains
        again."""
        return self._slots.named(name).measuring is not None

    def take_evaluations(self) -> list[TaskEvaluation]:
        """Returns the held-out losses that have arrived since the last call. Tasks that have left
        since are included."""
        return self._results.take_evaluations()

    def take_computed(self) -> Computed:
        """Returns the tokens computed in the rounds whose results the last call of `train_round` or
        `drain` returned, including those of tasks that have left since. A second call returns none.
        The time of these rounds can be divided among the tasks in proportion to these tokens."""
        return self._results.take_computed()

    @property
    def awaited(self) -> set[str]:
        """Names of the tasks whose results have not arrived, including tasks that have left."""
        return self._results.awaited | {slot.name for slot in self._slots.left.values()}

    def evaluate(self, names: Sequence[str]) -> dict[str, float]:
        """Measures the losses of tasks on their held-out samples, with their current adapters and
        without dropout.

        Returns:
          By name, the value of the task's objective, for `SFT` the mean cross entropy in nats per
          target token (token that counts in the loss); NaN if the forward pass was not finite.
          Tasks without held-out samples are left out.

        Raises:
          PlanningError: `options.attention` cannot serve this device, dtype or row length.
          ValueError: `options.grouped_lora` is unknown or cannot serve these tasks on this device.
        """
        named = {self._slots.number(name): self._slots.named(name).prepared for name in names}
        tasks = {slot: task for slot, task in named.items() if task.eval_samples}
        if not tasks:
            return {}
        batches = {slot: task.eval_samples for slot, task in tasks.items()}
        dispatched = self._executor.log_probs(tasks, batches, all_samples(batches))
        found, losses = dispatched.scores(), {}
        for number, task in tasks.items():
            objective, reference = task.task.objective, self._slots[number].reference
            known = reference.of_held_out(task) if reference else None
            if objective.needs_reference and known is None:
                # Before its first step, a task is its own reference.
                known = objective.known(of_targets(task.eval_samples, found[number]))
            graded = grade(objective, task.eval_samples, found[number], known)
            losses[task.task.name] = graded.loss
        return losses

    def log_probs(self, name: str, samples: Sequence[Sample]) -> list[LogProbs]:
        """Computes how probable samples are under a task's current adapter, without dropout. Waits
        for the devices.

        Args:
          samples: at least one, for example of `load_samples`. They need not belong to the task,
            and are read with the virtual tokens of its adapter.

        Returns:
          For each sample of n tokens the log-probability of every token but the first, given those
          before it, float32 [n - 1] in nats. NaN if the forward pass was not finite.

        Raises:
          TaskError: the task is not registered, or a sample does not fit into a row.
          RuntimeError: a round is unfinished.
          PlanningError, ValueError: as for `evaluate`.
        """
        return [of_sample[:, 0] for of_sample in self.scores(name, samples)]

    def scores(self, name: str, samples: Sequence[Sample]) -> list[Scores]:
        """Like `log_probs`, with all scores of the tokens."""
        self._refuse_unfinished_round()
        number, prepared = self._slots.number(name), self._slots.named(name).prepared
        batch = self._fitting(name, prepared, samples)
        dispatched = self._executor.log_probs(
            {number: prepared}, {number: batch}, all_samples({number: batch})
        )
        return dispatched.scores()[number]

    def _fitting(
        self, name: str, prepared: PreparedTask, samples: Sequence[Sample]
    ) -> list[Sample]:
        """Samples with the virtual tokens of a task. TaskError if one does not fit into a row."""
        virtual = prepared.kind.virtual_tokens(prepared.task.adapter)
        batch = [sample._replace(virtual_tokens=virtual) for sample in samples]
        places = max(sample.stream_length for sample in batch)
        if places > self.options.shape.row_len:
            raise TaskError(
                f"task {name!r}: a sample takes {places} places in a row, and a row has "
                f"{self.options.shape.row_len}"
            )
        return batch

    def _live(self, after: RoundPlan | None = None) -> dict[int, int]:
        """Returns, by slot, the next step of every task that has one. The steps of `after`, a round
        that is being dispatched, count as trained."""
        return self._slots.live(after, self._held_out.takes_turns)

    def _refuse_unfinished_round(self) -> None:
        position = self._position
        if position.current is not None and not position.begun_ahead:
            raise RuntimeError("tasks may change at the end of a round, and this one is unfinished")

    def _clear_left_slots(self) -> None:
        """Empties the slots of tasks that have left, except those that the current round uses."""
        current = self._position.current
        for number in self._slots.left.keys() - (current.steps.keys() if current else set()):
            self._slots.clear(number)
            # The gradients that a started round accumulated for the task are gone too.
            self._position.restore(number, ())

    def close(self) -> None:
        """Ends the threads of the engine, and frees what it keeps from round to round. A later
        `train_round` starts a new thread to pack microbatches, but snapshots are no longer
        possible."""
        self._stream.close()
        self._executor.release()
        self._copies.shutdown()
        self.device_time.close()


def _reference_of(slot: Slot, step: int) -> Known | None:
    """The reference of a task's global batch; None if its objective needs none."""
    if not slot.reference:
        return None
    return slot.reference.of_training(slot.prepared, slot.prepared.batches.indices(step))


def _of_read_tokens(
    batch: Sequence[Sample], of_targets: Sequence[Float[np.ndarray, " targets"]]
) -> list[Float[np.ndarray, " read_tokens"]]:
    """The numbers of target tokens at the positions where these are predicted, and 0 elsewhere."""
    found = []
    for sample, numbers in zip(batch, of_targets, strict=True):
        of_sample = np.zeros(sample.read_tokens, np.float32)
        of_sample[sample.target_mask[1:]] = numbers
        found.append(of_sample)
    return found
