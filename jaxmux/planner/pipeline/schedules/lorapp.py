"""mLoRA's LoRAPP: a pipeline that stays full because each task waits for its own updates only."""

import dataclasses
from collections import defaultdict

import numpy as np

from .gpipe_1f1b import one_f_one_b_depth
from .greedy_orders import LaunchRule, greedy_orders
from .schedule import PipelineSchedule
from .tick_layout import TickRule, lay_out
from .workload import ScheduledMicrobatch, Workload


def lorapp(workload: Workload, rule: TickRule = "single") -> PipelineSchedule:
    """Returns the LoRAPP schedule in its 1F1B mode (mLoRA 3.2.1), for a stream of several tasks.

    The first stage prefers forward passes: it starts the first microbatch of the stream that waits
    for no update, and passes over those that wait. (`one_forward_one_backward` passes over none.)
    All other stages prefer backward passes, which free memory. The number of microbatches in flight
    is bounded by `one_f_one_b_depth`.

    With S equal stages, T tasks and one microbatch per global batch, the bubble ratio without
    warm-up and drain is max{(S-T)/S, 0}. With n microbatches per global batch (see
    `split_minibatches`) it is max{(S-1+n-T·n) / (S+n-1), 0} (mLoRA 3.2.2, which writes D for S, L
    for T and N for n). In lockstep with "single" ticks this holds only if forward passes take as
    long as backward passes. With "paired" ticks about twice as many microbatches are in flight, so
    S stages need 2S tasks to be full.

    Args:
      workload: the stream, in which the tasks take turns, for example from
        `round_robin_microbatches`.
      rule: the passes that may share a tick: "single", "paired" or "alternating" (see `TickRule`).

    Raises:
      PlanningError: the buffers do not suffice for any microbatch to continue.
    """
    launch = LaunchRule(
        in_flight=one_f_one_b_depth(workload.stages, rule), skip_blocked=True, forward_first=1
    )
    return lay_out(workload, greedy_orders(workload, launch), rule)


def split_minibatches(workload: Workload, parts: int) -> Workload:
    """Returns a new workload with each microbatch cut into equal parts (mLoRA Fig. 4 (e)).

    The parts of a microbatch are consecutive and belong to the same global batches. Each part takes
    1 / parts of the microbatch's times, and 1 / parts of its buffers, rounded up.

    Args:
      workload: the stream.
      parts: number of microbatches to make of each microbatch.
    """
    microbatches = tuple(
        microbatch._replace(buffers=-(-microbatch.buffers // parts))
        for microbatch in workload.microbatches
        for _ in range(parts)
    )
    return dataclasses.replace(
        workload,
        microbatches=microbatches,
        forward=np.repeat(workload.forward / parts, parts, axis=0),
        backward=np.repeat(workload.backward / parts, parts, axis=0),
    )


def batch_lora(workload: Workload, groups: int | None = None) -> Workload:
    """Returns a new workload in which groups of tasks share microbatches (BatchLoRA, mLoRA 3.3).

    Tasks are dealt to groups in descending order of their time; each goes to the group with the
    least time so far. The k-th microbatches of the n-th global batches of a group's tasks become
    one microbatch. Its times and buffers are the sums over its parts: one microbatch alone
    saturates a GPU, so batching saves no time. Use it before `lorapp` if there are more tasks than
    a pipeline needs.

    Args:
      workload: a stream of microbatches with exactly one task each.
      groups: number of groups; None for one per stage.

    Returns:
      The batched stream, ordered by global batch and then by group. `bucket` of each microbatch is
      its group. If there are no more tasks than groups, the result is `workload` itself.

    Raises:
      ValueError: a microbatch has samples of several tasks or of none.
    """
    groups = groups or workload.stages
    seconds = defaultdict(float)
    for index, microbatch in enumerate(workload.microbatches):
        if len(microbatch.tasks) != 1:
            raise ValueError(
                f"microbatch {index} has the tasks {microbatch.tasks}, expected exactly one"
            )
        time = workload.forward[index].sum() + workload.backward[index].sum()
        seconds[microbatch.tasks[0]] += time
    if len(seconds) <= groups:
        return workload
    group_of = _balance(seconds, groups)
    members: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for task, number, indices in _global_batches(workload):
        for k, index in enumerate(indices):
            members[number, group_of[task], k].append(index)
    keys = sorted(members)
    return dataclasses.replace(
        workload,
        microbatches=tuple(
            _merge([workload.microbatches[index] for index in members[key]], bucket=key[1])
            for key in keys
        ),
        forward=np.array([workload.forward[members[key]].sum(axis=0) for key in keys]),
        backward=np.array([workload.backward[members[key]].sum(axis=0) for key in keys]),
    )


def _balance(seconds: dict[int, float], groups: int) -> dict[int, int]:
    """By task, its group."""
    totals = [0.0] * groups
    group_of = {}
    for task in sorted(seconds, key=lambda task: (-seconds[task], task)):
        group_of[task] = totals.index(min(totals))
        totals[group_of[task]] += seconds[task]
    return group_of


def _global_batches(workload: Workload) -> list[tuple[int, int, list[int]]]:
    """Of each global batch: the task, how many the task has before it, its microbatches."""
    members = defaultdict(list)
    for index, microbatch in enumerate(workload.microbatches):
        members[microbatch.global_batches[0]].append(index)
    before = defaultdict(int)
    batches = []
    for task, step in sorted(members):
        batches.append((task, before[task], members[task, step]))
        before[task] += 1
    return batches


def _merge(microbatches: list[ScheduledMicrobatch], bucket: int) -> ScheduledMicrobatch:
    return ScheduledMicrobatch(
        tasks=tuple(microbatch.tasks[0] for microbatch in microbatches),
        steps=tuple(microbatch.steps[0] for microbatch in microbatches),
        bucket=bucket,
        buffers=sum(microbatch.buffers for microbatch in microbatches),
    )
