"""Tries whether microbatches of fewer tokens would make a plan faster."""

from collections.abc import Sequence
from typing import NamedTuple

from ..costs.replica_costs import ReplicaCosts
from ..packing.shape_choice import ShapeRequest
from .make_plan import TaskLoad, choose_shape_class, round_lengths
from .pipeline_choice import plan_with
from .pipeline_plan import grouping_of_tasks
from .plan_value import Plan

# Smaller microbatches are tried if less than this share of all devices' time is useful, and
# reported if a round takes less than this share of the plan's.
_NOTABLE = 0.95


class SmallerMicrobatches(NamedTuple):
    """Fewer tokens per microbatch than in a plan, and the predicted times with them.

    `try_smaller_microbatches` returns it.

    Attributes:
      tokens: tokens of a microbatch to request as `ShapeRequest.tokens`, before rounding up to
        whole rows and chunks.
      round_seconds: predicted seconds of one round (one global batch of every task), including the
        optimizer updates.
      bubble_ratio: fraction of the pipeline stages' time, between 0 and 1, in which they run no
        pass.
    """

    tokens: int
    round_seconds: float
    bubble_ratio: float


def try_smaller_microbatches(
    plan: Plan, tasks: Sequence[TaskLoad], request: ShapeRequest, costs: ReplicaCosts
) -> SmallerMicrobatches | None:
    """Tries whether fewer tokens per microbatch would make rounds at least 5% faster than in a
    plan.

    A round is one global batch of every task. Smaller microbatches are more numerous, so they fill
    a pipeline better, and less of them is padding. The function halves the requested tokens until a
    round takes longer, or until a microbatch would be shorter than the longest sample.

    Args:
      plan: the result of `make_plan(tasks, request, costs, source, rounds)`.
      tasks: the tasks, as given to `make_plan`.
      request: limits of the shape class of microbatches, as given to `make_plan`.
      costs: the costs of the replica, as given to `make_plan`.

    Returns:
      The best number of tokens that was found, with its predicted times. None if no number makes
      rounds at least 5% faster. It is None without a search in two cases: on one pipeline stage,
      because `make_plan` considers fewer tokens itself there; and if bubbles and padding together
      take less than 5% of the devices' time, because there is little to gain.
    """
    if plan.replica.pp == 1 or _useful_share(plan) > _NOTABLE:
        return None
    lengths, own = round_lengths(tasks, plan.rounds), plan.prediction
    best = SmallerMicrobatches(request.tokens, own.round_seconds, own.bubble_ratio)
    tokens = request.tokens // 2
    while tokens >= max(task.longest for task in tasks):
        shape = choose_shape_class(tasks, request._replace(tokens=tokens), costs)
        if shape.tokens >= 2 * tokens:
            # Rounded up to whole rows and chunks, it is no smaller than with more tokens.
            break
        grouping = grouping_of_tasks([task.batches for task in tasks], shape, plan.replica.pp)
        simulation = plan_with(grouping, lengths, shape, costs).simulation
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
