"""Every generator makes legal schedules, which an executor's interpreter runs as they are, with the
textbook's bubble ratios."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxmux.planner import PlanningError
from jaxmux.planner.pipeline.schedules import (
    PipelineSchedule,
    ScheduledMicrobatch,
    Workload,
    gpipe,
    interleaved,
    lorapp,
    one_forward_one_backward,
    round_robin_microbatches,
    simulate_asynchronous,
    simulate_lockstep,
    template,
    tick_tables,
    uniform_workload,
    validate,
)

ONE_F_ONE_B = ("1f1b", "1f1b paired", "1f1b alternating")
GENERATORS = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "1f1b paired": lambda load: one_forward_one_backward(load, "paired"),
    "1f1b alternating": lambda load: one_forward_one_backward(load, "alternating"),
    "interleaved 2": lambda load: interleaved(load, 2),
    "interleaved 3": lambda load: interleaved(load, 3),
    "lorapp": lorapp,
    "lorapp paired": lambda load: lorapp(load, "paired"),
    "template": template,
    "template asynchronous": lambda load: template(load, "asynchronous"),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_schedules_of_random_workloads_are_legal(name, random_load):
    for seed in range(60):
        validate(GENERATORS[name](random_load(seed)))


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_one_microbatch_runs_alone(name, stages):
    load = uniform_workload([ScheduledMicrobatch((3,), (7,))], [1.0] * stages, [2.0] * stages)
    schedule = GENERATORS[name](load)
    validate(schedule)
    assert simulate_lockstep(schedule, load).makespan == pytest.approx(3.0 * stages)


@pytest.mark.parametrize(
    "name", ["1f1b", "1f1b paired", "1f1b alternating", "lorapp", "lorapp paired", "template"]
)
def test_schedules_keep_the_buffer_limit(name, random_load):
    for seed in range(40):
        load = random_load(seed)
        limit = tuple(np.random.default_rng(seed).integers(2, 5, load.stages).tolist())
        schedule = GENERATORS[name](dataclasses.replace(load, buffer_limit=limit))
        validate(schedule, limit)


def test_gpipe_says_that_its_flush_does_not_fit(one_batch):
    load = dataclasses.replace(one_batch(2, 5), buffer_limit=(4, 4))
    with pytest.raises(PlanningError, match="stage 0: no room for job 4 within 4 buffers"):
        gpipe(load)


def test_interleaved_says_that_its_chunks_do_not_fit(one_batch):
    load = dataclasses.replace(one_batch(4, 8), buffer_limit=(3,) * 4)
    with pytest.raises(PlanningError, match="too small for 2 chunks"):
        interleaved(load, 2)


@pytest.mark.parametrize("name", GENERATORS)
def test_an_executor_finds_every_value_in_the_slot_that_the_tables_name(name, random_load):
    for seed in range(12):
        load = random_load(seed)
        schedule = GENERATORS[name](load)
        assert _interpret(schedule) == 2 * schedule.virtual_stages * len(load.jobs)


def _interpret(schedule: PipelineSchedule) -> int:
    """Runs the tick tables as an executor would, values being their own descriptions, and counts
    the ops. Whatever is read must be what the op needs."""
    tables, stages = tick_tables(schedule), schedule.stages
    last = schedule.virtual_stages - 1
    rings = [[[None] * size for size in schedule.ring_sizes()] for _ in range(stages)]
    right, left, loss = ([None] * stages for _ in range(3))
    ops = 0

    def put(ring, slot, value):
        size = schedule.jobs[value[2]].buffers
        ring[slot : slot + size] = [value] * size

    def get(ring, slot, value):
        size = schedule.jobs[value[2]].buffers
        assert ring[slot : slot + size] == [value] * size

    for tick in range(schedule.ticks):
        now = type(tables)(*(table[:, tick] for table in tables))
        arrived = [right[s - 1] for s in range(stages)], left[1:] + left[:1], loss
        right, left, loss = ([None] * stages for _ in range(3))
        for s, (residuals, activations, gradients) in enumerate(rings):
            for slot, ring, values in zip(
                (now.arriving_activation[s], now.arriving_gradient[s], now.arriving_loss[s]),
                (activations, gradients, gradients),
                arrived,
                strict=True,
            ):
                if slot != -1:
                    put(ring, slot, values[s])
            if (mb := now.backward_mb[s]) != -1:
                v = now.backward_chunk[s] * stages + s
                get(gradients, now.backward_gradient[s], ("gradient", v, mb))
                get(residuals, now.backward_residual[s], ("residual", v, mb))
                left[s] = ("gradient", v - 1, mb)
                ops += 1
            if (mb := now.forward_mb[s]) != -1:
                v = now.forward_chunk[s] * stages + s
                if v:
                    get(activations, now.forward_activation[s], ("activation", v, mb))
                put(residuals, now.forward_residual[s], ("residual", v, mb))
                right[s] = ("activation", v + 1, mb)
                loss[s] = ("gradient", last, mb)
                ops += 1
    return ops


@pytest.mark.parametrize(
    "name,stages,jobs",
    list(
        itertools.product(
            ["gpipe", "1f1b", "1f1b paired", "1f1b alternating"], [1, 2, 4, 8], [1, 3, 8, 32]
        )
    ),
)
def test_flush_bubble_ratio_is_s_minus_1_over_n_plus_s_minus_1(name, stages, jobs, one_batch):
    load = one_batch(stages, jobs)
    schedule = GENERATORS[name](load)
    expected = (stages - 1) / (jobs + stages - 1)
    assert simulate_lockstep(schedule, load).bubble_ratio() == pytest.approx(expected)
    assert simulate_asynchronous(schedule, load).bubble_ratio() == pytest.approx(expected)


@pytest.mark.parametrize(
    "stages,groups,chunks", list(itertools.product([1, 2, 4, 8], [1, 2, 5], [2, 3, 4]))
)
def test_interleaved_bubble_ratio_is_a_chunkth(stages, groups, chunks, one_batch):
    load = one_batch(stages, stages * groups)
    schedule = interleaved(load, chunks)
    expected = (stages - 1) / (chunks * stages * groups + stages - 1)
    assert simulate_lockstep(schedule, load).bubble_ratio() == pytest.approx(expected)


def test_paired_ticks_keep_the_bubble_ratio_when_backward_is_longer():
    stages, jobs = 4, 20
    load = uniform_workload(
        [ScheduledMicrobatch((0,), (0,))] * jobs, [1.0] * stages, [1.3] * stages
    )
    expected = (stages - 1) / (jobs + stages - 1)
    paired = one_forward_one_backward(load, "paired")
    single = one_forward_one_backward(load)
    assert simulate_lockstep(paired, load).bubble_ratio() == pytest.approx(expected)
    assert simulate_lockstep(single, load).bubble_ratio() > expected + 0.05


def test_1f1b_holds_s_minus_stage_jobs(one_batch):
    load = one_batch(5, 20)
    assert one_forward_one_backward(load).peak_buffers().tolist() == [5, 4, 3, 2, 1]
    paired = one_forward_one_backward(load, "paired")
    assert paired.peak_buffers().tolist() == [9, 7, 5, 3, 1]
    assert gpipe(load).peak_buffers().tolist() == [20] * 5


@pytest.mark.parametrize("name", GENERATORS)
def test_a_stream_of_many_global_batches_obeys_the_update_rule(name):
    load = uniform_workload(round_robin_microbatches(3, 20, microbatches=2), [1.0] * 4, [1.0] * 4)
    schedule = GENERATORS[name](load)
    validate(schedule)
    assert len(schedule.updates) == 60


def test_schedule_prints_as_a_grid(one_batch):
    assert str(one_forward_one_backward(one_batch(2, 2), "paired")).splitlines() == [
        "stage 0 |  F0 |  F1 |     |  B0 |  B1 |",
        "stage 1 |     |  F0 |B0 F1|  B1 |     |",
    ]


def test_workload_errors_name_what_is_wrong():
    jobs, times = (ScheduledMicrobatch((0,), (0,), buffers=3),), np.ones((1, 2))
    with pytest.raises(PlanningError, match="job 0 takes 3 buffers, stage 1 has 2"):
        Workload(jobs, times, times, buffer_limit=(4, 2))
    with pytest.raises(PlanningError, match=r"forward times \(1, 2\) and backward times \(2, 2\)"):
        Workload(jobs, times, np.ones((2, 2)))
    with pytest.raises(PlanningError, match="must be positive"):
        Workload(jobs, times * 0, times)


@pytest.mark.parametrize("stages", [2, 4])
def test_alternating_ticks_have_a_job_back_one_place_sooner_than_paired_ones(stages):
    """2S − 1 tasks of one job a step keep them full, whatever F and B are."""
    steps, tasks = 12, 2 * stages - 1
    jobs = round_robin_microbatches(tasks, steps)
    load = uniform_workload(jobs, [1.0] * stages, [1.3] * stages)
    expected = (stages - 1) / (len(jobs) + stages - 1)
    schedules = {rule: one_forward_one_backward(load, rule) for rule in ("alternating", "paired")}
    ratios = {rule: simulate_lockstep(s, load).bubble_ratio() for rule, s in schedules.items()}
    assert ratios["alternating"] == pytest.approx(expected)
    assert ratios["paired"] > expected + 0.5 / (2 * stages)
    for tick in range(schedules["alternating"].ticks):
        columns = (schedules["alternating"].forward_mb, schedules["alternating"].backward_mb)
        assert sum(bool((table[:, tick] >= 0).any()) for table in columns) == 1
