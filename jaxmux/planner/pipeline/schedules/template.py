"""MuxTune's structured pipeline template (3.4.1, Appendix A)."""

from collections import defaultdict
from typing import Literal, get_args

import numpy as np

from .layout import TickRule, lay_out
from .orders import LaunchRule, greedy_orders
from .schedule import PipelineSchedule
from .simulate import simulate_lockstep
from .workload import Workload

Clock = Literal["lockstep", "asynchronous"]


def template(
    load: Workload, clock: Clock = "lockstep", permute_time: float = 0.0
) -> PipelineSchedule:
    """The structured template: an eager 1F1B over buckets in descending order of latency.

    Its rules: (1) buckets descend by their mean forward time on the first stage; (2) the jobs of a
    bucket are consecutive; (3) jobs are launched as early as memory allows, backwards first. Over
    several global batches the rules hold in each round (the k-th global batch of every task). The
    rounds follow each other without a flush, and a job that must wait for its task's update is
    passed over.

    Appendix A's Theorem 2, that the last stage keeps busy from its first forward to its last
    backward, is guaranteed here under these assumptions: one round, no buffer limit, and for each
    job the same latency t_j forward and backward on every stage, messages free. In each clock it
    means something else:

    - "lockstep": the last stage has no empty tick. A tick may still be longer than the last stage's
      own work where buckets meet, as an earlier stage runs a backward of the longer one. In all,
      the makespan is at most 2(S−1)·t_1 + 2·Σ_j t_j, which is (S−1)(t_1−t_P) more than Lemma 1
      and 2 give for free-running stages, and equal to it for buckets of one latency (Eq. 9).
    - "asynchronous": the last stage has no idle time, as in the paper.

    Args:
      load: the stream of jobs; `ScheduledMicrobatch.bucket` says which belong together. The
        schedule lists the jobs in the template's order, that of `template_order`.
      clock: how the schedule will be run. For a lockstep clock the faster of one op a tick and of
        F and B in one tick is taken; for free-running stages the order of each stage's ops is the
        one that a greedy stage chooses with the times given.
      permute_time: what a lockstep tick takes besides, in the unit of the workload's times.
    """
    load = load.reorder(template_order(load))
    lockstep = clock == "lockstep"
    orders = greedy_orders(load, LaunchRule(unit_times=lockstep, skip_blocked=True))
    candidates = [
        lay_out(load, orders, rule) for rule in (get_args(TickRule) if lockstep else ["single"])
    ]
    return min(candidates, key=lambda s: simulate_lockstep(s, load, permute_time).makespan)


def template_order(load: Workload) -> list[int]:
    """The jobs by round, then by bucket in descending order of latency."""
    rounds = _rounds(load)
    members = defaultdict(list)
    for j, job in enumerate(load.jobs):
        members[job.bucket].append(load.forward[j, 0])
    latency = {bucket: float(np.mean(times)) for bucket, times in members.items()}

    def key(j: int):
        bucket = load.jobs[j].bucket
        return rounds[j], -latency[bucket], bucket, j

    return sorted(range(len(load.jobs)), key=key)


def _rounds(load: Workload) -> list[int]:
    """By job, how many global batches its tasks have before it: the most of any of its tasks."""
    steps = defaultdict(set)
    for job in load.jobs:
        for task, step in job.batches:
            steps[task].add(step)
    rank = {(task, step): i for task, own in steps.items() for i, step in enumerate(sorted(own))}
    return [max((rank[batch] for batch in job.batches), default=0) for job in load.jobs]
