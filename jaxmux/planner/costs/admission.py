"""Admits tasks if their round fits into memory, by a model that learns from the peak memory of the
rounds that have been trained (mLoRA 3.4); and tells what fits on a device, as a table."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..errors import PlanningError
from ..packing.shape_class import MIN_CHUNK_LEN, ShapeClass, smallest_shape_class
from .pool_spec import PoolSpec, merge_pool_specs, refuse_stages
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


@dataclasses.dataclass(frozen=True)
class Admission:
    """Checks, before tasks are trained, whether they fit into the devices' memory together.

    They fit if the predicted peak memory of a round (one global batch of every task) does. The
    adapters of all tasks are stacked in a pool with one slot per task; a `PoolSpec` gives the sizes
    of a pool. `ReplicaCosts.require` checks one given pool; an `Admission` builds the pool from
    tasks that come and go, and its messages name the tasks. An `Admission` is immutable: `observe`
    returns a new one.

    Attributes:
      costs: predicted costs on the devices. Its `pool` is ignored; each check builds a pool of its
        tasks.
      shape: shape class of the microbatches: rows, tokens per row and per chunk (series of tokens
        of one task), and sequences per row.
      tokens: N, the tokens of a microbatch that the user asked for. Error messages use N to tell
        which shorter samples would fit. None stands for the tokens of `shape`.
      reserved: a pool whose slots, rank and adapted linears are always allocated, even if the tasks
        need less; None for no such pool.
      more_stages: whether error messages may propose more pipeline stages.
    """

    costs: ReplicaCosts
    shape: ShapeClass
    tokens: int | None = None
    reserved: PoolSpec | None = None
    more_stages: bool = True

    def require(
        self, tasks: Mapping[str, PoolSpec], live: Mapping[str, PoolSpec] | None = None
    ) -> None:
        """Raises an error if a round of all tasks, new and live, does not fit into memory.

        Args:
          tasks: the new tasks, in the order in which they came: a mapping from each task's name to
            the pool that the task needs alone (`PreparedTask.pool`).
          live: the tasks that train already, also as a mapping from name to pool; None if there are
            none.

        Raises:
          PlanningError: the round does not fit, or a pool names an unknown optimizer or linear. The
            message names the first new task that does not fit alone, or else the first new task
            that does not fit beside the tasks before it. It also lists single changes with which
            the round would fit, if there are any.
        """
        named = {f"task {name!r}": pool for name, pool in tasks.items()}
        refuse_stages(named, self.costs.replica.pp)
        for name, pool in tasks.items():
            self._require([pool], f"task {name!r} does not fit even alone on {self.costs.replica}")
        together = {**(live or {}), **tasks}
        names, pools = list(together), list(together.values())
        for before in range(len(live or {}), len(names)):
            if not self._costs(pools[: before + 1]).depth(self.shape):
                others = ", ".join(map(repr, names[:before]))
                self._require(pools, f"task {names[before]!r} does not fit beside {others}")

    def refusal(self, slots: int, rows: int) -> str | None:
        """Returns why rounds would not fit into memory if pool and microbatches had other sizes;
        None if they would fit.

        Args:
          slots: number of slots of the pool, which has the rank and the linears of `reserved`.
          rows: number of rows of a microbatch.

        Raises:
          PlanningError: `reserved` is None.
        """
        if self.reserved is None:
            raise PlanningError("an admission without a reserved pool knows no sizes")
        costs = self._costs_of(self.reserved._replace(slots=slots))
        shape = dataclasses.replace(self.shape, rows=rows)
        try:
            costs.require(shape, self.more_stages)
            costs.require_full_pipeline(shape)
        except PlanningError as e:
            return str(e)
        return None

    def peak(
        self, tasks: Sequence[PoolSpec], remat: str | Sequence[str], in_flight: float = 1
    ) -> float:
        """Returns the predicted peak memory of a round of these tasks, in bytes of one device.

        Args:
          tasks: for each task of the round, the pool that the task needs alone.
          remat: remat policy of all layers, or one policy for each layer.
          in_flight: number of microbatches between their forward and their backward pass on the
            first stage.
        """
        return self._costs(tasks).peak(self.shape, remat, in_flight)

    def observe(
        self, tasks: Sequence[PoolSpec], remat: str | Sequence[str], peak_bytes: int
    ) -> "Admission":
        """Returns a new `Admission` that has learnt from the measured peak memory of a round.

        The round was trained on one device with microbatches of the shape class `shape`.

        Args:
          tasks: for each task of the round, the pool that the task needs alone
            (`PreparedTask.pool`).
          remat: remat policy of all layers in the round, or one policy for each layer: "norms",
            "dots", "lean" or "full", in the order of increasing recomputation.
          peak_bytes: the most bytes of the device's memory that were in use at the same time.

        Raises:
          ProfileError: a remat policy is unknown to the memory model.
        """
        pool = self._costs(tasks).pool
        memory = self.costs.memory.observe(self.shape, pool, remat, peak_bytes)
        return dataclasses.replace(self, costs=dataclasses.replace(self.costs, memory=memory))

    def _require(self, pools: Sequence[PoolSpec], problem: str) -> None:
        costs = self._costs(pools)
        try:
            costs.require(self.shape, self.more_stages)
        except PlanningError as e:
            raise PlanningError(f"{problem}: {e}{self._shorter_rows(costs)}") from None

    def _costs(self, pools: Sequence[PoolSpec]) -> ReplicaCosts:
        return self._costs_of(merge_pool_specs(pools, self.reserved))

    def _costs_of(self, pool: PoolSpec) -> ReplicaCosts:
        return dataclasses.replace(self.costs, pool=pool)

    def _shorter_rows(self, costs: ReplicaCosts) -> str:
        """Returns the end of the message: the longest samples with which a round would fit, if
        shorter samples allow smaller microbatches; otherwise an empty text."""
        tokens, row_len = self.tokens or self.shape.tokens, self.shape.row_len // 2
        while row_len >= MIN_CHUNK_LEN:
            rows = smallest_shape_class([row_len], tokens, self.shape.chunk_len, row_len)
            if rows.tokens < self.shape.tokens and costs.depth(rows):
                return f" or max_length={row_len}"
            row_len //= 2
        return ""
