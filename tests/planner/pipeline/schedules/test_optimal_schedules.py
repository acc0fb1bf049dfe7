"""The template and the bounds are compared with exact optima of small pipelines."""

import heapq
import itertools

import numpy as np
import pulp
import pytest
from research.lower_bounds import least_makespan, least_paired_ticks

from jaxmux.planner.pipeline.schedules import (
    ScheduledMicrobatch,
    one_forward_one_backward,
    simulate_asynchronous,
    simulate_lockstep,
    template,
    template_order,
    uniform_workload,
)


def least_lockstep_makespan(forward: np.ndarray, backward: np.ndarray) -> float:
    """Returns the least total time of any lockstep schedule, by Dijkstra's algorithm.

    A state is how many of its 2S ops each microbatch has done. A tick advances any set of
    microbatches of which no two use the same stage in the same direction, and lasts as long as its
    slowest stage. Microbatches of equal times are interchangeable. Without a buffer limit it never
    hurts to advance more microbatches in a tick of the same length, so only sets to which no
    further op could be added are tried.

    Args:
      forward: [microbatches, stages].
      backward: [microbatches, stages].
    """
    count, stages = forward.shape
    times = np.concatenate([forward, backward[:, ::-1]], axis=1)
    kinds = [min(j for j in range(count) if (times[j] == times[i]).all()) for i in range(count)]

    def canonical(done):
        ordered = sorted(zip(kinds, (-d for d in done), strict=True))
        return tuple(-d for _, d in ordered)

    times = times[sorted(range(count), key=lambda j: kinds[j])]
    kinds.sort()
    start, goal = (0,) * count, (2 * stages,) * count
    least, queue = {start: 0.0}, [(0.0, start)]
    while queue:
        time, done = heapq.heappop(queue)
        if done == goal:
            return time
        if time > least[done]:
            continue
        choices = [_stage_choices(done, kinds, times, s, stages) for s in range(stages)]
        for length in {length for stage in choices for _, length in stage} - {0.0}:
            fitting = [_maximal([c for c in stage if c[1] <= length]) for stage in choices]
            for chosen in itertools.product(*fitting):
                if max(c[1] for c in chosen) < length:
                    continue
                advanced = {j for moved, _ in chosen for j in moved}
                after = canonical([d + (j in advanced) for j, d in enumerate(done)])
                if time + length < least.get(after, np.inf):
                    least[after] = time + length
                    heapq.heappush(queue, (time + length, after))
    raise AssertionError("unreachable")


def _stage_choices(done, kinds, times, stage, stages):
    """(microbatches, time) of every choice of at most one forward and one backward op."""
    waiting = [{}, {}]
    for j, d in enumerate(done):
        if d in (stage, 2 * stages - 1 - stage):
            waiting[d != stage].setdefault(kinds[j], (j, times[j, d]))
    options = [[None, *kind.values()] for kind in waiting]
    return [
        (tuple(j for j, _ in filter(None, pair)), sum(t for _, t in filter(None, pair)))
        for pair in itertools.product(*options)
    ]


def _maximal(choices):
    return [c for c in choices if not any(set(c[0]) < set(other[0]) for other in choices)]


def least_free_running_makespan(forward: np.ndarray, backward: np.ndarray) -> float:
    """Returns the least makespan of stages that run at their own pace, by a mixed-integer program.

    Each pair of ops of different microbatches on a stage has a binary variable that tells which
    comes first. Microbatches of equal times, which must be adjacent, go through every op in the
    order of their index, because exchanging them in a schedule changes nothing else.
    """
    count, stages = forward.shape
    times = np.concatenate([forward, backward[:, ::-1]], axis=1)
    horizon = float(times.sum())
    model = pulp.LpProblem("pipeline", pulp.LpMinimize)
    start = [
        [model.add_variable(f"start_{j}_{k}", 0, horizon) for k in range(2 * stages)]
        for j in range(count)
    ]
    makespan = model.add_variable("makespan", 0, horizon)
    model += makespan
    for j in range(count):
        for k in range(1, 2 * stages):
            model += start[j][k] >= start[j][k - 1] + times[j, k - 1]
        model += makespan >= start[j][-1] + times[j, -1]
    for stage in range(stages):
        model += makespan >= times[:, [stage, 2 * stages - 1 - stage]].sum() + min(
            times[:, :stage].sum(axis=1) + times[:, 2 * stages - stage :].sum(axis=1)
        )
    for (a, b), k, m in itertools.product(
        itertools.combinations(range(count), 2), range(2 * stages), range(2 * stages)
    ):
        if m not in (k, 2 * stages - 1 - k):
            continue
        if m == k and (times[a] == times[b]).all():
            model += start[b][k] >= start[a][k] + times[a, k]
            continue
        first = model.add_variable(f"first_{a}_{k}_{b}_{m}", cat="Binary")
        model += start[b][m] >= start[a][k] + times[a, k] - horizon * (1 - first)
        model += start[a][k] >= start[b][m] + times[b, m] - horizon * first
    result = model.solve(pulp.HiGHS(msg=False, gapRel=1e-4, threads=1))
    assert result.status == pulp.LpSolveStatus.Optimal, result
    return float(makespan.varValue)


