"""The simulator agrees with a brute-force event simulator, written here from the definitions."""

import numpy as np
import pytest

from jaxmux.planner.pipeline.schedules import (
    ScheduledMicrobatch,
    gpipe,
    interleaved,
    lorapp,
    one_forward_one_backward,
    simulate_asynchronous,
    simulate_lockstep,
    template,
    template_order,
    uniform_workload,
)

GENERATORS = [
    gpipe,
    one_forward_one_backward,
    lambda workload: one_forward_one_backward(workload, "paired"),
    lambda workload: interleaved(workload, 2),
    lorapp,
]


def ops_of(schedule, stage):
    """Ops of a stage in the order of its row: (tick, "B" or "F", virtual stage, microbatch)."""
    ops = []
    for tick in range(schedule.ticks):
        for direction, microbatch, virtual_stage in (
            ("B", schedule.backward_microbatch, schedule.backward_virtual_stage),
            ("F", schedule.forward_microbatch, schedule.forward_virtual_stage),
        ):
            if (m := int(microbatch[stage, tick])) >= 0:
                ops.append((tick, direction, int(virtual_stage[stage, tick]), m))
    return ops


def duration(workload, virtual_per_stage, op):
    _, direction, v, m = op
    times = workload.forward if direction == "F" else workload.backward
    return times[m, v % workload.stages] / virtual_per_stage


def brute_force_asynchronous(schedule, workload, hop):
    """Goes through the stages again and again until no op can start."""
    end, free = {}, [0.0] * schedule.stages
    last = schedule.virtual_stages - 1
    left = [ops_of(schedule, stage) for stage in range(schedule.stages)]
    while any(left):
        for stage, ops in enumerate(left):
            if not ops:
                continue
            _, direction, v, m = ops[0]
            if direction == "F":
                needs, wait = ("F", v - 1, m), hop
            elif v == last:
                needs, wait = ("F", v, m), 0.0
            else:
                needs, wait = ("B", v + 1, m), hop
            if needs[1] >= 0 and needs not in end:
                continue
            ready = end[needs] + wait if needs[1] >= 0 else 0.0
            spent = duration(workload, schedule.virtual_per_stage, ops[0])
            free[stage] = max(free[stage], ready) + spent
            end[direction, v, m] = free[stage]
            ops.pop(0)
    return end


def brute_force_lockstep(schedule, workload, permute):
    end, now = {}, 0.0
    for tick in range(schedule.ticks):
        longest = 0.0
        for stage in range(schedule.stages):
            spent = 0.0
            for op in ops_of(schedule, stage):
                if op[0] == tick:
                    spent += duration(workload, schedule.virtual_per_stage, op)
                    end[op[1:]] = now + spent
            longest = max(longest, spent)
        now += longest + permute
    return end, now


def assert_same_ends(simulation, end):
    for (direction, v, m), time in end.items():
        ends = simulation.forward_end if direction == "F" else simulation.backward_end
        assert ends[v, m] == pytest.approx(time)


@pytest.mark.parametrize("generate", GENERATORS)
@pytest.mark.parametrize("seed", range(6))
def test_agrees_with_brute_force(generate, seed, random_workload):
    workload = random_workload(seed)
    schedule = generate(workload)
    hop = 0.3 if workload.stages > 1 else 0.0
    asynchronous = simulate_asynchronous(schedule, workload, hop)
    end = brute_force_asynchronous(schedule, workload, hop)
    assert_same_ends(asynchronous, end)
    assert asynchronous.makespan == pytest.approx(max(end.values()))
    lockstep = simulate_lockstep(schedule, workload, permute_time=0.1)
    end, makespan = brute_force_lockstep(schedule, workload, 0.1)
    assert_same_ends(lockstep, end)
    assert lockstep.makespan == pytest.approx(makespan)


@pytest.mark.parametrize("seed", range(6))
def test_busy_time_is_the_work_and_splits_over_windows(seed, random_workload):
    workload = random_workload(seed)
    schedule = template(workload)
    workload = workload.reorder(template_order(workload))
    work = (workload.forward + workload.backward).sum(axis=0)
    for simulate in (simulate_lockstep, simulate_asynchronous):
        simulation = simulate(schedule, workload)
        np.testing.assert_allclose(simulation.busy(), work)
        middle = 0.4 * simulation.makespan
        parts = simulation.busy((0, middle)) + simulation.busy((middle, simulation.makespan))
        np.testing.assert_allclose(parts, work)
        ratio = 1 - work.sum() / (workload.stages * simulation.makespan)
        assert simulation.bubble_ratio() == pytest.approx(ratio)


def test_peak_buffers_are_those_of_a_replay(random_workload):
    for seed in range(10):
        schedule = lorapp(random_workload(seed))
        for stage in range(schedule.stages):
            held = peak = 0
            for _, direction, _, m in ops_of(schedule, stage):
                held += schedule.microbatches[m].buffers * (1 if direction == "F" else -1)
                peak = max(peak, held)
            assert schedule.peak_buffers()[stage] == peak


def test_lockstep_never_beats_free_running_stages(random_workload):
    for seed in range(20):
        workload = random_workload(seed)
        schedule = lorapp(workload)
        free = simulate_asynchronous(schedule, workload).makespan
        assert simulate_lockstep(schedule, workload).makespan >= free - 1e-9


def test_permutes_lengthen_every_tick():
    workload = uniform_workload([ScheduledMicrobatch((0,), (0,))] * 4, [1.0] * 3, [1.0] * 3)
    schedule = one_forward_one_backward(workload)
    without = simulate_lockstep(schedule, workload)
    with_permutes = simulate_lockstep(schedule, workload, permute_time=0.5)
    assert with_permutes.makespan == pytest.approx(without.makespan + 0.5 * schedule.ticks)
