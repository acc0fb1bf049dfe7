"""mLoRA's LoRAPP: a pipeline that stays full because its tasks wait only for their own updates."""

import dataclasses
from collections import defaultdict

import numpy as np

from .classic import one_f_one_b_depth
from .layout import TickRule, lay_out
from .orders import LaunchRule, greedy_orders
from .schedule import PipelineSchedule
from .workload import ScheduledMicrobatch, Workload


def lorapp(load: Workload, rule: TickRule = "single") -> PipelineSchedule:
    """LoRAPP in its 1F1B mode (mLoRA 3.2.1) over a stream of tasks and steps.

    Stage 0 prefers to launch a job of a task that is not in the pipeline over a backward; the other
    stages prefer backwards, which free memory. A task that waits for its update is passed over.

    With equal stages, D stages and L tasks of one job a step, the steady bubble ratio is
    max{(D−L)/D, 0}; with N jobs a step (see `split_minibatches`) it is
    max{(D−1+N−L·N) / (D+N−1), 0} (3.2.2). In lockstep, with one op a tick, this needs F = B; with
    `paired` ticks a job is in flight twice as long, and D stages need 2D tasks to be full.
    """
    policy = LaunchRule(
        in_flight=one_f_one_b_depth(load.stages, rule), skip_blocked=True, forward_first=1
    )
    return lay_out(load, greedy_orders(load, policy), rule)


def split_minibatches(load: Workload, parts: int) -> Workload:
    """Every job cut into `parts` jobs of the same global batch (mLoRA Fig. 4 (e)), each with an
    equal share of the time and as many buffers, rounded up."""
    jobs = tuple(
        job._replace(buffers=-(-job.buffers // parts)) for job in load.jobs for _ in range(parts)
    )
    return dataclasses.replace(
        load,
        jobs=jobs,
        forward=np.repeat(load.forward / parts, parts, axis=0),
        backward=np.repeat(load.backward / parts, parts, axis=0),
    )


def batch_lora(load: Workload, groups: int | None = None) -> Workload:
    """BatchLoRA (mLoRA 3.3): with more tasks than stages, whole tasks are batched into `groups`
    that go through the pipeline as one task each.

    Tasks are dealt to groups longest first, each to the group with the least time so far. The k-th
    jobs of the k-th steps of a group become one job, whose times and buffers are the sums: at the
    microbatch sizes that a pipeline runs with, a GPU is saturated, and batching saves none.

    Args:
      load: jobs of one task each.
      groups: how many tasks the pipeline sees; None for one a stage.

    Returns:
      The batched stream, steps in order and groups in turn; `load` where tasks do not exceed
      groups.

    Raises:
      ValueError: a job has samples of more than one task.
    """
    groups = groups or load.stages
    cost = defaultdict(float)
    for j, job in enumerate(load.jobs):
        if len(job.tasks) != 1:
            raise ValueError(f"job {j} has the tasks {job.tasks}, expected exactly one")
        cost[job.tasks[0]] += load.forward[j].sum() + load.backward[j].sum()
    if len(cost) <= groups:
        return load
    group_of = _balance(cost, groups)
    members: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for (task, _), round_index, jobs in _batches(load):
        for k, j in enumerate(jobs):
            members[round_index, group_of[task], k].append(j)
    keys = sorted(members)
    return dataclasses.replace(
        load,
        jobs=tuple(_merge([load.jobs[j] for j in members[key]], bucket=key[1]) for key in keys),
        forward=np.array([load.forward[members[key]].sum(axis=0) for key in keys]),
        backward=np.array([load.backward[members[key]].sum(axis=0) for key in keys]),
    )


def _balance(cost: dict[int, float], groups: int) -> dict[int, int]:
    totals = [0.0] * groups
    group_of = {}
    for task in sorted(cost, key=lambda task: (-cost[task], task)):
        group_of[task] = totals.index(min(totals))
        totals[group_of[task]] += cost[task]
    return group_of


def _batches(load: Workload) -> list[tuple[tuple[int, int], int, list[int]]]:
    """Every global batch: (task, step), how many the task has before it, its jobs."""
    members = defaultdict(list)
    for j, job in enumerate(load.jobs):
        members[job.batches[0]].append(j)
    before = defaultdict(int)
    batches = []
    for batch in sorted(members):
        batches.append((batch, before[batch[0]], members[batch]))
        before[batch[0]] += 1
    return batches


def _merge(jobs: list[ScheduledMicrobatch], bucket: int) -> ScheduledMicrobatch:
    return ScheduledMicrobatch(
        tasks=tuple(job.tasks[0] for job in jobs),
        steps=tuple(job.steps[0] for job in jobs),
        bucket=bucket,
        buffers=sum(job.buffers for job in jobs),
    )
