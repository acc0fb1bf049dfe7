"""Rounds hold every sample once and update every task once, however samples are divided."""

import dataclasses
from collections import Counter
from contextlib import ExitStack
from functools import partial
from random import Random
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest

from jaxmux.data import GlobalBatches
from jaxmux.engine.rounds import results
from jaxmux.engine.rounds.rounds import ReplicaInput, TaskGroups, Turns, training_rounds
from jaxmux.models import BackboneConfig
from jaxmux.objectives import DPO, SimPO
from jaxmux.planner import pipeline
from jaxmux.planner.costs import PoolSpec
from jaxmux.planner.devices import Replica
from jaxmux.planner.packing import ShapeClass
from jaxmux.planner.replicas import TokenCosts, assign_samples
from jaxmux.profiling import random_task

# Samples that do not fit the pipeline's rows go to the other replica.
SHAPES = {
    Replica.uniform(pp=1, tp=2): ShapeClass(2, 512, 64, 16),
    Replica.uniform(pp=2, tp=1): ShapeClass(4, 128, 64, 16),
}


CONFIG = BackboneConfig(
    architecture="LlamaForCausalLM",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
)


@pytest.mark.parametrize(
    "seed", [pytest.param(i, marks=pytest.mark.slow if i > 5 else ()) for i in range(12)]
)
def test_unlike_replicas_train_every_sample_once_and_update_every_task_once_a_round(seed):
    rng = np.random.default_rng(seed)
    tasks = {
        slot: random_task(
            CONFIG,
            f"task{slot}",
            rng.integers(40, rng.choice([120, 160, 300]), 200).tolist(),
            batch=int(rng.choice([2, 4, 8, 64])),
            steps=int(rng.integers(4, 9)),
            rank=4,
        )
        for slot in range(int(rng.integers(3, 7)))
    }
    inputs = [ReplicaInput(shape, replica, groups="planned") for replica, shape in SHAPES.items()]
    dispatch = partial(assign_samples, list(SHAPES), TokenCosts(SHAPES))
    pool = PoolSpec(slots=len(tasks), rank=4)
    rounds = list(training_rounds(tasks, dict.fromkeys(tasks, 0), pool, inputs, dispatch=dispatch))
    assert len(rounds) == max(own.steps for own in tasks.values())
    for step, plan in enumerate(rounds):
        live = {slot: own for slot, own in tasks.items() if step < own.steps}
        updated = [slot for update in plan.updates for slot in update.slots]
        assert sorted(updated) == sorted(plan.steps) == sorted(live)
        trained = Counter(
            (slot, i)
            for microbatch in plan.microbatches
            for slot, own in microbatch.samples.items()
            for i in own
        )
        expected = {(slot, i) for slot, own in live.items() for i in range(len(own.batches[step]))}
        assert trained == dict.fromkeys(expected, 1)
        for update in plan.updates:
            last = [i for i, m in enumerate(plan.microbatches) if {*m.samples} & {*update.slots}]
            assert update.after == max(last)


