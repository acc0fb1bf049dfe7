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

TABLES = ("forward_mb", "backward_mb")


@pytest.fixture
def schedule() -> PipelineSchedule:
    load = uniform_workload(round_robin_microbatches(3, 3, microbatches=2), [1.0] * 3, [1.0] * 3)
    return template(load)


def changed(schedule: PipelineSchedule, name: str, *changes) -> PipelineSchedule:
    """A copy with table `name` set at (row, column) to value, for each (row, column, value)."""
    table = getattr(schedule, name).copy()
    for row, column, value in changes:
        table[row, column] = value
    return dataclasses.replace(schedule, **{name: table})


def test_accepts_what_it_should(schedule):
    validate(schedule)


@pytest.mark.parametrize("name", TABLES)
def test_rejects_a_dropped_op(schedule, name):
    for stage, tick in np.argwhere(getattr(schedule, name) >= 0):
        mb = getattr(schedule, name)[stage, tick]
        with pytest.raises(IllegalSchedule, match=rf"stage {stage}.* of microbatch {mb} is in no"):
            validate(changed(schedule, name, (stage, tick, -1)))


@pytest.mark.parametrize("name", TABLES)
def test_rejects_a_duplicated_op(schedule, name):
    table = getattr(schedule, name)
    for stage, tick in np.argwhere(table < 0):
        mb = table[stage].max()
        with pytest.raises(IllegalSchedule, match=rf"stage {stage}, tick .* {mb} ran before"):
            validate(changed(schedule, name, (stage, tick, mb)))


@pytest.mark.parametrize("name", TABLES)
def test_rejects_swapped_ops(name):
    """In a 1F1B of paired ticks no message waits, so that no two jobs can change places."""
    load = uniform_workload(round_robin_microbatches(1, 1, microbatches=6), [1.0] * 3, [1.0] * 3)
    schedule = one_forward_one_backward(load, "paired")
    table = getattr(schedule, name)
    for stage in range(3):
        ticks = np.flatnonzero(table[stage] >= 0)
        for first, second in zip(ticks, ticks[1:], strict=False):
            swap = (stage, first, table[stage, second]), (stage, second, table[stage, first])
            with pytest.raises(IllegalSchedule, match="needs its"):
                validate(changed(schedule, name, *swap))


@pytest.mark.parametrize("name", TABLES)
def test_rejects_an_op_in_the_tick_of_its_input(schedule, name):
    """The message takes until the next tick."""
    table, step = getattr(schedule, name), 1 if name == "forward_mb" else -1
    stage = 1
    for tick in np.flatnonzero(table[stage] >= 0):
        mb = table[stage, tick]
        arrival = int(np.flatnonzero(table[stage - step] == mb)[0])
        if table[stage, arrival] == -1:
            moved = changed(schedule, name, (stage, tick, -1), (stage, arrival, mb))
            expected = rf"stage 1, tick {arrival}: [FB] of microbatch {mb} needs its"
            with pytest.raises(IllegalSchedule, match=expected):
                validate(moved)


def test_rejects_backward_in_the_tick_of_the_last_forward(schedule):
    tick = int(np.flatnonzero(schedule.forward_mb[-1] == 0)[0])
    at = int(np.flatnonzero(schedule.backward_mb[-1] == 0)[0])
    early = changed(schedule, "backward_mb", (2, at, -1), (2, tick, 0))
    with pytest.raises(IllegalSchedule, match=f"stage 2, tick {tick}: B of microbatch 0 needs"):
        validate(early)


def with_update(schedule: PipelineSchedule, i: int, shift: int, stage: int) -> PipelineSchedule:
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
            j
            for j, job in enumerate(schedule.jobs)
            if (update.task, update.step + 1) in job.batches
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
    """A legal schedule of independent jobs is illegal once they are steps of one task."""
    load = uniform_workload(round_robin_microbatches(4, 1), [1.0] * 3, [1.0] * 3)
    schedule = lorapp(load)
    validate(schedule)
    jobs = tuple(job._replace(tasks=(0,), steps=(i,)) for i, job in enumerate(schedule.jobs))
    updates = tuple(u._replace(task=0, step=u.task) for u in schedule.updates)
    with pytest.raises(IllegalSchedule, match="stage 0, tick .* too late for F of microbatch 1"):
        validate(dataclasses.replace(schedule, jobs=jobs, updates=updates))


def test_rejects_clashing_buffers(schedule):
    forward, backward = schedule.forward_ticks(), schedule.backward_ticks()
    clashes = 0
    for stage in range(3):
        for a in range(len(schedule.jobs)):
            for b in range(len(schedule.jobs)):
                if forward[stage, a] < forward[stage, b] < backward[stage, a]:
                    clashes += 1
                    slot = schedule.residual_slot[stage, a]
                    expected = (
                        f"stage {stage}, tick {forward[stage, b]}: residual slot {slot} of "
                        f"microbatch {b} is held by microbatch {a}"
                    )
                    with pytest.raises(IllegalSchedule, match=expected):
                        validate(changed(schedule, "residual_slot", (stage, b, slot)))
    assert clashes > 10


@pytest.mark.parametrize("name", ["activation_slot", "gradient_slot"])
def test_rejects_a_clash_in_an_inbox(name):
    """In an interleaved pipeline messages wait: two of them in one slot are found."""
    load = uniform_workload(round_robin_microbatches(1, 1, microbatches=8), [1.0] * 2, [1.0] * 2)
    schedule = interleaved(load, 2)
    validate(schedule)
    slots = getattr(schedule, name)
    rows, columns = np.nonzero(slots > 0)
    assert len(rows)
    moved = changed(schedule, name, *((r, c, 0) for r, c in zip(rows, columns, strict=True)))
    with pytest.raises(IllegalSchedule, match=rf"{name.split('_')[0]} slot 0 of microbatch"):
        validate(moved)


def test_rejects_more_buffers_than_there_are(schedule):
    peak = int(schedule.peak_buffers().max())
    validate(schedule, (peak,) * 3)
    with pytest.raises(IllegalSchedule, match=f"stage 0, tick .* residual slots up to {peak - 1}"):
        validate(schedule, (peak - 1,) * 3)


def test_rejects_a_missing_slot(schedule):
    with pytest.raises(IllegalSchedule, match="microbatch 4 has no residual slot"):
        validate(changed(schedule, "residual_slot", (1, 4, -1)))


@pytest.mark.parametrize("value", [18, -2])
def test_rejects_an_unknown_microbatch(schedule, value):
    with pytest.raises(IllegalSchedule, match=f"stage 0, tick 0: F of microbatch {value}"):
        validate(changed(schedule, "forward_mb", (0, 0, value)))


def test_rejects_tables_of_unequal_length(schedule):
    longer = np.pad(schedule.backward_mb, ((0, 0), (0, 1)), constant_values=-1)
    with pytest.raises(IllegalSchedule, match="backward_mb has shape"):
        validate(dataclasses.replace(schedule, backward_mb=longer))


def test_random_single_changes_of_the_tables_are_rejected(schedule):
    rng = np.random.default_rng(0)
    for _ in range(300):
        name = TABLES[rng.integers(2)]
        table = getattr(schedule, name)
        stage, tick = rng.integers(3), rng.integers(schedule.ticks)
        value = rng.integers(-1, len(schedule.jobs))
        if value != table[stage, tick]:
            with pytest.raises(IllegalSchedule):
                validate(changed(schedule, name, (stage, tick, value)))
