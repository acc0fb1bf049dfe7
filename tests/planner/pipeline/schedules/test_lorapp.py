"""LoRAPP's bubble ratios without warm-up and drain equal mLoRA's closed forms (3.2.2)."""

import itertools

import numpy as np
import pytest
from mlora_workloads import batch_lora, split_minibatches

from jaxmux.planner.pipeline.schedules import (
    PipelineSchedule,
    Workload,
    lorapp,
    round_robin_microbatches,
    simulate_asynchronous,
    simulate_lockstep,
    uniform_workload,
    validate,
)

STEPS = 24


def stream(stages: int, tasks: int, forward: float = 1.0, backward: float = 1.0) -> Workload:
    return uniform_workload(
        round_robin_microbatches(tasks, STEPS), [forward] * stages, [backward] * stages
    )


def steady_ratio(schedule: PipelineSchedule, workload: Workload, simulate) -> float:
    """The bubble ratio between the first backward passes on stage 0 of two steps of task 0."""
    simulation = simulate(schedule, workload)
    first = {}
    for m, microbatch in enumerate(workload.microbatches):
        for task, step in microbatch.global_batches:
            if task == 0:
                start = float(simulation.backward_start[0, m])
                first[step] = min(start, first.get(step, start))
    return simulation.bubble_ratio((first[STEPS // 4], first[3 * STEPS // 4]))


@pytest.mark.parametrize("stages,tasks", list(itertools.product([1, 2, 4, 6], [1, 2, 3, 4, 6, 7])))
def test_bubble_ratio_without_splitting(stages, tasks):
    workload = stream(stages, tasks)
    schedule = lorapp(workload)
    validate(schedule)
    expected = max((stages - tasks) / stages, 0)
    for simulate in (simulate_lockstep, simulate_asynchronous):
        ratio = steady_ratio(schedule, workload, simulate)
        assert ratio == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("stages,tasks", list(itertools.product([2, 4], [1, 2, 4])))
def test_bubble_ratio_without_splitting_when_backward_is_longer(stages, tasks):
    workload = stream(stages, tasks, backward=1.5)
    expected = max((stages - tasks) / stages, 0)
    ratio = steady_ratio(lorapp(workload), workload, simulate_asynchronous)
    assert ratio == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    "stages,tasks,parts", list(itertools.product([2, 4, 6], [1, 2, 3, 4], [1, 2, 3, 4]))
)
def test_bubble_ratio_with_splitting(stages, tasks, parts):
    workload = split_minibatches(stream(stages, tasks), parts)
    schedule = lorapp(workload)
    validate(schedule)
    closed_form = max((stages - 1 + parts - tasks * parts) / (stages + parts - 1), 0)
    ratio = steady_ratio(schedule, workload, simulate_lockstep)
    assert ratio == pytest.approx(closed_form, abs=1e-9)


def test_in_paired_ticks_twice_as_many_tasks_as_stages_fill_the_pipeline():
    stages = 4
    for tasks, expected in ((2 * stages, 0.0), (stages, 0.5)):
        workload = stream(stages, tasks, backward=1.5)
        schedule = lorapp(workload, "paired")
        validate(schedule)
        ticks = schedule.forward_ticks()[0]
        steady = np.diff(ticks[len(ticks) // 4 : 3 * len(ticks) // 4])
        assert 1 - 1 / np.mean(steady) == pytest.approx(expected, abs=0.05)


def global_batches(workload: Workload) -> list[tuple[int, int]]:
    return [pair for microbatch in workload.microbatches for pair in microbatch.global_batches]


def test_batch_lora_makes_one_task_a_stage_and_keeps_the_work():
    workload = stream(3, 8)
    batched = batch_lora(workload)
    assert len({microbatch.bucket for microbatch in batched.microbatches}) == 3
    assert batched.forward.sum() == workload.forward.sum()
    assert sorted(global_batches(batched)) == sorted(global_batches(workload))
    schedule = lorapp(batched)
    validate(schedule)
    assert len(schedule.updates) == 8 * STEPS


def test_batch_lora_balances_tasks_of_unequal_cost():
    workload = stream(2, 4)
    tasks = [microbatch.tasks[0] for microbatch in workload.microbatches]
    scale = np.array([8.0, 1.0, 3.0, 4.0])[tasks, None]
    workload = Workload(workload.microbatches, workload.forward * scale, workload.backward * scale)
    groups = {microbatch.tasks for microbatch in batch_lora(workload).microbatches}
    assert groups == {(0,), (1, 2, 3)}


def test_batch_lora_leaves_few_tasks_alone():
    workload = stream(4, 4)
    assert batch_lora(workload) is workload
