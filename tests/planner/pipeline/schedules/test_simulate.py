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
    lambda load: one_forward_one_backward(load, "paired"),
    lambda load: interleaved(load, 2),
    lorapp,
]


def ops_of(schedule, stage):
    """Ops of a stage in the order of the table: (tick, "B" or "F", virtual stage, job)."""
    ops = []
    for tick in range(schedule.ticks):
        for kind, table, chunk in (
            ("B", schedule.backward_mb, schedule.backward_chunk),
            ("F", schedule.forward_mb, schedule.forward_chunk),
        ):
            if table[stage, tick] >= 0:
                virtual = chunk[stage, tick] * schedule.stages + stage
                ops.append((tick, kind, int(virtual), int(table[stage, tick])))
    return ops


def duration(load, chunks, op):
    _, kind, virtual, job = op
    times = load.forward if kind == "F" else load.backward
    return times[job, virtual % load.stages] / chunks


def brute_force_asynchronous(schedule, load, hop):
    """Runs over the stages again and again until no op can start."""
    end, free, left = {}, [0.0] * schedule.stages, []
    last = schedule.virtual_stages - 1
    left = [ops_of(schedule, stage) for stage in range(schedule.stages)]
    while any(left):
        for stage, ops in enumerate(left):
            if not ops:
                continue
            _, kind, v, j = ops[0]
            if kind == "F":
                needs, wait = ("F", v - 1, j), hop
            elif v == last:
                needs, wait = ("F", v, j), 0.0
            else:
                needs, wait = ("B", v + 1, j), hop
            if needs[1] >= 0 and needs not in end:
                continue
            ready = end[needs] + wait if needs[1] >= 0 else 0.0
            free[stage] = max(free[stage], ready) + duration(load, schedule.chunks, ops[0])
            end[kind, v, j] = free[stage]
            ops.pop(0)
    return end


def brute_force_lockstep(schedule, load, permute):
    end, now = {}, 0.0
    for tick in range(schedule.ticks):
        longest = 0.0
        for stage in range(schedule.stages):
            spent = 0.0
            for op in ops_of(schedule, stage):
                if op[0] == tick:
                    spent += duration(load, schedule.chunks, op)
                    end[op[1:]] = now + spent
            longest = max(longest, spent)
        now += longest + permute
    return end, now


def assert_same_ends(simulation, end):
    for (kind, v, j), time in end.items():
        ends = simulation.forward_end if kind == "F" else simulation.backward_end
        assert ends[v, j] == pytest.approx(time)


@pytest.mark.parametrize("generate", GENERATORS)
@pytest.mark.parametrize("seed", range(6))
def test_agrees_with_brute_force(generate, seed, random_load):
    load = random_load(seed)
    schedule = generate(load)
    hop = 0.3 if load.stages > 1 else 0.0
    asynchronous = simulate_asynchronous(schedule, load, hop)
    end = brute_force_asynchronous(schedule, load, hop)
    assert_same_ends(asynchronous, end)
    assert asynchronous.makespan == pytest.approx(max(end.values()))
    lockstep = simulate_lockstep(schedule, load, permute_time=0.1)
    end, makespan = brute_force_lockstep(schedule, load, 0.1)
    assert_same_ends(lockstep, end)
    assert lockstep.makespan == pytest.approx(makespan)


@pytest.mark.parametrize("seed", range(6))
def test_busy_time_is_the_work_and_splits_over_windows(seed, random_load):
    load = random_load(seed)
    schedule = template(load)
    load = load.reorder(template_order(load))
    work = (load.forward + load.backward).sum(axis=0)
    for simulation in (simulate_lockstep(schedule, load), simulate_asynchronous(schedule, load)):
        np.testing.assert_allclose(simulation.busy(), work)
        middle = 0.4 * simulation.makespan
        parts = simulation.busy((0, middle)) + simulation.busy((middle, simulation.makespan))
        np.testing.assert_allclose(parts, work)
        ratio = 1 - work.sum() / (load.stages * simulation.makespan)
        assert simulation.bubble_ratio() == pytest.approx(ratio)


def test_peak_buffers_are_those_of_a_replay(random_load):
    for seed in range(10):
        schedule = lorapp(random_load(seed))
        for stage in range(schedule.stages):
            held = peak = 0
            for _, kind, _, j in ops_of(schedule, stage):
                held += schedule.jobs[j].buffers * (1 if kind == "F" else -1)
                peak = max(peak, held)
            assert schedule.peak_buffers()[stage] == peak


def test_lockstep_never_beats_free_running_stages(random_load):
    for seed in range(20):
        load = random_load(seed)
        schedule = lorapp(load)
        free = simulate_asynchronous(schedule, load).makespan
        assert simulate_lockstep(schedule, load).makespan >= free - 1e-9


def test_permutes_lengthen_every_tick():
    load = uniform_workload([ScheduledMicrobatch((0,), (0,))] * 4, [1.0] * 3, [1.0] * 3)
    schedule = one_forward_one_backward(load)
    without = simulate_lockstep(schedule, load)
    with_permutes = simulate_lockstep(schedule, load, permute_time=0.5)
    assert with_permutes.makespan == pytest.approx(without.makespan + 0.5 * schedule.ticks)
