"""Plans are complete, legal and no slower than their baselines."""

import time

import numpy as np
import pytest

from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.devices import ONE_DEVICE, Replica
from jaxmux.planner.pipeline import TaskLoad
from jaxmux.planner.pipeline.schedules import validate


@pytest.mark.long
@pytest.mark.parametrize("name", ["plan_of_one_device", "plan_of_two_stages", "plan"])
def test_every_sample_of_every_round_is_placed_once_and_nothing_overlaps(name, request, tasks):
    plan = request.getfixturevalue(name)
    placed = [(s.slot, s.step, s.sample) for own in plan.microbatches for s in own]
    assert sorted(placed) == [
        (slot, step, sample)
        for slot, task in enumerate(tasks)
        for step, batch in enumerate(task.batches)
        for sample in range(len(batch))
    ]
    for own in plan.microbatches:
        owner = np.full((plan.shape.rows, plan.shape.row_len), -1)
        for s in own:
            assert s.tokens == tasks[s.slot].batches[s.step][s.sample]
            cells = owner[s.row, s.offset : s.offset + s.tokens]
            assert len(cells) == s.tokens and (cells == -1).all()
            cells[:] = s.slot
        for chunk in owner.reshape(-1, plan.shape.chunk_len):
            assert len(set(chunk) - {-1}) <= 1


def test_schedule_is_legal_and_of_the_plans_microbatches(plan):
    validate(plan.schedule)
    for scheduled, own in zip(plan.schedule.microbatches, plan.microbatches, strict=True):
        assert set(scheduled.global_batches) >= {(s.slot, s.step) for s in own}


def test_prediction_is_the_time_of_the_schedule(plan):
    simulation = plan.simulate()
    own = plan.prediction
    assert own.bubble_ratio == pytest.approx(simulation.bubble_ratio())
    rounds = simulation.makespan / plan.rounds
    assert own.round_seconds == pytest.approx(rounds + own.update_seconds)
    assert plan.simulate(unit=1e-3).makespan == pytest.approx(1e3 * simulation.makespan)


def test_plan_is_at_least_as_fast_as_its_baselines(plan):
    names = {baseline.name: baseline for baseline in plan.baselines}
    assert set(names) == {"1F1B per task", "batch everything"}
    for baseline in plan.baselines:
        assert plan.prediction.round_seconds <= baseline.round_seconds
    assert plan.prediction.bubble_ratio < names["1F1B per task"].bubble_ratio


def test_tasks_on_one_device_are_one_htask(plan_of_one_device, tasks):
    plan = plan_of_one_device
    assert plan.htasks == (tuple(range(len(tasks))),) and plan.buckets == ((0,),)
    assert [baseline.name for baseline in plan.baselines] == ["one task at a time"]


@pytest.mark.long
def test_shape_class_depends_on_rounds_of_the_whole_training_run(plan_of):
    """It does not depend on the number of rounds that the schedule covers."""
    short, long = [[100] * 16] * 8, [[900] * 16] * 92
    load = TaskLoad("late", PoolSpec(1, 8), 16, 100, [100, 900], short + long)
    first = load._replace(batches=short)
    for replica in (ONE_DEVICE, Replica.uniform(2, 1)):
        shapes = [plan_of([own], replica).shape for own in (load, first)]
        assert shapes[0] != shapes[1]


def test_every_task_is_in_one_htask_and_every_htask_in_one_bucket(plan, tasks):
    assert sorted(slot for htask in plan.htasks for slot in htask) == list(range(len(tasks)))
    assert sorted(i for bucket in plan.buckets for i in bucket) == list(range(len(plan.htasks)))
    for microbatch in plan.schedule.microbatches:
        assert set(microbatch.tasks) & set(plan.groups[microbatch.bucket])


# A benchmark.
@pytest.mark.slow
def test_32_tasks_are_planned_in_seconds(plan_of, draw_tasks):
    loads = [
        task._replace(name=f"{task.name}.{i}") for i in range(8) for task in draw_tasks(samples=8)
    ]
    start = time.process_time()
    plan = plan_of(loads, Replica.uniform(4, 1))
    assert time.process_time() - start < 8
    # The stages have 9, 9, 8 and 6 layers, and the last one the head: 4% of their time is idle.
    assert len(plan.tasks) == 32 and plan.prediction.bubble_ratio < 0.09


def test_held_out_samples_fit_a_row_too(plan_of, tasks):
    assert plan_of([tasks[0]._replace(only_read=[4000])]).shape.row_len >= 4000


@pytest.mark.long
@pytest.mark.parametrize("replica", [ONE_DEVICE, Replica.uniform(2, 1)])
def test_forward_passes_for_objectives_take_time(replica, plan_of, tasks):
    scored = [task._replace(scored=1.0) for task in tasks[:2]]
    plain, some = plan_of(tasks, replica), plan_of([*scored, *tasks[2:]], replica)
    every, twice = (
        plan_of([task._replace(scored=tokens) for task in tasks], replica) for tokens in (1.0, 2.0)
    )
    seconds = [plan.prediction.round_seconds for plan in (plain, some, every, twice)]
    assert seconds[0] < seconds[1] < seconds[2] < seconds[3]
    # A forward pass is a third to a half of a training microbatch.
    assert 1.2 < seconds[2] / seconds[0] < 1.6
    for one, other in zip(plain.baselines, every.baselines, strict=True):
        assert other.round_seconds > one.round_seconds
