"""Every generator makes legal schedules with the textbook's bubble ratios."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxmux.planner import PlanningError
from jaxmux.planner.pipeline.schedules import (
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
    uniform_workload,
    validate,
)

GENERATORS = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "1f1b paired": lambda workload: one_forward_one_backward(workload, "paired"),
    "1f1b alternating": lambda workload: one_forward_one_backward(workload, "alternating"),
    "interleaved 2": lambda workload: interleaved(workload, 2),
    "interleaved 3": lambda workload: interleaved(workload, 3),
    "lorapp": lorapp,
    "lorapp paired": lambda workload: lorapp(workload, "paired"),
    "template": template,
    "template asynchronous": lambda workload: template(workload, "asynchronous"),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_schedules_of_random_workloads_are_legal(name, random_workload):
    for seed in range(60):
        validate(GENERATORS[name](random_workload(seed)))


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_one_microbatch_runs_alone(name, stages):
    workload = uniform_workload([ScheduledMicrobatch((3,), (7,))], [1.0] * stages, [2.0] * stages)
    schedule = GENERATORS[name](workload)
    validate(schedule)
    assert simulate_lockstep(schedule, workload).makespan == pytest.approx(3.0 * stages)


@pytest.mark.parametrize(
    "name", ["1f1b", "1f1b paired", "1f1b alternating", "lorapp", "lorapp paired", "template"]
)
def test_schedules_keep_the_buffer_limit(name, random_workload):
    for seed in range(40):
        workload = random_workload(seed)
        limit = tuple(np.random.default_rng(seed).integers(2, 5, workload.stages).tolist())
        schedule = GENERATORS[name](dataclasses.replace(workload, buffer_limit=limit))
        validate(schedule, limit)


def test_gpipe_says_that_its_flush_does_not_fit(one_global_batch):
    workload = dataclasses.replace(one_global_batch(2, 5), buffer_limit=(4, 4))
    with pytest.raises(PlanningError, match="stage 0: no room for microbatch 4 within 4 buffers"):
        gpipe(workload)


def test_interleaved_says_that_its_virtual_stages_do_not_fit(one_global_batch):
    workload = dataclasses.replace(one_global_batch(4, 8), buffer_limit=(3,) * 4)
    with pytest.raises(PlanningError, match="too small for 2 virtual stages"):
        interleaved(workload, 2)


@pytest.mark.parametrize("name", GENERATORS)
def test_stages_that_run_their_rows_in_order_never_wait_in_a_cycle(name, random_workload):
    """An executor runs them so, and every input of an op must be there sooner or later."""
    for seed in range(12):
        schedule = GENERATORS[name](random_workload(seed))
        rows = [_ops_of(schedule, stage) for stage in range(schedule.stages)]
        last, done = schedule.virtual_stages - 1, set()
        while any(rows):
            before = len(done)
            for row in rows:
                while row and (_input_of(row[0], last) in done | {None}):
                    done.add(row.pop(0))
            assert len(done) > before
        assert len(done) == 2 * schedule.virtual_stages * len(schedule.microbatches)


def _ops_of(schedule, stage: int) -> list[tuple[str, int, int]]:
    """(direction, virtual stage, microbatch) of a stage's ops in the order of its row."""
    ops = []
    for tick in range(schedule.ticks):
        for direction, microbatch, virtual_stage in (
            ("B", schedule.backward_microbatch, schedule.backward_virtual_stage),
            ("F", schedule.forward_microbatch, schedule.forward_virtual_stage),
        ):
            if (m := int(microbatch[stage, tick])) != -1:
                ops.append((direction, int(virtual_stage[stage, tick]), m))
    return ops


def _input_of(op: tuple[str, int, int], last: int) -> tuple[str, int, int] | None:
    """The op whose output an op takes; None where a microbatch enters the pipeline."""
    direction, v, m = op
    if direction == "F":
        return ("F", v - 1, m) if v else None
    return ("F", v, m) if v == last else ("B", v + 1, m)


@pytest.mark.parametrize(
    "name,stages,microbatches",
    list(
        itertools.product(
            ["gpipe", "1f1b", "1f1b paired", "1f1b alternating"], [1, 2, 4, 8], [1, 3, 8, 32]
        )
    ),
)
def test_flush_bubble_ratio_is_s_minus_1_over_n_plus_s_minus_1(
    name, stages, microbatches, one_global_batch
):
    workload = one_global_batch(stages, microbatches)
    schedule = GENERATORS[name](workload)
    expected = (stages - 1) / (microbatches + stages - 1)
    assert simulate_lockstep(schedule, workload).bubble_ratio() == pytest.approx(expected)
    assert simulate_asynchronous(schedule, workload).bubble_ratio() == pytest.approx(expected)


