"""The schedules GPipe, 1F1B and interleaved 1F1B."""

from .greedy_orders import LaunchRule, Op, greedy_orders
from .schedule import PipelineSchedule
from .tick_layout import TickRule, lay_out
from .workload import Workload, independent_series


def gpipe(workload: Workload) -> PipelineSchedule:
    """Returns the GPipe schedule: all forward passes of a flush, then all its backward passes.

    A *flush* is a series of consecutive microbatches that run with the same adapter parameters. A
    new flush begins at a microbatch that needs the update of a task with an earlier step in the
    current flush. GPipe needs a buffer for every microbatch of a flush; `one_forward_one_backward`
    needs fewer.

    With S stages, equal stage times and forward passes as long as backward passes, the bubble ratio
    of a flush of N microbatches is (S-1) / (N+S-1) (Huang et al. 2019).

    Args:
      workload: the stream, with one virtual stage per stage.

    Returns:
      The schedule, with one pass per stage and tick (the tick rule "single" of `TickRule`).

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
    """Returns the 1F1B schedule: each stage prefers backward passes and so needs few buffers.

    The source is PipeDream-flush (Narayanan et al. 2021, 2.2). A microbatch is in flight on a stage
    from its forward to its backward pass there. Stage s has at most `one_f_one_b_depth(S, rule)[s]`
    microbatches in flight, and fewer where `workload.buffer_limit` requires it.

    The microbatches start in the order of the stream. A microbatch that waits for a task's update
    holds back all microbatches after it; `lorapp` passes over such a microbatch instead. The
    pipeline is not drained between global batches of different tasks. For microbatches that wait
    for no update, the bubble ratio is the same as for `gpipe`.

    Args:
      workload: the stream, with one virtual stage per stage.
      rule: the passes that may share a tick. "single": every stage runs one pass. "paired": every
        stage runs a forward pass, a backward pass or both. "alternating": all stages run forward
        passes in one tick and backward passes in the next.

    Raises:
      PlanningError: a microbatch can never start, for example because there are too few buffers.
    """
    launch = LaunchRule(in_flight=one_f_one_b_depth(workload.stages, rule))
    return lay_out(workload, greedy_orders(workload, launch), rule)


def one_f_one_b_depth(stages: int, rule: TickRule) -> list[int]:
    """Returns the number of microbatches in flight on each stage that keeps a 1F1B pipeline full.

    A microbatch is in flight on a stage from its forward to its backward pass there, and its
    residuals take memory for that time. Stage s of S stages needs S - s microbatches in flight with
    "single" ticks. With "paired" or "alternating" ticks it needs 2(S - s) - 1, because about twice
    as many other microbatches start while one is in flight.

    Args:
      stages: S, the number of pipeline stages.
      rule: the passes that may share a tick (see `TickRule`).

    Returns:
      S numbers, the largest for the first stage.
    """
    return [stages - s if rule == "single" else 2 * (stages - s) - 1 for s in range(stages)]


def interleaved(workload: Workload, virtual_per_stage: int) -> PipelineSchedule:
    """Returns the interleaved 1F1B schedule, which has shorter bubbles than 1F1B.

    Each stage holds several parts of the model, its virtual stages, so a microbatch passes every
    stage several times and the pipeline fills sooner (Narayanan et al. 2021, 2.2). In exchange the
    stages send more messages. Let N microbatches wait for no update, N be a multiple of the number
    S of stages, stage times be equal and forward passes take as long as backward passes. The bubble
    ratio is then (S-1) / (virtual_per_stage · N + S-1).

    Args:
      workload: the stream with times per stage. The virtual stages of a stage share its times
        equally.
      virtual_per_stage: number of virtual stages of every stage.

    Returns:
      The schedule, with one pass per stage and tick (the tick rule "single" of `TickRule`).

    Raises:
      PlanningError: `workload` is interleaved already, or `workload.buffer_limit` is too small: the
        microbatches on one virtual stage hold the buffers that they need on the next one.
    """
    workload = workload.with_virtual_stages(virtual_per_stage)
    stages = workload.stages
    depth = [2 * (stages - 1 - s) + (virtual_per_stage - 1) * stages + 1 for s in range(stages)]
    launch = LaunchRule(in_flight=depth, forward_first=stages)
    return lay_out(workload, greedy_orders(workload, launch))