@pytest.mark.long
def test_template_is_within_3_percent_of_the_lockstep_optimum(bucket_workload):
    """The latencies of the buckets are at most 20% apart, as Eq. 7 makes them."""
    rng = np.random.default_rng(2)
    gaps = []
    for i in range(42):
        stages = int(rng.integers(2, 5))
        most = {2: 6, 3: 5, 4: 4}[stages]
        buckets = int(rng.integers(1, 5))
        counts = int(rng.integers(1, most // buckets + 1))
        latencies = 1 + 0.2 * rng.random(buckets)
        backward, last_stage = [(1.0, 1.0), (1.3, 1.0), (1.0, 1.2)][i % 3]
        workload = bucket_workload(latencies, [counts] * buckets, stages, backward, last_stage)
        workload = workload.reorder(template_order(workload))
        least = least_lockstep_makespan(workload.forward, workload.backward)
        gaps.append(simulate_lockstep(template(workload), workload).makespan / least - 1)
        assert least_makespan(workload) <= least * (1 + 1e-9)
    print(f"gap to the lockstep optimum: mean {np.mean(gaps):.2%}, most {max(gaps):.2%}")
    assert min(gaps) > -1e-9
    assert max(gaps) <= 0.03


@pytest.mark.long
def test_template_is_within_3_percent_of_the_free_running_optimum(bucket_workload):
    rng = np.random.default_rng(3)
    gaps = []
    for _ in range(12):
        stages, buckets = int(rng.integers(2, 4)), int(rng.integers(2, 4))
        counts = int(rng.integers(1, (5 if stages == 2 else 4) // buckets + 1))
        workload = bucket_workload(1 + 0.2 * rng.random(buckets), [counts] * buckets, stages)
        workload = workload.reorder(template_order(workload))
        least = least_free_running_makespan(workload.forward, workload.backward)
        schedule = template(workload, "asynchronous")
        gaps.append(simulate_asynchronous(schedule, workload).makespan / least - 1)
        assert least_makespan(workload) <= least * (1 + 1e-3)
    print(f"gap to the free-running optimum: mean {np.mean(gaps):.2%}, most {max(gaps):.2%}")
    assert min(gaps) > -1e-3
    assert max(gaps) <= 0.03


def test_no_schedule_is_shorter_than_the_bounds(random_workload):
    for seed in range(60):
        workload = random_workload(seed)
        bound, ticks = least_makespan(workload), least_paired_ticks(workload)
        for rule in ("single", "alternating", "paired"):
            schedule = one_forward_one_backward(workload, rule)
            assert bound <= simulate_asynchronous(schedule, workload).makespan * (1 + 1e-9)
            assert bound <= simulate_lockstep(schedule, workload).makespan * (1 + 1e-9)
        assert ticks <= schedule.ticks


def test_a_task_alone_reaches_the_bounds_of_its_updates(stages=4, steps=5, microbatches=6):
    """The bounds are reached where every global batch is a flush."""
    stream = [
        ScheduledMicrobatch((0,), (step,)) for step in range(steps) for _ in range(microbatches)
    ]
    workload = uniform_workload(stream, [1.0] * stages, [1.0] * stages)
    schedule = one_forward_one_backward(workload)
    expected = steps * 2 * (microbatches + stages - 1)
    assert simulate_asynchronous(schedule, workload).makespan == expected
    assert least_makespan(workload) == expected
    paired = one_forward_one_backward(workload, "paired")
    assert paired.ticks == least_paired_ticks(workload) == steps * (microbatches + 2 * stages - 1)