@pytest.mark.parametrize(
    "stages,groups,virtual", list(itertools.product([1, 2, 4, 8], [1, 2, 5], [2, 3, 4]))
)
def test_interleaved_bubbles_are_shorter_by_the_number_of_virtual_stages(
    stages, groups, virtual, one_global_batch
):
    workload = one_global_batch(stages, stages * groups)
    schedule = interleaved(workload, virtual)
    expected = (stages - 1) / (virtual * stages * groups + stages - 1)
    assert simulate_lockstep(schedule, workload).bubble_ratio() == pytest.approx(expected)


def test_paired_ticks_keep_the_bubble_ratio_when_backward_is_longer():
    stages, count = 4, 20
    workload = uniform_workload(
        [ScheduledMicrobatch((0,), (0,))] * count, [1.0] * stages, [1.3] * stages
    )
    expected = (stages - 1) / (count + stages - 1)
    paired = one_forward_one_backward(workload, "paired")
    single = one_forward_one_backward(workload)
    assert simulate_lockstep(paired, workload).bubble_ratio() == pytest.approx(expected)
    assert simulate_lockstep(single, workload).bubble_ratio() > expected + 0.05


def test_1f1b_holds_s_minus_stage_microbatches(one_global_batch):
    workload = one_global_batch(5, 20)
    assert one_forward_one_backward(workload).peak_buffers().tolist() == [5, 4, 3, 2, 1]
    paired = one_forward_one_backward(workload, "paired")
    assert paired.peak_buffers().tolist() == [9, 7, 5, 3, 1]
    assert gpipe(workload).peak_buffers().tolist() == [20] * 5


@pytest.mark.parametrize("name", GENERATORS)
def test_a_stream_of_many_global_batches_obeys_the_update_rule(name):
    microbatches = round_robin_microbatches(3, 20, microbatches=2)
    workload = uniform_workload(microbatches, [1.0] * 4, [1.0] * 4)
    schedule = GENERATORS[name](workload)
    validate(schedule)
    assert len(schedule.updates) == 60


def test_schedule_prints_as_a_grid(one_global_batch):
    assert str(one_forward_one_backward(one_global_batch(2, 2), "paired")).splitlines() == [
        "stage 0 |  F0 |  F1 |     |  B0 |  B1 |",
        "stage 1 |     |  F0 |B0 F1|  B1 |     |",
    ]


def test_workload_errors_name_what_is_wrong():
    microbatches, times = (ScheduledMicrobatch((0,), (0,), buffers=3),), np.ones((1, 2))
    with pytest.raises(PlanningError, match="microbatch 0 takes 3 buffers, stage 1 has 2"):
        Workload(microbatches, times, times, buffer_limit=(4, 2))
    with pytest.raises(PlanningError, match=r"forward times \(1, 2\) and backward times \(2, 2\)"):
        Workload(microbatches, times, np.ones((2, 2)))
    with pytest.raises(PlanningError, match="must be positive"):
        Workload(microbatches, times * 0, times)


@pytest.mark.parametrize("stages", [2, 4])
def test_with_alternating_ticks_a_microbatch_is_back_one_place_sooner_than_with_paired_ones(stages):
    """2S - 1 tasks of one microbatch per step keep them full, whatever F and B are."""
    steps, tasks = 12, 2 * stages - 1
    microbatches = round_robin_microbatches(tasks, steps)
    workload = uniform_workload(microbatches, [1.0] * stages, [1.3] * stages)
    expected = (stages - 1) / (len(microbatches) + stages - 1)
    schedules = {
        rule: one_forward_one_backward(workload, rule) for rule in ("alternating", "paired")
    }
    ratios = {rule: simulate_lockstep(s, workload).bubble_ratio() for rule, s in schedules.items()}
    assert ratios["alternating"] == pytest.approx(expected)
    assert ratios["paired"] > expected + 0.5 / (2 * stages)
    alternating = schedules["alternating"]
    for tick in range(alternating.ticks):
        tables = (alternating.forward_microbatch, alternating.backward_microbatch)
        assert sum(bool((table[:, tick] >= 0).any()) for table in tables) == 1