@pytest.mark.parametrize(("seed", "most_tokens"), [(0, None), (1, 200), (2, 1)])
def test_the_answers_of_a_pair_follow_each_other_in_a_row(seed, most_tokens):
    rng = np.random.default_rng(seed)
    tasks = {
        slot: random_task(CONFIG, f"task{slot}", rng.integers(20, 64, 40).tolist(), 6, 4, rank=4)
        for slot in range(3)
    }
    for slot, objective in ((1, DPO()), (2, SimPO())):
        task = tasks[slot]
        tasks[slot] = dataclasses.replace(
            task,
            task=dataclasses.replace(task.task, objective=objective),
            batches=GlobalBatches(task.samples.samples, 3, seed=0, members=2),
        )
    # Rows of both replicas hold pairs, and rows of the second one a single pair.
    shapes = {
        Replica.uniform(pp=1, tp=2): ShapeClass(2, 256, 64, 5),
        Replica.uniform(pp=2, tp=1): ShapeClass(4, 128, 64, 2),
    }
    inputs = [ReplicaInput(shape, replica, groups="planned") for replica, shape in shapes.items()]
    dispatch = partial(assign_samples, list(shapes), TokenCosts(shapes))
    rounds = training_rounds(
        tasks, dict.fromkeys(tasks, 0), PoolSpec(slots=3, rank=4), inputs, None, dispatch, None,
        most_tokens,
    )  # fmt: skip
    trained = Counter()
    for plan in rounds:
        assert plan.paired == plan.steps.keys() & {1, 2}
        assert plan.waiting == plan.steps.keys() & {1}
        for packed in plan.microbatches:
            shape = inputs[packed.replica].shape
            rows = Counter((text.shard, text.row) for text in packed.texts)
            assert max(rows.values()) <= shape.max_sequences
            texts = {(text.slot, text.sample): text for text in packed.texts}
            spans = Counter()
            for (slot, sample), text in texts.items():
                trained[slot, plan.steps[slot], sample] += 1
                if slot and sample % 2 == 0:
                    other = texts[slot, sample + 1]
                    assert (other.shard, other.row, other.begin) == (*text[2:4], text.end)
                    spans[text.shard, text.row, text.begin, other.end - text.begin] += 1
            found = Counter(
                (shard, row, *map(int, span))
                for shard, arrays in enumerate(packed.arrays)
                for row, of_row in enumerate(arrays.pair_spans)
                for span in of_row
                if span[1]
            )
            assert found == spans
    assert trained == {
        (slot, step, i): 1 for slot in range(3) for step in range(4) for i in range(6)
    }


def test_a_batch_of_which_one_answer_has_been_trained_is_completed_without_pairs():
    task = random_task(CONFIG, "pairs", [30] * 40, 6, 4, rank=4)
    task = dataclasses.replace(
        task,
        task=dataclasses.replace(task.task, objective=DPO()),
        batches=GlobalBatches(task.samples.samples, 3, seed=0, members=2),
    )

    def turns(accumulated):
        found = Turns({0: task}, {0: 0}, 70, {0: accumulated}, paired={0})
        return [(turn[0].paired, turn[0].samples) for turn in iter(found.next, {})][:4]

    in_pairs = [(True, range(i, i + 2)) for i in (0, 2, 4)]
    assert turns([]) == [*in_pairs, in_pairs[0]]
    assert turns([0, 1]) == [*in_pairs[1:], *in_pairs[:2]]
    assert turns([0]) == [*((False, pair) for _, pair in in_pairs), in_pairs[0]]


@pytest.fixture
def pipeline_tasks(request):
    """Tasks by slot, and `TaskGroups` of a pipeline of two stages or as many as the parameter."""
    tasks = {
        slot: random_task(CONFIG, f"task{slot}", [100] * 40, batch, 100, rank=4)
        for slot, batch in enumerate((8, 6, 6, 8, 2))
    }
    stages = getattr(request, "param", 2)
    replica = ReplicaInput(
        ShapeClass(4, 128, 64, 16), Replica.uniform(pp=stages, tp=1), groups="planned"
    )
    return tasks, TaskGroups([replica])


@pytest.mark.long
@pytest.mark.parametrize(
    ("pipeline_tasks", "stay_for_good"), [(2, True), (4, False)], indirect=["pipeline_tasks"]
)
def test_after_a_change_of_the_tasks_no_groups_are_searched_for_some_rounds(
    pipeline_tasks, stay_for_good, monkeypatch
):
    """The search replaces the groups only if others are faster."""
    tasks, groups_of = pipeline_tasks
    before = groups_of({slot: tasks[slot] for slot in range(4)})
    assert len(before) > 1
    # The new task takes the place of one that has left.
    changed = {slot: tasks[slot] for slot in (0, 2, 3)} | {1: tasks[4]}
    best = TaskGroups([groups_of._longest])(changed)
    searches, search = [], pipeline.grouping_of_share
    monkeypatch.setattr(
        pipeline, "grouping_of_share", lambda *own: searches.append(own) or search(*own)
    )
    groups_of.begin_anew(changed)
    kept = groups_of(changed)
    stay = [tuple(slot for slot in group if slot != 1) for group in before]
    assert {slot for group in kept for slot in group} == changed.keys()
    assert [tuple(slot for slot in group if slot != 1) for group in kept] == stay
    (joined,) = (group for group in kept if 1 in group)
    sizes = {slot: own.task.batch_size for slot, own in changed.items()}
    assert sum(sizes[slot] for slot in joined) - sizes[1] == min(
        sum(sizes[slot] for slot in group) for group in stay
    )
    while not searches:
        last = groups_of(changed)
    assert kept != best
    assert last == groups_of(changed) == (kept if stay_for_good else best)
    assert len(searches) == 1


