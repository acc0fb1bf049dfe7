"""GPipe, 1F1B and interleaved 1F1B."""

from .layout import TickRule, lay_out
from .orders import LaunchRule, Op, greedy_orders
from .schedule import PipelineSchedule
from .workload import Workload, microbatch_groups


def gpipe(load: Workload) -> PipelineSchedule:
    """GPipe (Huang et al. 2019): all forwards of a global batch, then all its backwards, a flush.

    A stream is cut into flushes where a job must wait for the update of a task in the flush, as
    late as possible. Equal stage times and F = B leave a bubble ratio of (S−1) / (N+S−1) a flush of
    N jobs.

    Raises:
      PlanningError: a flush does not fit `load.buffer_limit`.
    """
    flushes = microbatch_groups(load)
    orders = [
        [
            Op(backward, stage, job)
            for flush in flushes
            for backward in (False, True)
            for job in flush
        ]
        for stage in range(load.stages)
    ]
    return lay_out(load, orders)


def one_forward_one_backward(load: Workload, rule: TickRule = "single") -> PipelineSchedule:
    """1F1B (PipeDream-flush, Narayanan et al. 2021): backwards first, few jobs in flight.

    Stage s has at most S − s jobs in flight, or 2(S − s) − 1 unless ticks are single (see
    `lay_out`), and never more than `load.buffer_limit` allows. The jobs keep the order of the
    stream; one that needs an update holds back all that follow it. Bubble ratio as GPipe's.
    """
    policy = LaunchRule(in_flight=one_f_one_b_depth(load.stages, rule))
    return lay_out(load, greedy_orders(load, policy), rule)


def one_f_one_b_depth(stages: int, rule: TickRule) -> list[int]:
    """Jobs in flight on each stage that keep a 1F1B pipeline of equal stages full."""
    return [stages - s if rule == "single" else 2 * (stages - s) - 1 for s in range(stages)]


def interleaved(load: Workload, chunks: int) -> PipelineSchedule:
    """Interleaved 1F1B (Narayanan et al. 2021, 2.2): `chunks` model chunks a stage.

    `load` gives times per stage, which the chunks share equally. For a number N of jobs that is a
    multiple of S, equal stage times and F = B, the bubble ratio is (S−1) / (chunks·N + S−1).

    Raises:
      PlanningError: `load.buffer_limit` is too small: jobs of one chunk hold the slots that the
        next chunk needs.
    """
    load = load.split_layers(chunks)
    last = load.stages - 1
    depth = [2 * (last - s) + (chunks - 1) * load.stages + 1 for s in range(load.stages)]
    policy = LaunchRule(in_flight=depth, forward_first=load.stages)
    return lay_out(load, greedy_orders(load, policy))
