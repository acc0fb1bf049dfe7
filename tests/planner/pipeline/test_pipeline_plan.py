"""Plans of a pipeline are complete and legal and have few bubbles."""

import itertools

import numpy as np
import pytest

from jaxmux.planner.errors import PlanningError
from jaxmux.planner.packing.microbatches import cut_batches
from jaxmux.planner.packing.rows import ShapeClass
from jaxmux.planner.pipeline.groupings import (
    Grouping,
    candidate_groupings,
    chunks_of,
    most_promising,
    stream_length,
)
from jaxmux.planner.pipeline.pipeline_plan import (
    PipelineCosts,
    PipelinePlan,
    choose_grouping,
    grouping_of_tasks,
    one_htask,
    pack_in_groups,
    plan_pipeline,
    sequence_lengths,
)
from jaxmux.planner.pipeline.schedules import validate

SHAPE = ShapeClass(rows=1, row_len=2048, chunk_len=64, max_sequences=128)
STAGES = 4


def seconds_of(lengths, scale=(1.0,) * STAGES):
    """Times that grow with the tokens and with the squares of the sequence lengths."""
    attention = sum(size**2 for size in lengths) / 20_000
    forward = (SHAPE.tokens + attention) * np.asarray(scale)
    return forward, forward + attention * np.asarray(scale)


COSTS = PipelineCosts(SHAPE, seconds_of)
EQUAL = PipelineCosts(SHAPE, lambda lengths: (np.ones(STAGES), np.full(STAGES, 2.0)))


def plan_of(rounds, costs=COSTS) -> PipelinePlan:
    """The plan with the grouping that is found for these rounds."""
    return plan_pipeline(rounds, choose_grouping(rounds, SHAPE, STAGES), costs)


def grouping_of(*groups) -> Grouping:
    """A grouping in which every task is an hTask."""
    slots = sorted(slot for group in groups for slot in group)
    place = {slot: i for i, slot in enumerate(slots)}
    buckets = tuple(tuple(place[slot] for slot in group) for group in groups)
    return Grouping(tuple((slot,) for slot in slots), buckets)


def draw(seed: int, tasks: int = 4, rounds: int = 3, samples: int = 40):
    """Rounds of tasks whose mean lengths differ like data sets, from 60 to 900 tokens."""
    rng = np.random.default_rng(seed)
    means = np.geomspace(60, 900, tasks)
    return [
        {
            slot: np.clip(rng.lognormal(np.log(mean), 0.4, samples), 16, 2048).astype(int).tolist()
            for slot, mean in enumerate(means)
        }
        for _ in range(rounds)
    ]


@pytest.fixture(scope="module")
def rounds():
    return draw(seed=0)


@pytest.fixture(scope="module")
def plan(rounds):
    return plan_of(rounds)


def turns_of(rounds, groups):
    return [{slot: batches[slot] for slot in group} for batches in rounds for group in groups]


def test_the_plan_is_legal(plan):
    validate(plan.schedule)
    counts = [len(plan.workload.microbatches), len(plan.schedule.microbatches)]
    assert counts == [len(plan.microbatches)] * 2
    assert sorted(slot for group in plan.grouping.groups for slot in group) == [0, 1, 2, 3]


def test_every_sample_of_every_round_is_trained_once(plan, rounds):
    turns = turns_of(rounds, plan.grouping.groups)
    seen = [
        (placed.turn, placed.slot, sample)
        for microbatch in plan.microbatches
        for row in microbatch.rows
        for placed in row
        for sample, _, _ in placed.span.samples
    ]
    assert sorted(seen) == sorted(
        (i, slot, sample)
        for i, turn in enumerate(turns)
        for slot, sizes in turn.items()
        for sample in range(len(sizes))
    )


