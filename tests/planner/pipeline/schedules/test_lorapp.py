"""LoRAPP's steady bubble ratios are mLoRA's closed forms (3.2.2)."""

import itertools

import numpy as np
import pytest

from jaxmux.planner.pipeline.schedules import (
    PipelineSchedule,
    Workload,
    batch_lora,
    lorapp,
    round_robin_microbatches,
    simulate_asynchronous,
    simulate_lockstep,
    split_minibatches,
    uniform_workload,
    validate,
)

STEPS = 24


def stream(stages: int, tasks: int, forward: float = 1.0, backward: float = 1.0) -> Workload:
    return uniform_workload(
        round_robin_microbatches(tasks, STEPS), [forward] * stages, [backward] * stages
    )


def steady_ratio(schedule: PipelineSchedule, load: Workload, simulate) -> float:
    """Over whole periods: between the first backwards on stage 0 of two steps of task 0."""
    simulation = simulate(schedule, load)
    first = {}
    for j, job in enumerate(load.jobs):
        for task, step in job.batches:
            if task == 0:
                start = float(simulation.backward_start[0, j])
                first[step] = min(start, first.get(step, start))
    return simulation.bubble_ratio((first[STEPS // 4], first[3 * STEPS // 4]))


@pytest.mark.parametrize("stages,tasks", list(itertools.product([1, 2, 4, 6], [1, 2, 3, 4, 6, 7])))
def test_bubble_ratio_without_splitting(stages, tasks):
    load = stream(stages, tasks)
    schedule = lorapp(load)
    validate(schedule)
    expected = max((stages - tasks) / stages, 0)
    assert steady_ratio(schedule, load, simulate_lockstep) == pytest.approx(expected, abs=1e-9)
    assert steady_ratio(schedule, load, simulate_asynchronous) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("stages,tasks", list(itertools.product([2, 4], [1, 2, 4])))
def test_bubble_ratio_without_splitting_when_backward_is_longer(stages, tasks):
    load = stream(stages, tasks, backward=1.5)
    expected = max((stages - tasks) / stages, 0)
    ratio = steady_ratio(lorapp(load), load, simulate_asynchronous)
    assert ratio == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    "stages,tasks,parts", list(itertools.product([2, 4, 6], [1, 2, 3, 4], [1, 2, 3, 4]))
)
def test_bubble_ratio_with_splitting(stages, tasks, parts):
    load = split_minibatches(stream(stages, tasks), parts)
    schedule = lorapp(load)
    validate(schedule)
    closed_form = max((stages - 1 + parts - tasks * parts) / (stages + parts - 1), 0)
    ratio = steady_ratio(schedule, load, simulate_lockstep)
    assert ratio == pytest.approx(closed_form, abs=1e-9)


def test_in_paired_ticks_twice_as_many_tasks_as_stages_fill_the_pipeline():
    stages = 4
    for tasks, expected in ((2 * stages, 0.0), (stages, 0.5)):
        load = stream(stages, tasks, backward=1.5)
        schedule = lorapp(load, "paired")
        validate(schedule)
        ticks = schedule.forward_ticks()[0]
        steady = np.diff(ticks[len(ticks) // 4 : 3 * len(ticks) // 4])
        assert 1 - 1 / np.mean(steady) == pytest.approx(expected, abs=0.05)


def test_batch_lora_makes_one_task_a_stage_and_keeps_the_work():
    load = stream(3, 8)
    batched = batch_lora(load)
    assert len({job.bucket for job in batched.jobs}) == 3
    assert batched.forward.sum() == load.forward.sum()
    members = [pair for job in batched.jobs for pair in job.batches]
    assert sorted(members) == sorted(pair for job in load.jobs for pair in job.batches)
    schedule = lorapp(batched)
    validate(schedule)
    assert len(schedule.updates) == 8 * STEPS


def test_batch_lora_balances_tasks_of_unequal_cost():
    load = stream(2, 4)
    scale = np.array([8.0, 1.0, 3.0, 4.0])[[job.tasks[0] for job in load.jobs], None]
    load = Workload(load.jobs, load.forward * scale, load.backward * scale)
    groups = {job.tasks for job in batch_lora(load).jobs}
    assert groups == {(0,), (1, 2, 3)}


def test_batch_lora_leaves_few_tasks_alone():
    load = stream(4, 4)
    assert batch_lora(load) is load
