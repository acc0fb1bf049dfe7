"""The ways in which mLoRA changes a workload before it is pipelined with LoRAPP (3.2.2 and 3.3)."""

import dataclasses
from collections import defaultdict

import numpy as np

from jaxmux.planner.pipeline.schedules import ScheduledMicrobatch, Workload


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
