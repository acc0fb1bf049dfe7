"""The validator rejects every mutation that would make a legal schedule illegal, and says where."""

import dataclasses

import numpy as np
import pytest

from jaxmux.planner.pipeline.schedules import (
    IllegalSchedule,
    PipelineSchedule,
    Update,
    interleaved,
    lorapp,
    one_forward_one_backward,
    round_robin_microbatches,
    template,
    uniform_workload,
    validate,
)

TABLES = ("forward_microbatch", "backward_microbatch")


@pytest.fixture
def schedule() -> PipelineSchedule:
    microbatches = round_robin_microbatches(3, 3, microbatches=2)
    return template(uniform_workload(microbatches, [1.0] * 3, [1.0] * 3))


def changed(schedule: PipelineSchedule, name: str, *changes) -> PipelineSchedule:
    """A copy with entries of a table of microbatches changed.

    Args:
      name: name of the table.
      changes: (stage, tick, microbatch), with -1 for none. The table of virtual stages changes with
        it.
    """
    virtual_name = name.replace("microbatch", "virtual_stage")
    microbatch = getattr(schedule, name).copy()
    virtual_stage = getattr(schedule, virtual_name).copy()
    for stage, tick, value in changes:
        microbatch[stage, tick] = value
        virtual_stage[stage, tick] = -1 if value == -1 else stage
    return dataclasses.replace(schedule, **{name: microbatch, virtual_name: virtual_stage})


def test_accepts_a_legal_schedule(schedule):
    validate(schedule)


@pytest.mark.parametrize("name", TABLES)
def test_rejects_a_dropped_op(schedule, name):
    for stage, tick in np.argwhere(getattr(schedule, name) >= 0):
        m = getattr(schedule, name)[stage, tick]
        with pytest.raises(IllegalSchedule, match=rf"stage {stage}.* of microbatch {m} is in no"):
            validate(changed(schedule, name, (stage, tick, -1)))


@pytest.mark.parametrize("name", TABLES)
def test_rejects_a_duplicated_op(schedule, name):
    table = getattr(schedule, name)
    for stage, tick in np.argwhere(table < 0):
        m = table[stage].max()
        with pytest.raises(IllegalSchedule, match=rf"stage {stage}, tick .* {m} ran before"):
            validate(changed(schedule, name, (stage, tick, m)))


@pytest.mark.parametrize("name", TABLES)
def test_rejects_swapped_ops(name):
    """In a 1F1B schedule with paired ticks no message waits, so no two microbatches can swap."""
    microbatches = round_robin_microbatches(1, 1, microbatches=6)
    workload = uniform_workload(microbatches, [1.0] * 3, [1.0] * 3)
    schedule = one_forward_one_backward(workload, "paired")
    table = getattr(schedule, name)
    for stage in range(3):
        ticks = np.flatnonzero(table[stage] >= 0)
        for first, second in zip(ticks, ticks[1:], strict=False):
            swap = (stage, first, table[stage, second]), (stage, second, table[stage, first])
            with pytest.raises(IllegalSchedule, match="needs its"):
                validate(changed(schedule, name, *swap))


@pytest.mark.parametrize("name", TABLES)
def test_rejects_an_op_in_the_tick_of_its_input(schedule, name):
    """The output of an op can be used one tick later at the earliest."""
    table, neighbour = getattr(schedule, name), 1 if name == "forward_microbatch" else -1
    stage = 1
    for tick in np.flatnonzero(table[stage] >= 0):
        m = table[stage, tick]
        arrival = int(np.flatnonzero(table[stage - neighbour] == m)[0])
        if table[stage, arrival] == -1:
            moved = changed(schedule, name, (stage, tick, -1), (stage, arrival, m))
            expected = rf"stage 1, tick {arrival}: [FB] of microbatch {m} needs its"
            with pytest.raises(IllegalSchedule, match=expected):
                validate(moved)


def test_rejects_backward_in_the_tick_of_the_last_forward(schedule):
    tick = int(np.flatnonzero(schedule.forward_microbatch[-1] == 0)[0])
    at = int(np.flatnonzero(schedule.backward_microbatch[-1] == 0)[0])
    early = changed(schedule, "backward_microbatch", (2, at, -1), (2, tick, 0))
    with pytest.raises(IllegalSchedule, match=f"stage 2, tick {tick}: B of microbatch 0 needs"):
        validate(early)


def with_update(schedule: PipelineSchedule, i: int, shift: int, stage: int) -> PipelineSchedule:
    """A copy whose update i is `shift` ticks later on one stage."""
    updates = list(schedule.updates)
    ticks = list(updates[i].ticks)
    ticks[stage] += shift
    updates[i] = updates[i]._replace(ticks=tuple(ticks))
    return dataclasses.replace(schedule, updates=tuple(updates))


def test_rejects_an_update_before_the_last_backward(schedule):
    for i, update in enumerate(schedule.updates):
        for stage in range(3):
            name = f"stage {stage}, tick {update.ticks[stage] - 1}: update of task {update.task}"
            with pytest.raises(IllegalSchedule, match=name):
                validate(with_update(schedule, i, -1, stage))