@pytest.mark.long
def test_microbatches_of_another_size_keep_the_groups_for_some_rounds(pipeline_tasks, monkeypatch):
    tasks, groups_of = pipeline_tasks
    tasks = {slot: tasks[slot] for slot in range(4)}
    before = groups_of(tasks)
    longest = groups_of._longest
    larger = dataclasses.replace(longest, shape=ShapeClass(8, 128, 64, 16))
    # The last slot moves to the place of a task that has left.
    moved = {{3: 4}.get(slot, slot): task for slot, task in tasks.items()}
    best = TaskGroups([larger])(moved)
    other = groups_of.renumbered([larger], {0: 0, 1: 1, 2: 2, 3: 4})
    searches, search = [], pipeline.grouping_of_share
    monkeypatch.setattr(
        pipeline, "grouping_of_share", lambda *own: searches.append(own) or search(*own)
    )
    other.begin_anew(moved)
    kept = other(moved)
    assert kept == [tuple({3: 4}.get(slot, slot) for slot in group) for group in before]
    later = [other(moved) for _ in range(20)]
    assert searches and later[-1] == best == kept


def test_when_most_tasks_are_new_groups_are_searched_at_once(pipeline_tasks):
    tasks, groups_of = pipeline_tasks
    groups_of({0: tasks[0], 1: tasks[1]})
    groups_of.begin_anew(tasks)
    assert groups_of(tasks) == TaskGroups([groups_of._longest])(tasks)


@pytest.mark.parametrize("seed", range(8))
def test_each_moment_of_the_devices_is_counted_once_by_what_they_do(seed, monkeypatch):
    """Against a walk through the moments: the devices work in the order of dispatch, and what they
    wait for is what the host does meanwhile."""
    random, end, now = Random(seed), 400, 0
    monkeypatch.setattr(results, "time", SimpleNamespace(monotonic=lambda: now))
    works, begin, free = [], 0, 0
    while begin < end:
        begin += random.randrange(12)
        kind = random.choice(["training", "training", "evaluation"])
        free = max(begin, free) + random.randrange(1, 15)
        works.append((kind, begin, free, Event()))
    kinds = "compiling", "checkpoints"
    waits = [(random.choice(kinds), begin, begin + 20) for begin in range(5, end, 40)]
    expected, found, since = Counter(), Counter(), 0
    device_time, contexts = results.DeviceTime(), ExitStack()
    ended = []
    for now in range(end + 1):
        if now in {end_of for *_, end_of in waits}:
            contexts.close()
        for kind, begin, _ in waits:
            if begin == now:
                contexts.enter_context(device_time.waiting(kind))
        for kind, begin, end_of, done in works:
            if begin == now:
                ended.append((end_of, done, device_time.add(kind, now, done.wait)))
        for end_of, done, future in ended:
            if end_of == now:
                done.set()
                future.result()
        if random.random() < 0.1 or now == end:
            part = device_time.spent(since, now)
            assert sum(part.values()) == pytest.approx(now - since)
            found.update(part)
            since = now
        if now < end:
            busy = [kind for kind, begin, end_of, _ in works if begin <= now < end_of]
            waited = [kind for kind, begin, end_of in waits if begin <= now < end_of]
            expected[(busy or waited or ["idle"])[0]] += 1
    for _, done, _ in ended:
        done.set()
    device_time.close()
    assert found == pytest.approx(expected)
