"""The schedules GPipe, 1F1B, interleaved 1F1B, mLoRA's LoRAPP and MuxTune's structured template."""

from collections import defaultdict
from typing import Literal, get_args

import numpy as np

from .greedy_orders import LaunchRule, Op, greedy_orders
from .schedule import PipelineSchedule, Workload, independent_series, simulate_lockstep
from .tick_layout import TickRule, lay_out


def gpipe(workload: Workload) -> PipelineSchedule:
    """Returns the GPipe schedule: all forward passes of a flush, then all its backward passes.

    A *flush* is a series of consecutive microbatches that run with unchanged adapter parameters. A
    new flush begins at a microbatch that must wait for the optimizer update of a task in the
    current flush. GPipe needs activation memory for every microbatch of a flush;
    `one_forward_one_backward` needs less.

    With S stages, equal stage times and forward passes as long as backward passes, the bubble ratio
    (idle fraction of the stages' time) of a flush of N microbatches is (S-1) / (N+S-1) (Huang et
    al. 2019).

    Args:
      workload: the microbatches in order with their times, with one virtual stage per stage (no
        interleaving).

    Returns:
      The schedule. In each tick (column of the schedule) a stage runs at most one pass.

    Raises:
      PlanningError: a flush does not fit into `workload.buffer_limit`.
    """
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
    """Returns the 1F1B schedule: each stage prefers backward passes and so needs little memory.

    The source is PipeDream-flush (Narayanan et al. 2021, 2.2). A microbatch is in flight on a stage
    from its forward to its backward pass there. Stage s has at most `one_f_one_b_depth(S, rule)[s]`
    microbatches in flight, and fewer where `workload.buffer_limit` requires it.

    The microbatches start in the order of the workload. A microbatch that waits for a task's
    optimizer update holds back all microbatches after it; `lorapp` passes over such a microbatch
    instead. The pipeline is not drained between global batches of different tasks. For microbatches
    that wait for no update, the bubble ratio (idle fraction of the stages' time) is the same as for
    `gpipe`.

    Args:
      workload: the microbatches in order with their times, with one virtual stage per stage (no
        interleaving).
      rule: the passes that may share a tick (column of the schedule). "single": every stage runs at
        most one pass, forward or backward. "paired": every stage runs a forward pass, a backward
        pass or both. "alternating": all stages run forward passes in one tick and backward passes
        in the next. If stages start ticks together and a backward pass takes longer than a forward
        pass, the last two take less time but more memory than "single".

    Raises:
      PlanningError: a microbatch can never start, for example because there are too few buffers.
    """
    launch = LaunchRule(in_flight=one_f_one_b_depth(workload.stages, rule))
    return lay_out(workload, greedy_orders(workload, launch), rule)


def one_f_one_b_depth(stages: int, rule: TickRule) -> list[int]:
    """Returns the number of microbatches in flight on each stage that keeps a 1F1B pipeline full.

    A microbatch is in flight on a stage from its forward to its backward pass there, and its
    activations take memory for that time. Stage s of S stages needs S - s microbatches in flight if
    a stage runs one pass in each tick (rule "single"). With the rules "paired" and "alternating" it
    needs 2(S - s) - 1, because about twice as many other microbatches start while one is in flight.

    Args:
      stages: S, the number of pipeline stages.
      rule: the passes that may share a tick (column of the schedule): "single", "paired" or
        "alternating", as for `one_forward_one_backward`.

    Returns:
      S numbers, the largest for the first stage.
    """
    return [stages - s if rule == "single" else 2 * (stages - s) - 1 for s in range(stages)]


def interleaved(workload: Workload, virtual_per_stage: int) -> PipelineSchedule:
    """Returns the interleaved 1F1B schedule, which has shorter bubbles than 1F1B.

    Each stage holds several parts of the model, its virtual stages, so a microbatch passes every
    stage several times and the pipeline fills sooner (Narayanan et al. 2021, 2.2). In exchange the
    stages send more messages. Take N microbatches that wait for no update, with N a multiple of the
    number S of stages, equal stage times and forward passes as long as backward passes. The bubble
    ratio (idle fraction of the stages' time) is then (S-1) / (virtual_per_stage · N + S-1).

    Args:
      workload: the microbatches in order with their times per stage. The virtual stages of a stage
        share its times equally.
      virtual_per_stage: number of virtual stages of every stage.

    Returns:
      The schedule. In each tick (column of the schedule) a stage runs at most one pass.

    Raises:
      PlanningError: `workload` is interleaved already, or `workload.buffer_limit` is too small: the
        microbatches on one virtual stage hold the buffers that they need on the next one.
    """
    workload = workload.with_virtual_stages(virtual_per_stage)
    stages = workload.stages
    depth = [2 * (stages - 1 - s) + (virtual_per_stage - 1) * stages + 1 for s in range(stages)]
    launch = LaunchRule(in_flight=depth, forward_first=stages)
    return lay_out(workload, greedy_orders(workload, launch))


def lorapp(workload: Workload, rule: TickRule = "single") -> PipelineSchedule:
    """Returns the LoRAPP schedule in its 1F1B mode (mLoRA 3.2.1), for microbatches of several
    tasks.

    While the microbatches of one task wait for its optimizer update, those of other tasks fill the
    pipeline. The first stage prefers forward passes: it starts the first microbatch that waits for
    no update, and passes over those that wait. (`one_forward_one_backward` passes over none.) All
    other stages prefer backward passes, which free memory. At most `one_f_one_b_depth(S, rule)`
    microbatches are in flight (between forward and backward pass) on the stages.

    The bubble ratio is the idle fraction of the stages' time. With S equal stages, T tasks and one
    microbatch per global batch, it is max{(S-T)/S, 0} without warm-up and drain. With n
    microbatches per global batch it is max{(S-1+n-T·n) / (S+n-1), 0} (mLoRA 3.2.2, which writes D
    for S, L for T and N for n). If stages start ticks together and the rule is "single", this holds
    only if forward passes take as long as backward passes. With "paired" ticks about twice as many
    microbatches are in flight, so S stages need 2S tasks to be full.

    Args:
      workload: the microbatches with their times, in an order in which the tasks take turns, for
        example from `round_robin_microbatches`.
      rule: the passes that may share a tick (column of the schedule): "single", "paired" or
        "alternating", as for `one_forward_one_backward`.

    Raises:
      PlanningError: the buffers do not suffice for any microbatch to continue.
    """
    launch = LaunchRule(
        in_flight=one_f_one_b_depth(workload.stages, rule), skip_blocked=True, forward_first=1
    )
    return lay_out(workload, greedy_orders(workload, launch), rule)


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
