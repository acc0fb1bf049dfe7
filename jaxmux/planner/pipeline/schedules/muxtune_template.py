"""MuxTune's structured pipeline template (3.4.1, Appendix A)."""

from collections import defaultdict
from typing import Literal, get_args

import numpy as np

from .greedy_orders import LaunchRule, greedy_orders
from .schedule import PipelineSchedule, Workload, simulate_lockstep
from .tick_layout import TickRule, lay_out

Clock = Literal["lockstep", "asynchronous"]


def template(
    workload: Workload, clock: Clock = "lockstep", permute_time: float = 0.0
) -> PipelineSchedule:
    """Returns MuxTune's structured template: 1F1B over buckets, the slowest bucket first.

    A bucket is a group of tasks that are packed together. The rules are:

    1. Buckets descend by the mean time of their microbatches' forward pass on the first stage.
    2. The microbatches of a bucket are consecutive.
    3. A microbatch starts as soon as the buffers allow, and stages prefer backward passes.

    A step is one global batch of a task with the update after it. If tasks have several steps, the
    rules hold within each round: round n holds step n of every task. The rounds follow each other
    without draining the pipeline, and a microbatch that waits for a task's update is passed over.
    Unlike in `one_forward_one_backward`, only `workload.buffer_limit` bounds the number of
    microbatches in flight (between forward and backward pass).

    Theorem 2 of MuxTune's Appendix A says that the last stage is busy from its first forward to its
    last backward pass. It holds here for one round without a buffer limit, if a microbatch of
    bucket p takes the same time t_p forward and backward on every stage and messages take no time.
    Bucket 1 has the longest microbatches, bucket P the shortest. A tick is a column of the
    schedule. For the two values of `clock` the theorem means:

    - "lockstep": the last stage has a pass in every tick. But where two buckets meet, a tick may
      take longer than this pass, because an earlier stage runs a backward pass of the longer
      bucket. With S stages and C microbatches per bucket, the makespan is at most 2(S-1)·t_1 plus
      the work of the last stage, 2C·Σ_p t_p. This bound exceeds the makespan of asynchronous stages
      (Lemmas 1 and 2) by (S-1)(t_1-t_P), which is 0 if all buckets take the same time, as Eq. 9
      assumes.
    - "asynchronous": the last stage is never idle, as in the paper.

    Args:
      workload: the microbatches with their times. `ScheduledMicrobatch.bucket` gives the bucket of
        each microbatch.
      clock: how the stages will run. With "lockstep" they start every tick together, and the result
        is the fastest of three schedules, in which different passes may share a tick (the values of
        `rule` in `one_forward_one_backward`). With "asynchronous" each stage runs at its own pace,
        and the workload's times determine the order of its passes.
      permute_time: time of the messages between stages after each tick, in the workload's unit;
        used only to find the fastest of the three schedules.

    Returns:
      The schedule. Its microbatches are in the order of `template_order`, so simulate it with
      `workload.reorder(template_order(workload))`.

    Raises:
      PlanningError: the buffers do not suffice for any order.
    """
    workload = workload.reorder(template_order(workload))
    lockstep = clock == "lockstep"
    orders = greedy_orders(workload, LaunchRule(unit_times=lockstep, skip_blocked=True))
    rules = get_args(TickRule) if lockstep else ["single"]
    schedules = [lay_out(workload, orders, rule) for rule in rules]
    return min(schedules, key=lambda s: simulate_lockstep(s, workload, permute_time).makespan)


def template_order(workload: Workload) -> list[int]:
    """Returns the order in which `template`, MuxTune's pipeline schedule, starts microbatches.

    `template` reorders a workload by itself. The result, as indices for `Workload.reorder`, lets
    other schedules run the same order, and relates entries of the schedule to the workload.

    Microbatches are ordered by round, then by bucket (group of tasks that are packed together), the
    slowest bucket first, then by their place in the workload. Round n holds the n-th step (global
    batch) of every task in the workload, from 0. Buckets are compared by the mean forward time of
    their microbatches on the first stage.

    Args:
      workload: the microbatches with their times.

    Returns:
      A list of all microbatch indices. Entry i is the microbatch that comes at place i.
    """
    rounds = _rounds(workload)
    members = defaultdict(list)
    for index, microbatch in enumerate(workload.microbatches):
        members[microbatch.bucket].append(workload.forward[index, 0])
    latency = {bucket: float(np.mean(times)) for bucket, times in members.items()}

    def key(index: int) -> tuple[int, float, int, int]:
        bucket = workload.microbatches[index].bucket
        return rounds[index], -latency[bucket], bucket, index

    return sorted(range(len(workload.microbatches)), key=key)


def _rounds(workload: Workload) -> list[int]:
    """The round of each microbatch: the most global batches that any of its tasks had before."""
    steps = defaultdict(set)
    for microbatch in workload.microbatches:
        for task, step in microbatch.global_batches:
            steps[task].add(step)
    number = {
        (task, step): i for task, numbers in steps.items() for i, step in enumerate(sorted(numbers))
    }
    return [
        max((number[batch] for batch in microbatch.global_batches), default=0)
        for microbatch in workload.microbatches
    ]
