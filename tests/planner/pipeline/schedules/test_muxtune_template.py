"""MuxTune's structured template keeps its rules and Appendix A's theorem, also in long streams."""

import dataclasses

import numpy as np
import pytest

from jaxmux.planner.pipeline.schedules import (
    Workload,
    one_forward_one_backward,
    round_robin_microbatches,
    simulate_asynchronous,
    simulate_lockstep,
    template,
    template_order,
    uniform_workload,
    validate,
)


def random_buckets(rng: np.random.Generator):
    """Latencies up to 50 times apart, often equal, and equal or different numbers of microbatches.

    Returns:
      For each bucket its latency and its number of microbatches; and the number of stages.
    """
    buckets = int(rng.integers(1, 6))
    latencies = 1 + rng.random(buckets) * rng.choice([0.2, 1, 5, 50])
    if rng.random() < 0.3:
        latencies = np.rint(latencies)
    same = rng.random() < 0.5
    counts = np.full(buckets, rng.integers(1, 7)) if same else rng.integers(1, 7, buckets)
    return latencies, counts, int(rng.integers(1, 7))


@pytest.mark.long
def test_theorem_2_last_stage_keeps_busy_in_lockstep(bucket_workload):
    rng = np.random.default_rng(0)
    for _ in range(400):
        latencies, counts, stages = random_buckets(rng)
        workload = bucket_workload(latencies, counts, stages)
        schedule = template(workload)
        tables = schedule.forward_microbatch[-1], schedule.backward_microbatch[-1]
        busy = np.flatnonzero((tables[0] >= 0) | (tables[1] >= 0))
        assert len(busy) == busy[-1] - busy[0] + 1
        work = float(2 * (latencies * counts).sum())
        makespan = simulate_lockstep(schedule, workload.reorder(template_order(workload))).makespan
        assert makespan <= (2 * (stages - 1) * latencies.max() + work) * (1 + 1e-9)
        if len(set(latencies)) == 1:
            assert makespan == pytest.approx(2 * (stages - 1) * latencies[0] + work)


@pytest.mark.long
def test_theorem_2_last_stage_keeps_busy_when_stages_run_free(bucket_workload):
    rng = np.random.default_rng(1)
    for _ in range(400):
        latencies, counts, stages = random_buckets(rng)
        workload = bucket_workload(latencies, counts, stages)
        schedule = template(workload, "asynchronous")
        simulation = simulate_asynchronous(schedule, workload.reorder(template_order(workload)))
        span = simulation.backward_end[-1].max() - simulation.forward_start[-1].min()
        assert span == pytest.approx(2 * (latencies * counts).sum())


def test_theorem_2_fails_without_descending_order(bucket_workload):
    """With the longest microbatches in the middle, the last stage waits (Figure 22 (e))."""
    workload = bucket_workload([1.0, 4.0, 1.0], [2, 2, 2], stages=3)
    simulation = simulate_asynchronous(one_forward_one_backward(workload), workload)
    span = simulation.backward_end[-1].max() - simulation.forward_start[-1].min()
    assert span > 2 * 12 + 0.5


def test_buckets_descend_and_stay_together_in_every_round():
    microbatches = round_robin_microbatches(3, 2, microbatches=2)
    seconds = np.array([1.0, 3.0, 2.0])[[microbatch.bucket for microbatch in microbatches]]
    times = np.repeat(seconds[:, None], 2, axis=1)
    workload = Workload(microbatches, times, times)
    ordered = template(workload).microbatches
    assert [(microbatch.steps[0], microbatch.bucket) for microbatch in ordered] == [
        (step, bucket) for step in (0, 1) for bucket in (1, 2, 0) for _ in range(2)
    ]


@pytest.mark.parametrize("limit", [1, 2, 4, 7])
def test_launches_as_eagerly_as_memory_allows(limit, bucket_workload):
    workload = bucket_workload([1.0], [20], stages=4)
    schedule = template(dataclasses.replace(workload, buffer_limit=(limit,) * 4))
    validate(schedule, (limit,) * 4)
    assert schedule.peak_buffers()[0] == limit


TASKS, STEPS, MICROBATCHES, STAGES = 4, 8, 5, 4


def stream_ratio(stage_times, generate) -> float:
    """The bubble ratio of a stream of 160 microbatches, including warm-up and drain."""
    microbatches = round_robin_microbatches(TASKS, STEPS, MICROBATCHES)
    workload = uniform_workload(microbatches, stage_times, np.asarray(stage_times) * 1.15)
    schedule = generate(workload)
    validate(schedule)
    return simulate_lockstep(schedule, workload).bubble_ratio()


def test_a_stream_without_flush_stays_under_5_percent_bubbles():
    assert stream_ratio([1.0] * STAGES, template) <= 0.05


def test_head_on_the_last_stage_costs_its_imbalance_and_split_over_stages_nothing():
    on_last = [1.0, 1.0, 1.0, 1.2]
    floor = 1 - sum(on_last) / (STAGES * max(on_last))
    assert floor == pytest.approx(0.125)
    assert floor <= stream_ratio(on_last, template) <= 0.15
    assert stream_ratio([sum(on_last) / STAGES] * STAGES, template) <= 0.05


def test_a_single_task_must_flush_between_its_global_batches():
    microbatches = round_robin_microbatches(1, 10, microbatches=4)
    workload = uniform_workload(microbatches, [1.0] * STAGES, [1.0] * STAGES)
    ratio = simulate_lockstep(one_forward_one_backward(workload), workload).bubble_ratio()
    assert ratio == pytest.approx((STAGES - 1) / (4 + STAGES - 1))