def test_microbatches_have_the_steps_of_their_tasks_and_the_time_of_their_sequences(plan, rounds):
    turns = turns_of(rounds, plan.grouping.groups)
    groups, workload = len(plan.grouping.groups), plan.workload
    for scheduled, microbatch, forward in zip(
        workload.microbatches, plan.microbatches, workload.forward, strict=True
    ):
        steps = {slot: turn // groups for slot, turn in microbatch.turns().items()}
        # Besides, it counts for all tasks that are updated together with its own.
        assert steps.items() <= dict(scheduled.global_batches).items()
        together = {slot for turn in microbatch.turns().values() for slot in turns[turn]}
        assert set(scheduled.tasks) == together
        assert (forward == seconds_of(sequence_lengths(microbatch, turns))[0]).all()
    assert {(u.task, u.step) for u in plan.schedule.updates} == {
        (task, step) for task in range(4) for step in range(len(rounds))
    }


def test_groups_come_in_their_order_and_share_one_microbatch_at_most(rounds):
    groups = ((3,), (2,), (0, 1))
    plan = plan_pipeline(rounds, grouping_of(*groups), COSTS)
    order = {slot: i for i, group in enumerate(groups) for slot in group}
    for i in range(len(rounds)):
        own = [m for at, m in zip(plan.rounds, plan.workload.microbatches, strict=True) if at == i]
        held = [sorted({order[task] for task in m.tasks}) for m in own]
        assert [i for i, _ in itertools.groupby(group for some in held for group in some)] == [
            *range(3)
        ]
        assert sum(len(some) > 1 for some in held) <= 2


def test_a_round_is_packed_by_itself(rounds, plan):
    """What training packs, round by round, is what the plan shows."""
    for i, batches in enumerate(rounds):
        planned = [m for at, m in zip(plan.rounds, plan.microbatches, strict=True) if at == i]
        packed = pack_in_groups(batches, plan.grouping.groups, SHAPE)
        assert [m.placements(SHAPE) for m in planned] == [m.placements(SHAPE) for m in packed]


def test_the_grouping_is_no_slower_than_one_group(rounds):
    found = plan_of(rounds, EQUAL)
    together = plan_pipeline(rounds, one_htask(range(4)), EQUAL)
    assert found.simulation.makespan <= together.simulation.makespan


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stream_of_100_microbatches_has_few_bubbles(seed):
    head_on_last = (1.0, 1.0, 1.0, 1.2)
    rounds = draw(seed, rounds=4, samples=64)

    def on_last(lengths):
        return tuple(seconds * np.array(head_on_last) for seconds in EQUAL.stage_seconds(lengths))

    equal = plan_of(rounds, EQUAL)
    assert len(equal.microbatches) >= 100
    assert equal.simulation.bubble_ratio() <= 0.05
    with_head = plan_of(rounds, PipelineCosts(SHAPE, on_last))
    floor = 1 - sum(head_on_last) / (STAGES * max(head_on_last))
    assert floor == pytest.approx(0.125)
    assert floor <= with_head.simulation.bubble_ratio() <= 0.15


def test_one_task_alone_waits_for_its_updates():
    rounds = draw(seed=1, tasks=1, rounds=3)
    plan = plan_of(rounds)
    assert plan.grouping.groups == ((0,),)
    assert plan.simulation.bubble_ratio() > 0.2


def test_a_task_that_ends_early_leaves_the_others_in_turn():
    rounds = draw(seed=2, tasks=3)
    del rounds[-1][1]
    plan = plan_of(rounds)
    validate(plan.schedule)
    steps = {pair for m in plan.workload.microbatches for pair in m.global_batches}
    assert steps == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)}


def test_no_samples_are_refused():
    with pytest.raises(PlanningError, match="no samples"):
        choose_grouping([{0: []}], SHAPE, STAGES)


def cut(rounds):
    return [cut_batches(batches, SHAPE) for batches in rounds]


def divisions(slots):
    """Every way to divide the tasks into groups."""
    if not slots:
        yield []
        return
    first, *rest = slots
    for groups in divisions(rest):
        yield [(first,), *groups]
        for i, group in enumerate(groups):
            yield [*groups[:i], (first, *group), *groups[i + 1 :]]


@pytest.mark.parametrize("tasks", [1, 3, 4, 7, 20])
def test_candidates_are_distinct_and_hold_every_task_once(tasks):
    rounds = [{slot + 5: sizes for slot, sizes in draw(seed=3, tasks=tasks)[0].items()}]
    found = candidate_groupings(cut(rounds), SHAPE, [1.0] * STAGES)
    assert len({frozenset(candidate.groups) for candidate in found}) == len(found) >= min(tasks, 2)
    for candidate in found:
        assert sorted(slot for group in candidate.groups for slot in group) == sorted(rounds[0])
        assert len(candidate.groups) <= 2 * STAGES
    # There is a partition into every number of hTasks but one, which equals one bucket of all.
    if tasks > 5:
        assert {len(candidate.htasks) for candidate in found} >= set(range(2, min(tasks, 12)))


