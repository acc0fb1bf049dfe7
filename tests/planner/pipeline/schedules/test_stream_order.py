"""The order of an endless 1F1B pipeline, against the rules of a legal schedule and the planner's
1F1B."""

import itertools
import random

import pytest

from jaxmux.planner.pipeline.schedules import (
    Ended,
    Pass,
    ScheduledMicrobatch,
    Sent,
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
    """The steps that are left."""
    return list(iter(lambda: order.next(allowed), None))


def passes_of(steps):
    return [step for step in steps if isinstance(step, Pass)]


def rows(steps, stages):
    """By stage, its passes in order."""
    passes = passes_of(steps)
    return [
        [(p.forward, p.microbatch) for p in passes if p.virtual_stage == s] for s in range(stages)
    ]


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("microbatches", [1, 4, 11])
def test_each_stage_follows_the_planners_1f1b(stages, microbatches):
    workload = uniform_workload(
        [ScheduledMicrobatch((0,), (0,))] * microbatches, [1] * stages, [2] * stages
    )
    expected = rows(walk(one_forward_one_backward(workload)), stages)
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
    assert rows(steps + drained(order, 16), 4) == whole


def test_no_microbatch_begins_that_may_no_longer_begin():
    order = StreamOrder(3)
    for _ in range(4):
        order.next(9)
    begun = order.begun
    assert all(p.virtual_stage > 0 or not p.forward for p in passes_of(drained(order, 0)))
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
        meanwhile = {p.virtual_stage for p in passes_of(steps[last + 1 : end])}
        assert meanwhile >= set(range(1, stages))


def ran(steps, stages, forward, backward):
    """The time at which the last stage is done, if a stage that sends waits until the receiver
    takes it, and the time if no stage waits for a receiver."""
    waiting, free, arrived = [0.0] * stages, [0.0] * stages, {}
    for step in steps:
        if isinstance(step, Sent):
            source = step.result_of.virtual_stage
            pair = source, source + (1 if step.result_of.forward else -1)
            waiting[pair[0]] = waiting[pair[1]] = max(waiting[s] for s in pair)
        elif isinstance(step, Pass):
            s, seconds = step.virtual_stage, forward if step.forward else backward
            waiting[s] += seconds
            before = step._replace(virtual_stage=s + (-1 if step.forward else 1))
            free[s] = max(free[s], arrived.get(before, 0.0)) + seconds
            arrived[step] = free[s]
    return max(waiting), max(free)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("backward", [1.0, 1.8, 2.0, 2.2])
def test_stages_that_wait_for_each_others_transfers_lose_no_time(stages, backward):
    waiting, free = ran(drained(StreamOrder(stages), 40), stages, 1.0, backward)
    assert waiting == pytest.approx(free)


@pytest.mark.parametrize("stages", [1, 3])
def test_every_result_that_another_stage_uses_is_sent_once(stages):
    microbatches, used = [ScheduledMicrobatch((0,), (0,))] * 5, set()
    for m, s in itertools.product(range(5), range(1, stages)):
        used |= {Pass(True, s - 1, m), Pass(False, s, m)}
    table = one_forward_one_backward(uniform_workload(microbatches, [1] * stages, [2] * stages))
    for steps in (drained(StreamOrder(stages), 5), list(walk(table))):
        sent = [step.result_of for step in steps if isinstance(step, Sent)]
        assert len(sent) == len(used) and set(sent) == used
        for p in sent:
            following = p._replace(virtual_stage=p.virtual_stage + (1 if p.forward else -1))
            assert steps.index(p) < steps.index(Sent(p)) < steps.index(following)
