"""MuxTune's structured pipeline template (3.4.1, Appendix A)."""

from collections import defaultdict
from typing import Literal, get_args

import numpy as np

from .greedy_orders import LaunchRule, greedy_orders
from .schedule import PipelineSchedule
from .simulate import simulate_lockstep
from .tick_layout import TickRule, lay_out
from .workload import Workload

Clock = Literal["lockstep", "asynchronous"]


def template(
    workload: Workload, clock: Clock = "lockstep", permute_time: float = 0.0
) -> PipelineSchedule:
    """The structured template: an eager 1F1B over buckets in descending order of latency.

    Its rules are: (1) buckets descend by their mean forward time on the first stage; (2) the
    microbatches of a bucket are consecutive; (3) microbatches are launched as early as memory
    allows, and backward passes come first. Over several rounds the rules hold in each round. The
    rounds follow each other without a flush, and a microbatch that waits for an update is passed
    over.

    Theorem 2 of Appendix A says that the last stage is busy from its first forward to its last
    backward pass. It holds here for one round without a buffer limit, if a microbatch of bucket p
    takes the same time t_p forward and backward on every stage and messages take no time. Bucket 1
    is the longest, bucket P the shortest. For the two clocks the theorem means:

    - "lockstep": the last stage has no empty tick. A tick may still take longer than the op of the
      last stage where buckets meet, because an earlier stage runs a backward pass of the longer
      bucket. The makespan is at most 2(S-1)·t_1 plus the work of the last stage, 2C·Σ_p t_p with C
      microbatches per bucket. That is (S-1)(t_1-t_P) more than Lemmas 1 and 2 give for
      asynchronous stages, and equal to it if all buckets take the same time (as Eq. 9 assumes).
    - "asynchronous": the last stage is never idle, as in the paper.

    Args:
      workload: the stream; `ScheduledMicrobatch.bucket` tells the bucket of a microbatch.
      clock: how the stages run. For "lockstep" the result is the schedule with the fastest tick
        rule; for "asynchronous" each stage's order is the one that greedy stages choose with the
        workload's times.
      permute_time: time of the messages after each lockstep tick, in the workload's unit.

    Returns:
      The schedule, whose microbatches are in the order of `template_order`.
    """
    workload = workload.reorder(template_order(workload))
    lockstep = clock == "lockstep"
    orders = greedy_orders(workload, LaunchRule(unit_times=lockstep, skip_blocked=True))
    rules = get_args(TickRule) if lockstep else ["single"]
    schedules = [lay_out(workload, orders, rule) for rule in rules]
    return min(schedules, key=lambda s: simulate_lockstep(s, workload, permute_time).makespan)


def template_order(workload: Workload) -> list[int]:
    """Returns the microbatches by round, then by bucket in descending order of latency."""
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
    number = {(task, step): i for task, own in steps.items() for i, step in enumerate(sorted(own))}
    return [
        max((number[batch] for batch in microbatch.global_batches), default=0)
        for microbatch in workload.microbatches
    ]
