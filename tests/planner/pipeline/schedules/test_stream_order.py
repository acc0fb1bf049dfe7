"""The order of an endless 1F1B pipeline, against the rules of a legal schedule and the planner's
1F1B."""

import itertools
import random

import pytest

from jaxmux.planner.pipeline.schedules import (
    Ended,
    Pass,
    ScheduledMicrobatch,
    StreamOrder,
    one_forward_one_backward,
    round_robin_microbatches,
    simulate_asynchronous,
    streaming,
    uniform_workload,
    validate,
    walk,
)


def drained(order, allowed):
    """The passes that are left."""
    return [p for p in iter(lambda: order.next(allowed), None) if isinstance(p, Pass)]


def rows(passes, stages):
    """By stage, its passes in order."""
    return [
        [(p.forward, p.microbatch) for p in passes if p.virtual_stage == s] for s in range(stages)
    ]


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("microbatches", [1, 4, 11])
def test_each_stage_follows_the_planners_1f1b(stages, microbatches):
    workload = uniform_workload(
        [ScheduledMicrobatch((0,), (0,))] * microbatches, [1] * stages, [2] * stages
    )
    expected = rows(list(walk(one_forward_one_backward(workload))), stages)
    assert rows(drained(StreamOrder(stages), microbatches), stages) == expected


@pytest.mark.parametrize("seed", range(20))
def test_every_order_is_legal_however_microbatches_become_known(seed):
    rng = random.Random(seed)
    stages, total, allowed = rng.randint(1, 5), 30, 0
    order, passes = StreamOrder(stages), []
    while order.ended < total:
        if rng.random() < 0.3 or not (found := order.next(allowed)):
            allowed = min(total, allowed + rng.randint(0, 3))
            continue
        if isinstance(found, Pass):
            passes.append(found)
    place = {p: i for i, p in enumerate(passes)}
    assert len(place) == len(passes) == 2 * stages * total
    for p in passes:
        before = []
        if p.forward and p.virtual_stage > 0:
            before.append(p._replace(virtual_stage=p.virtual_stage - 1))
        if not p.forward:
            before.append(p._replace(forward=True))
            if p.virtual_stage + 1 < stages:
                before.append(p._replace(virtual_stage=p.virtual_stage + 1))
        assert all(place[b] < place[p] for b in before)
    for s, row in enumerate(rows(passes, stages)):
        in_flight = list(itertools.accumulate(1 if forward else -1 for forward, _ in row))
        assert max(in_flight) <= stages - s


def test_a_stream_never_empties_while_microbatches_may_begin():
    """Two rounds of eight microbatches, the second known when the first has begun: each stage runs
    the same passes as for one round of sixteen."""
    whole = rows(drained(StreamOrder(4), 16), 4)
    order, steps = StreamOrder(4), []
    while order.begun < 8:
        steps.append(order.next(8))
    passes = [step for step in steps if isinstance(step, Pass)]
    assert rows(passes + drained(order, 16), 4) == whole


def test_no_microbatch_begins_that_may_no_longer_begin():
    order = StreamOrder(3)
    for _ in range(4):
        order.next(9)
    begun = order.begun
    assert all(p.virtual_stage > 0 or not p.forward for p in drained(order, 0))
    assert order.begun == order.ended == begun


@pytest.mark.parametrize("tasks", [1, 2, 3, 5])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("stages", [2, 4])
def test_a_stream_that_waits_for_updates_is_as_fast_as_greedy_stages(stages, tasks, microbatches):
    rounds = round_robin_microbatches(tasks, 5, microbatches)
    workload = uniform_workload(rounds, [1] * stages, [2] * stages)
    schedule = streaming(workload)
    validate(schedule)
    greedy = simulate_asynchronous(one_forward_one_backward(workload), workload).makespan
    assert simulate_asynchronous(schedule, workload).makespan <= greedy


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_microbatch_ends_behind_the_passes_that_run_during_its_last_one(stages):
    """An update waits for the last backward pass on the first stage; meanwhile others run on."""
    order, steps = StreamOrder(stages), []
    while order.ended < 6:
        steps.append(order.next(12))
    ends = [i for i, step in enumerate(steps) if isinstance(step, Ended)]
    assert [steps[i].microbatch for i in ends] == list(range(6))
    for number, end in enumerate(ends):
        last = steps.index(Pass(False, 0, number))
        meanwhile = {p.virtual_stage for p in steps[last + 1 : end] if isinstance(p, Pass)}
        assert meanwhile >= set(range(1, stages))
