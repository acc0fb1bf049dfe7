"""What fits on one device, by tokens of a microbatch and number of tasks."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..packing.shape_class import ShapeClass
from .replica_costs import ReplicaCosts


class FitCell(NamedTuple):
    """Whether rounds of some tasks fit on a device, and what they take.

    Attributes:
      tokens: N, tokens of a microbatch.
      tasks: number of tasks that train at the same time.
      fits: whether a round fits into memory, as `Admission` decides.
      peak_bytes: predicted peak memory of a round whose layers have the policies in `remat`.
      remat: for each remat policy in use, the number of its layers; the policy that recomputes most
        comes first. They are those that training picks. If the round does not fit, they are those
        with which it takes least.
      tokens_per_second: predicted tokens per second of full microbatches, without the updates after
        them; None if the round does not fit.
    """

    tokens: int
    tasks: int
    fits: bool
    peak_bytes: float
    remat: Mapping[str, int]
    tokens_per_second: float | None


def fit_cells(
    costs: ReplicaCosts, shapes: Iterable[ShapeClass], tasks: Iterable[int]
) -> tuple[FitCell, ...]:
    """Returns a cell for each shape class and number of tasks.

    Args:
      costs: predicted costs on one device. Its pool gives what each slot holds, and the fewest
        slots; more tasks get more slots.
      shapes: shape classes of the microbatches.
      tasks: numbers of tasks, which share every microbatch equally.

    Raises:
      ProfileError: the remat policy of `costs`, or attention in rows like those of `shapes`, was
        not measured.
      PlanningError: the pool names an unknown optimizer or linear.
    """
    counts = list(tasks)
    return tuple(_cell(costs, shape, count) for shape in shapes for count in counts)


def largest_fitting(cells: Sequence[FitCell], tasks: int) -> FitCell | None:
    """Returns the cell with the largest microbatch that fits, or None if none fits.

    Args:
      cells: the cells of one format.
      tasks: the number of tasks.
    """
    fitting = [cell for cell in cells if cell.tasks == tasks and cell.fits]
    return max(fitting, key=lambda cell: cell.tokens, default=None)


def fastest_fitting(cells: Sequence[FitCell], tasks: int) -> FitCell | None:
    """Returns the cell that fits with the most tokens per second, or None if none fits.

    Args:
      cells, tasks: as for `largest_fitting`.
    """
    fitting = [cell for cell in cells if cell.tasks == tasks and cell.fits]
    return max(fitting, key=lambda cell: cell.tokens_per_second, default=None)


def _cell(costs: ReplicaCosts, shape: ShapeClass, tasks: int) -> FitCell:
    pool = costs.pool._replace(slots=max(tasks, costs.pool.slots))
    costs = dataclasses.replace(costs, pool=pool)
    fits, policies = bool(costs.depth(shape)), costs.policies(shape)
    speed = None
    if fits:
        # No more tasks than chunks have tokens in one microbatch.
        shares = min(tasks, shape.chunks)
        owned = (shape.tokens / shares,) * shares
        speed = shape.tokens / costs.times.microbatch(shape, owned, pool, policies)
    peak = costs.peak(shape, policies, in_flight=1)
    return FitCell(shape.tokens, tasks, fits, peak, dict(Counter(policies)), speed)
