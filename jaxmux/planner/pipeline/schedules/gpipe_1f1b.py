"""The schedules GPipe, 1F1B and interleaved 1F1B."""

from .greedy_orders import LaunchRule, Op, greedy_orders
from .schedule import PipelineSchedule
from .tick_layout import TickRule, lay_out
from .workload import Workload, independent_series


def gpipe(workload: Workload) -> PipelineSchedule:
    """GPipe (Huang et al. 2019): all forward passes of a flush, then all its backward passes.

    A new flush begins where a microbatch must wait for the update of a task that is in the current
    flush, so a flush holds as many microbatches as possible. With equal stage times and F = B, the
    bubble ratio of a flush of N microbatches is (S-1) / (N+S-1).

    Raises:
      PlanningError: a flush does not fit `workload.buffer_limit`.
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
    """1F1B (PipeDream-flush; Narayanan et al. 2021, 2.2): backward passes first.

    Stage s has at most `one_f_one_b_depth` microbatches in flight, and never more than
    `workload.buffer_limit` allows. The microbatches keep the order of the stream: one that waits
    for an update holds back all that follow it. The bubble ratio is that of `gpipe`.

    Args:
      workload: the stream.
      rule: the ops that may share a tick.
    """
    launch = LaunchRule(in_flight=one_f_one_b_depth(workload.stages, rule))
    return lay_out(workload, greedy_orders(workload, launch), rule)


def one_f_one_b_depth(stages: int, rule: TickRule) -> list[int]:
    """Returns, for each stage, the microbatches in flight that keep a 1F1B pipeline full.

    Stage s needs S - s of them with single ticks, and 2(S - s) - 1 with paired or alternating
    ticks, because about twice as many others are launched while a microbatch is in flight.
    """
    return [stages - s if rule == "single" else 2 * (stages - s) - 1 for s in range(stages)]


def interleaved(workload: Workload, virtual_per_stage: int) -> PipelineSchedule:
    """Interleaved 1F1B (Narayanan et al. 2021, 2.2), which has shorter bubbles than 1F1B.

    If the number N of microbatches is a multiple of S, stage times are equal and F = B, the bubble
    ratio is (S-1) / (virtual_per_stage · N + S-1).

    Args:
      workload: the stream with times per stage, which the virtual stages share equally.
      virtual_per_stage: virtual stages of every stage.

    Raises:
      PlanningError: `workload.buffer_limit` is too small: microbatches on one virtual stage hold
        the buffers that they need on the next one.
    """
    workload = workload.with_virtual_stages(virtual_per_stage)
    stages = workload.stages
    depth = [2 * (stages - 1 - s) + (virtual_per_stage - 1) * stages + 1 for s in range(stages)]
    launch = LaunchRule(in_flight=depth, forward_first=stages)
    return lay_out(workload, greedy_orders(workload, launch))
