"""Plans of a pipeline are complete and legal and have few bubbles."""

import numpy as np
import pytest

from jaxmux.planner.errors import PlanningError
from jaxmux.planner.packing.microbatches import cut_batches
from jaxmux.planner.packing.shape_class import ShapeClass
from jaxmux.planner.pipeline.grouping_estimates import most_promising
from jaxmux.planner.pipeline.groupings import Grouping, candidate_groupings
from jaxmux.planner.pipeline.pipeline_plan import (
    PipelineCosts,
    plan_grouping,
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
    return plan_pipeline(rounds, COSTS)


def turns_of(rounds, groups):
    return [{slot: batches[slot] for slot in group} for batches in rounds for group in groups]


def test_the_plan_is_legal(plan):
    validate(plan.schedule)
    counts = [len(plan.workload.microbatches), len(plan.schedule.microbatches)]
    assert counts == [len(plan.microbatches)] * 2
    assert sorted(slot for group in plan.groups for slot in group) == [0, 1, 2, 3]


def test_every_sample_of_every_round_is_trained_once(plan, rounds):
    turns = turns_of(rounds, plan.groups)
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
    turns = turns_of(rounds, plan.groups)
    groups, workload = len(plan.groups), plan.workload
    for scheduled, microbatch, forward in zip(
        workload.microbatches, plan.microbatches, workload.forward, strict=True
    ):
        steps = {slot: turn // groups for slot, turn in microbatch.turns().items()}
        assert dict(scheduled.global_batches) == steps
        assert (forward == seconds_of(sequence_lengths(microbatch, turns))[0]).all()
    assert {(u.task, u.step) for u in plan.schedule.updates} == {
        (task, step) for task in range(4) for step in range(len(rounds))
    }


def test_groups_come_in_descending_order_of_their_microbatches(rounds):
    plan = plan_grouping(rounds, grouping_of((0, 1), (3,), (2,)), COSTS)
    assert plan.groups == ((3,), (2,), (0, 1))
    first_round = [m.bucket for m in plan.workload.microbatches if set(m.steps) == {0}]
    assert first_round == sorted(first_round)


def test_the_plan_is_no_slower_than_with_one_group_and_its_grouping_makes_it_again(rounds, plan):
    fixed = plan_grouping(rounds, plan.grouping, COSTS)
    assert fixed.schedule == plan.schedule
    together = plan_grouping(rounds, grouping_of((0, 1, 2, 3)), COSTS)
    assert plan.simulation.makespan <= together.simulation.makespan


@pytest.mark.parametrize("seed", range(2))
def test_a_stream_of_100_microbatches_has_few_bubbles(seed):
    head_on_last = (1.0, 1.0, 1.0, 1.2)
    rounds = draw(seed, rounds=4, samples=64)

    def on_last(lengths):
        return seconds_of(lengths, head_on_last)

    equal = plan_pipeline(rounds, COSTS)
    assert len(equal.microbatches) >= 100
    assert equal.simulation.bubble_ratio() <= 0.05
    with_head = plan_pipeline(rounds, PipelineCosts(SHAPE, on_last))
    floor = 1 - sum(head_on_last) / (STAGES * max(head_on_last))
    assert floor == pytest.approx(0.125)
    assert floor <= with_head.simulation.bubble_ratio() <= 0.15


def test_one_task_alone_waits_for_its_updates():
    rounds = draw(seed=1, tasks=1, rounds=3)
    plan = plan_pipeline(rounds, COSTS)
    assert plan.groups == ((0,),)
    assert plan.simulation.bubble_ratio() > 0.2


def test_a_task_that_ends_early_leaves_the_others_in_turn():
    rounds = draw(seed=2, tasks=3)
    del rounds[-1][1]
    plan = plan_pipeline(rounds, COSTS)
    validate(plan.schedule)
    steps = {pair for m in plan.workload.microbatches for pair in m.global_batches}
    assert steps == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)}


def test_buffers_stay_within_their_limit(rounds):
    limit = (3, 3, 2, 1)
    plan = plan_pipeline(rounds, COSTS._replace(buffer_limit=limit))
    validate(plan.schedule, limit)


def test_no_samples_are_refused():
    with pytest.raises(PlanningError, match="no samples"):
        plan_pipeline([{0: []}], COSTS)


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


@pytest.mark.parametrize("samples", [8, 20])
def test_search_finds_the_best_of_all_divisions_to_a_percent(samples):
    """The search simulates only a few of them."""
    for seed in range(2):
        rounds = draw(seed, rounds=4, samples=samples)
        everything = [
            plan_grouping(rounds, grouping_of(*groups), COSTS) for groups in divisions([0, 1, 2, 3])
        ]
        best = min(plan.simulation.makespan for plan in everything)
        found = plan_pipeline(rounds, COSTS)
        assert best * (1 - 1e-9) <= found.simulation.makespan <= 1.01 * best


def test_estimates_are_near_the_simulated_time():
    """All microbatches take the same time here."""
    forward, backward = np.array([1.0] * STAGES), np.array([1.2] * STAGES)
    costs = PipelineCosts(SHAPE, lambda lengths: (forward, backward))
    rounds = draw(seed=4, rounds=6, samples=20)
    candidates = candidate_groupings(cut(rounds), SHAPE, forward)
    found = most_promising(candidates, cut(rounds), SHAPE, forward, backward)
    assert 0 < len(found) <= 3 * 2 * STAGES
    for estimate in found:
        plan = plan_grouping(rounds, estimate.grouping, costs)
        assert estimate.seconds == pytest.approx(plan.simulation.makespan, rel=0.15)


def test_estimates_depend_on_how_many_microbatches_fit():
    """A microbatch takes F + B with paired ticks and 2B with single ones, but 2S - 1 instead of S
    microbatches are in flight."""
    rounds = [{0: [200] * 40}]
    forward, backward = [1.0] * 4, [3.0] * 4
    candidates = candidate_groupings(cut(rounds), SHAPE, np.full(4, 2.0))

    def fastest(depth: int | None) -> str:
        found = most_promising(candidates, cut(rounds), SHAPE, forward, backward, 0.0, depth)
        return min(found, key=lambda estimate: estimate.seconds).rule

    assert {fastest(None), fastest(7)} <= {"paired", "alternating"}
    assert fastest(4) == "single"
