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
    """The predicted times of a plan with fewer tokens per microbatch.

    Attributes:
      tokens: tokens of a microbatch to request as `ShapeRequest.tokens`, before rounding up to
        whole rows and chunks.
      round_seconds: predicted seconds of one round (one global batch of every task), including the
        optimizer updates.
      bubble_ratio: fraction of the stages' time, between 0 and 1, in which they run no pass.
    """

    tokens: int
    round_seconds: float
    bubble_ratio: float


def try_smaller_microbatches(
    plan: Plan, tasks: Sequence[TaskLoad], request: ShapeRequest, costs: ReplicaCosts
) -> SmallerMicrobatches | None:
    """Returns fewer tokens per microbatch that make rounds at least 5% faster than a plan, or None.

    Smaller microbatches are more numerous, so they fill a pipeline better, and less of them is
    padding. The function halves the requested tokens until a round takes longer, or until a
    microbatch would be shorter than the longest sample.

    It returns None without a search in two cases. On one pipeline stage `make_plan` considers fewer
    tokens itself. And if bubbles and padding together take less than 5% of the devices' time, there
    is little to gain.

    Args:
      plan: the result of `make_plan(tasks, request, costs, source, rounds)`.
      tasks: the same tasks as for `make_plan`.
      request: the same limits of the shape class as for `make_plan`.
      costs: the same costs of the replica as for `make_plan`.
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
