"""Tries whether microbatches of fewer tokens would make a plan faster."""

from collections.abc import Sequence
from typing import NamedTuple

from ..costs.replica_costs import ReplicaCosts
from ..packing.shape_choice import ShapeRequest
from .make_plan import TaskLoad, choose_shape_class, round_lengths
from .pipeline_choice import choose_pipeline
from .plan_value import Plan

# Smaller microbatches are tried if less than this share of all devices' time is useful, and
# reported if a round takes less than this share of the plan's.
_NOTABLE = 0.95


class SmallerMicrobatches(NamedTuple):
    """The same plan with microbatches of fewer tokens.

    Attributes:
      tokens: N to request, before it is rounded up to whole rows.
      round_seconds: predicted time of a round.
      bubble_ratio: bubble ratio of the schedule.
    """

    tokens: int
    round_seconds: float
    bubble_ratio: float


def try_smaller_microbatches(
    plan: Plan, tasks: Sequence[TaskLoad], request: ShapeRequest, costs: ReplicaCosts
) -> SmallerMicrobatches | None:
    """Returns the fastest N that repeated halving finds, or None if it is not notably faster.

    Smaller microbatches are more numerous, which fills a pipeline better, and less of them is
    padding. Nothing is tried where bubbles and padding take little of the devices' time, nor on one
    device, where `make_plan` considers fewer tokens itself. The search ends as soon as half as many
    tokens take longer.

    Args:
      plan: the result of `make_plan` with the other arguments.
      tasks, request, costs: as of `make_plan`.
    """
    if plan.replica.pp == 1 or _useful_share(plan) > _NOTABLE:
        return None
    lengths, own = round_lengths(tasks, plan.rounds), plan.prediction
    best = SmallerMicrobatches(request.tokens, own.round_seconds, own.bubble_ratio)
    tokens = request.tokens // 2
    while tokens >= max(task.longest for task in tasks):
        shape = choose_shape_class(tasks, request._replace(tokens=tokens), costs)
        simulation = choose_pipeline(lengths, shape, costs).best.simulation
        seconds = simulation.makespan / plan.rounds + own.update_seconds
        if seconds > best.round_seconds:
            break
        best = SmallerMicrobatches(tokens, seconds, simulation.bubble_ratio())
        tokens //= 2
    return best if best.round_seconds < _NOTABLE * own.round_seconds else None


def _useful_share(plan: Plan) -> float:
    """The share of all devices' time that is neither bubbles nor padding."""
    tokens = plan.tokens_by_microbatch
    return (1 - plan.prediction.bubble_ratio) * sum(tokens) / (len(tokens) * plan.shape.tokens)