def test_of_few_tasks_every_division_is_a_candidate(rounds):
    found = candidate_groupings(cut(rounds), SHAPE, [1.0] * STAGES)
    expected = {frozenset(groups) for groups in divisions([0, 1, 2, 3])}
    assert {frozenset(candidate.groups) for candidate in found} == expected


@pytest.mark.long
@pytest.mark.parametrize("samples", [8, pytest.param(20, marks=pytest.mark.slow)])
def test_search_finds_the_best_of_all_divisions_to_a_percent(samples):
    """The search simulates only a few of them."""
    for seed in range(1 if samples == 8 else 2):
        rounds = draw(seed, rounds=3, samples=samples)
        everything = [
            plan_pipeline(rounds, grouping_of(*groups), EQUAL)
            for division in divisions([0, 1, 2, 3])
            for groups in itertools.permutations(division)
        ]
        best = min(plan.simulation.makespan for plan in everything)
        found = plan_of(rounds, EQUAL)
        assert best * (1 - 1e-9) <= found.simulation.makespan <= 1.01 * best


@pytest.mark.long
def test_estimated_lengths_of_streams_are_near_the_simulated_time():
    rounds = draw(seed=4, rounds=6, samples=20)
    candidates = candidate_groupings(cut(rounds), SHAPE, [1.5] * STAGES)
    found = most_promising(candidates, cut(rounds), SHAPE, STAGES)
    assert 0 < len(found) <= 2 * STAGES
    for grouping in found:
        plan = plan_pipeline(rounds, grouping, EQUAL)
        shares = [
            [sum(map(chunks_of, (own[slot] for slot in group))) / SHAPE.chunks for group in groups]
            for groups in [grouping.groups]
            for own in cut(rounds)
        ]
        estimate = 3.0 * (stream_length(shares, STAGES) + STAGES - 1)
        assert estimate == pytest.approx(plan.simulation.makespan, rel=0.15)


def test_tasks_are_grouped_by_the_rounds_in_which_all_of_them_train():
    batches = [[own[slot] for own in draw(seed=5, rounds=6)] for slot in range(4)]
    ends_early = [*batches[:3], batches[3][:2]]
    grouping = grouping_of_tasks(ends_early, SHAPE, STAGES)
    assert grouping == grouping_of_tasks([own[:2] for own in ends_early], SHAPE, STAGES)
    assert len(grouping.groups) > 1
    assert grouping_of_tasks(batches, SHAPE, 1) == one_htask(range(4))
    assert grouping_of_tasks(batches[:1], SHAPE, STAGES) == one_htask([0])


@pytest.mark.long
def test_groups_in_use_stay_unless_others_are_faster_by_a_percent():
    stayed = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        rounds = draw(seed, tasks=6, rounds=2, samples=20)
        best = plan_of(rounds, EQUAL)
        assert (
            choose_grouping(rounds, SHAPE, STAGES, best.grouping.groups).groups
            == best.grouping.groups
        )
        parts = np.array_split(rng.permutation(6), rng.integers(1, 4))
        present = [tuple(part.tolist()) for part in parts]
        found = choose_grouping(rounds, SHAPE, STAGES, present)
        kept = plan_pipeline(rounds, grouping_of(*present), EQUAL)
        stays = kept.simulation.makespan * 0.99 < best.simulation.makespan
        assert found.groups == (kept if stays else best).grouping.groups
        stayed.append(stays)
    assert 0 < sum(stayed) < 3


def test_groups_in_use_stay_if_no_samples_of_a_task_are_known():
    batches = [[own[slot] for own in draw(seed=5, rounds=4)] for slot in range(3)]
    present = ((0, 3), (1, 2))
    assert grouping_of_tasks([*batches, [[]] * 4], SHAPE, STAGES, present).groups == present


@pytest.mark.parametrize("seed", range(4))
def test_tasks_whose_samples_train_elsewhere_in_some_rounds_are_in_one_group_each(seed):
    rng = np.random.default_rng(seed)
    tasks, steps = int(rng.integers(2, 6)), 12
    batches = [
        [own[slot] if rng.random() < 0.6 else [] for own in draw(seed, tasks, steps, samples=60)]
        for slot in range(tasks)
    ]
    # Of the first task, nothing is known before the last rounds.
    batches[0][: steps - 2] = [[]] * (steps - 2)
    for known in (batches, [[[]] * steps] * tasks):
        groups = grouping_of_tasks(known, SHAPE, STAGES).groups
        assert sorted(slot for group in groups for slot in group) == list(range(tasks))
