"""The schedules GPipe, 1F1B and interleaved 1F1B."""

from .greedy_orders import LaunchRule, Op, greedy_orders
from .schedule import PipelineSchedule, Workload, independent_series
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