def test_rejects_an_update_after_the_next_forward(schedule):
    for i, update in enumerate(schedule.updates):
        following = [
            index
            for index, microbatch in enumerate(schedule.microbatches)
            if (update.task, update.step + 1) in microbatch.global_batches
        ]
        if following:
            first = int(schedule.forward_ticks()[0, following].min())
            with pytest.raises(IllegalSchedule, match="too late for F of microbatch"):
                validate(with_update(schedule, i, first - update.ticks[0], stage=0))


def test_rejects_a_missing_a_doubled_and_an_unknown_update(schedule):
    first, *rest = schedule.updates
    for updates, message in (
        (rest, f"task {first.task}, step {first.step} .* 0 updates"),
        ([first, first, *rest], "2 updates"),
        ([*schedule.updates, Update(9, 0, first.ticks)], "task 9"),
    ):
        with pytest.raises(IllegalSchedule, match=message):
            validate(dataclasses.replace(schedule, updates=tuple(updates)))


def test_rejects_a_launch_before_the_task_was_updated():
    """A legal schedule of independent microbatches is illegal once they are steps of one task."""
    workload = uniform_workload(round_robin_microbatches(4, 1), [1.0] * 3, [1.0] * 3)
    schedule = lorapp(workload)
    validate(schedule)
    microbatches = tuple(
        microbatch._replace(tasks=(0,), steps=(i,))
        for i, microbatch in enumerate(schedule.microbatches)
    )
    updates = tuple(u._replace(task=0, step=u.task) for u in schedule.updates)
    with pytest.raises(IllegalSchedule, match="stage 0, tick .* too late for F of microbatch 1"):
        validate(dataclasses.replace(schedule, microbatches=microbatches, updates=updates))


def test_rejects_more_buffers_than_there_are(schedule):
    peak = int(schedule.peak_buffers().max())
    validate(schedule, (peak,) * 3)
    message = f"stage 0, tick .* residuals take {peak} of {peak - 1} buffers"
    with pytest.raises(IllegalSchedule, match=message):
        validate(schedule, (peak - 1,) * 3)


def test_names_every_microbatch_for_which_there_is_no_buffer():
    """They are counted here from the ticks, one microbatch after another."""
    workload = uniform_workload(round_robin_microbatches(2, 2, 2), [1.0] * 3, [1.0] * 3)
    schedule = template(workload)
    forward, backward = schedule.forward_ticks(), schedule.backward_ticks()
    limit, expected = (schedule.peak_buffers() - 1).tolist(), []
    for stage in range(3):
        for m in range(len(schedule.microbatches)):
            tick = forward[stage, m]
            held = (forward[stage] <= tick) & (backward[stage] > tick)
            if held.sum() > limit[stage]:
                expected.append(f"stage {stage}, tick {tick}: with microbatch {m}, residuals")
    assert 10 < len(expected) <= 20
    with pytest.raises(IllegalSchedule) as e:
        validate(schedule, limit)
    found = str(e.value).splitlines()
    assert len(found) == len(expected)
    assert all(any(line.startswith(start) for line in found) for start in expected)


@pytest.mark.parametrize("name", ["forward_virtual_stage", "backward_virtual_stage"])
def test_rejects_a_virtual_stage_of_another_stage(name):
    workload = uniform_workload(round_robin_microbatches(1, 1, 8), [1.0] * 2, [1.0] * 2)
    schedule = interleaved(workload, 2)
    validate(schedule)
    table = getattr(schedule, name)
    for stage, tick in np.argwhere(table >= 0):
        moved = table.copy()
        moved[stage, tick] += 1
        message = rf"stage {stage}, tick {tick}: .* no virtual stage {moved[stage, tick]}"
        with pytest.raises(IllegalSchedule, match=message):
            validate(dataclasses.replace(schedule, **{name: moved}))


@pytest.mark.parametrize("value", [18, -2])
def test_rejects_an_unknown_microbatch(schedule, value):
    with pytest.raises(IllegalSchedule, match=f"stage 0, tick 0: F of microbatch {value}"):
        validate(changed(schedule, "forward_microbatch", (0, 0, value)))


def test_rejects_tables_of_unequal_length(schedule):
    longer = np.pad(schedule.backward_microbatch, ((0, 0), (0, 1)), constant_values=-1)
    with pytest.raises(IllegalSchedule, match="backward_microbatch has shape"):
        validate(dataclasses.replace(schedule, backward_microbatch=longer))


def test_random_single_changes_of_the_tables_are_rejected(schedule):
    rng = np.random.default_rng(0)
    for _ in range(300):
        name = TABLES[rng.integers(2)]
        table = getattr(schedule, name)
        stage, tick = rng.integers(3), rng.integers(schedule.ticks)
        value = rng.integers(-1, len(schedule.microbatches))
        if value != table[stage, tick]:
            with pytest.raises(IllegalSchedule):
                validate(changed(schedule, name, (stage, tick, value)))
