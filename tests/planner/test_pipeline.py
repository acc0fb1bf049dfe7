"""Plans of a pipeline: complete, legal, and with few bubbles."""

import numpy as np
import pytest

from jaxmux.planner.pipeline import plan_pipeline, sequence_lengths
from jaxmux.planner.schedules import validate
from jaxmux.planner.shape_class import PlanningError, ShapeClass

SHAPE = ShapeClass(rows=1, row_len=2048, chunk_len=64, max_sequences=128)
STAGES = 4


def seconds_of(lengths, scale=(1.0,) * STAGES):
    """Linear in the microbatch's tokens, quadratic in the sequences', backward the longer one."""
    attention = sum(size**2 for size in lengths) / 20_000
    forward = (SHAPE.tokens + attention) * np.asarray(scale)
    return forward, forward + attention * np.asarray(scale)


def draw(seed: int, tasks: int = 4, rounds: int = 3, samples: int = 40):
    """Lengths between tasks as unlike as between data sets, from 60 to 900 tokens on average."""
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
    return plan_pipeline(rounds, SHAPE, seconds_of, solver_seconds=0)


def turns_of(rounds, groups):
    return [{slot: batches[slot] for slot in group} for batches in rounds for group in groups]


def test_the_plan_is_legal(plan):
    validate(plan.schedule)
    assert len(plan.microbatches) == len(plan.load.jobs) == len(plan.schedule.jobs)
    assert sorted(slot for group in plan.groups for slot in group) == [0, 1, 2, 3]


def test_every_sample_of_every_round_is_trained_once(plan, rounds):
    turns = turns_of(rounds, plan.groups)
    seen = [
        (laid.batch, laid.slot, sample)
        for microbatch in plan.microbatches
        for row in microbatch.rows
        for laid in row
        for sample, _, _ in laid.run.samples
    ]
    assert sorted(seen) == sorted(
        (i, slot, sample)
        for i, turn in enumerate(turns)
        for slot, sizes in turn.items()
        for sample in range(len(sizes))
    )


def test_jobs_carry_the_rounds_of_their_tasks_and_the_time_of_their_sequences(plan, rounds):
    turns = turns_of(rounds, plan.groups)
    groups = len(plan.groups)
    for job, microbatch, forward in zip(
        plan.load.jobs, plan.microbatches, plan.load.forward, strict=True
    ):
        batches = microbatch.batches()
        assert dict(job.batches) == {slot: turn // groups for slot, turn in batches.items()}
        assert (forward == seconds_of(sequence_lengths(microbatch, turns))[0]).all()
    assert {(u.task, u.step) for u in plan.schedule.updates} == {
        (task, step) for task in range(4) for step in range(len(rounds))
    }


def test_groups_come_in_descending_order_of_their_microbatches(rounds):
    plan = plan_pipeline(
        rounds, SHAPE, seconds_of, groupings=[((0, 1), (3,), (2,))], solver_seconds=0
    )
    assert plan.groups == ((3,), (2,), (0, 1))
    assert [job.bucket for job in plan.load.jobs if set(job.steps) == {0}] == sorted(
        job.bucket for job in plan.load.jobs if set(job.steps) == {0}
    )


def test_the_plan_is_the_fastest_of_the_groupings_offered(rounds, plan):
    fixed = plan_pipeline(rounds, SHAPE, seconds_of, groupings=[plan.groups], solver_seconds=0)
    assert fixed.schedule == plan.schedule
    together = plan_pipeline(
        rounds, SHAPE, seconds_of, groupings=[((0, 1, 2, 3),)], solver_seconds=0
    )
    assert plan.simulation.makespan <= together.simulation.makespan


@pytest.mark.parametrize("seed", range(2))
def test_a_stream_of_100_microbatches_has_few_bubbles(seed):
    head_on_last = (1.0, 1.0, 1.0, 1.2)
    rounds = draw(seed, rounds=4, samples=64)

    def on_last(lengths):
        return seconds_of(lengths, head_on_last)

    equal = plan_pipeline(rounds, SHAPE, seconds_of, solver_seconds=0)
    assert len(equal.microbatches) >= 100
    assert equal.simulation.bubble_ratio() <= 0.05
    with_head = plan_pipeline(rounds, SHAPE, on_last, solver_seconds=0)
    floor = 1 - sum(head_on_last) / (STAGES * max(head_on_last))
    assert floor == pytest.approx(0.125)
    assert floor <= with_head.simulation.bubble_ratio() <= 0.15


def test_one_task_alone_waits_for_its_updates():
    rounds = draw(seed=1, tasks=1, rounds=3)
    plan = plan_pipeline(rounds, SHAPE, seconds_of, solver_seconds=0)
    assert plan.groups == ((0,),)
    assert plan.simulation.bubble_ratio() > 0.2


def test_a_task_that_ends_early_leaves_the_others_in_turn():
    rounds = draw(seed=2, tasks=3)
    del rounds[-1][1]
    plan = plan_pipeline(rounds, SHAPE, seconds_of, solver_seconds=0)
    validate(plan.schedule)
    steps = {(task, step) for job in plan.load.jobs for task, step in job.batches}
    assert steps == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)}


def test_buffers_stay_within_their_limit(rounds):
    limit = (3, 3, 2, 1)
    plan = plan_pipeline(rounds, SHAPE, seconds_of, buffer_limit=limit, solver_seconds=0)
    validate(plan.schedule, limit)


def test_no_samples_are_refused():
    with pytest.raises(PlanningError, match="no samples"):
        plan_pipeline([{0: []}], SHAPE, seconds_of)
