"""The schedules GPipe, 1F1B, interleaved 1F1B, mLoRA's LoRAPP and MuxTune's structured template."""

from collections import defaultdict
from typing import Literal, get_args

import numpy as np

from .greedy_orders import LaunchRule, Op, greedy_orders
from .schedule import PipelineSchedule, Workload, independent_series, simulate_lockstep
from .tick_layout import TickRule, lay_out


def gpipe(workload: Workload) -> PipelineSchedule:
    """Returns the GPipe schedule: all forward passes of a flush, then all its backward passes. A
    flush ends before a microbatch that must wait for an update. With S equal stages and forward
    passes as long as backward passes, the bubble ratio for N microbatches is (S-1) / (N+S-1) (Huang
    et al. 2019)."""
    flushes = independent_series(workload)
    orders = [
        [
            Op(backward, stage, microbatch)
            for flush in flushes
            for backward in (False, True)
            for microbatch in flush
        ]
        for stage in range(workload.stages)
    ]
    return lay_out(workload, orders)


def one_forward_one_backward(workload: Workload, rule: TickRule = "single") -> PipelineSchedule:
    """Returns the 1F1B schedule (PipeDream-flush, Narayanan et al. 2021, 2.2). At most
    `one_f_one_b_depth(S, rule)[s]` microbatches are in flight on stage s. A microbatch that waits
    for a task's update holds back all microbatches after it. If none waits, the bubble ratio is
    that of `gpipe`."""
    launch = LaunchRule(in_flight=one_f_one_b_depth(workload.stages, rule))
    return lay_out(workload, greedy_orders(workload, launch), rule)


def one_f_one_b_depth(stages: int, rule: TickRule) -> list[int]:
    """Returns, for each stage, the number of microbatches in flight that keeps a 1F1B pipeline
    full. Stage s of S needs S - s microbatches if a stage runs one pass in each tick (rule
    "single"). With the rules "paired" and "alternating" it needs 2(S - s) - 1, because about twice
    as many other microbatches start while one microbatch is in flight."""
    return [stages - s if rule == "single" else 2 * (stages - s) - 1 for s in range(stages)]


def interleaved(workload: Workload, virtual_per_stage: int) -> PipelineSchedule:
    """Returns the interleaved 1F1B schedule (Narayanan et al. 2021, 2.2). A microbatch passes every
    stage several times, so the pipeline fills sooner. Under the assumptions of `gpipe`, and if N is
    a multiple of S, the bubble ratio is (S-1) / (virtual_per_stage · N + S-1)."""
    workload = workload.with_virtual_stages(virtual_per_stage)
    stages = workload.stages
    depth = [2 * (stages - 1 - s) + (virtual_per_stage - 1) * stages + 1 for s in range(stages)]
    launch = LaunchRule(in_flight=depth, forward_first=stages)
    return lay_out(workload, greedy_orders(workload, launch))


def lorapp(workload: Workload, rule: TickRule = "single") -> PipelineSchedule:
    """Returns the LoRAPP schedule in its 1F1B mode (mLoRA 3.2.1): while the microbatches of one
    task wait for its update, microbatches of other tasks fill the pipeline.

    With S equal stages, T tasks and n microbatches per global batch, the bubble ratio is
    max{(S-1+n-T·n) / (S+n-1), 0} without warm-up and drain (mLoRA 3.2.2, which writes D for S, L
    for T and N for n). If stages start ticks together and the rule is "single", this holds only if
    forward passes take as long as backward passes. With "paired" ticks, S stages need 2S tasks to
    be always busy.
    """
    launch = LaunchRule(
        in_flight=one_f_one_b_depth(workload.stages, rule), skip_blocked=True, forward_first=1
    )
    return lay_out(workload, greedy_orders(workload, launch), rule)


Clock = Literal["lockstep", "asynchronous"]


def template(
    workload: Workload, clock: Clock = "lockstep", permute_time: float = 0.0
) -> PipelineSchedule:
    """Returns MuxTune's structured template: 1F1B over buckets, beginning with the slowest bucket.

    Within each round, the microbatches of a bucket are consecutive. A microbatch starts as soon as
    the buffers allow, and stages prefer backward passes. Round n holds step n of every task. Rounds
    follow each other without draining the pipeline; later microbatches pass a microbatch that waits
    for a task's update. The schedule's microbatches are in the order of `template_order`. With the
    clock "lockstep", the result is the fastest of three schedules, one for each `TickRule`.
    """
    workload = workload.reorder(template_order(workload))
    # By Theorem 2 of MuxTune's Appendix A, the last stage is busy from its first forward pass to
    # its last backward pass. Here this holds for one round without a buffer limit, if a microbatch
    # of bucket p takes the same time t_p forward and backward on every stage and messages take no
    # time. With the clock "asynchronous", stages run at their own pace and the last stage is never
    # idle, as in the paper.
    #
    # With "lockstep", the last stage has a pass in every tick. But where two buckets meet, a tick
    # may take longer than this pass, because an earlier stage runs a backward pass of the longer
    # bucket. With S stages and C microbatches per bucket, the makespan is at most 2(S-1)·t_1 plus
    # the work of the last stage, 2C·Σ_p t_p. This exceeds the makespan of asynchronous stages
    # (Lemmas 1 and 2) by (S-1)(t_1-t_P).
    lockstep = clock == "lockstep"
    orders = greedy_orders(workload, LaunchRule(unit_times=lockstep, skip_blocked=True))
    rules = get_args(TickRule) if lockstep else ["single"]
    schedules = [lay_out(workload, orders, rule) for rule in rules]
    return min(schedules, key=lambda s: simulate_lockstep(s, workload, permute_time).makespan)


def template_order(workload: Workload) -> list[int]:
    """Returns the order in which `template` starts microbatches, as indices for `Workload.reorder`.
    Microbatches are ordered by round, then by bucket, then by their position in the workload.
    Buckets descend by the mean forward time of their microbatches on the first stage."""
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
    """The round of each microbatch: the largest number of earlier global batches of any of its
    tasks."""
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
