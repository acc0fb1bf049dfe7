"""Checks whether tasks fit into memory, by a model that learns from the measured peaks of earlier
rounds (mLoRA 3.4), and tabulates the sizes that fit on a device."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..errors import PlanningError
from ..packing.rows import MIN_CHUNK_LEN, ShapeClass, smallest_shape_class
from .pool_spec import PoolSpec, merge_pool_specs, refuse_stages
from .replica_costs import ReplicaCosts


class FitCell(NamedTuple):
    """Whether rounds of some tasks fit on a device, with their predicted memory and speed.

    Attributes:
      remat: number of layers of each remat policy that training would pick, the policy with the
        most recomputation first. If the round does not fit, these are the policies that need the
        least memory.
      tokens_per_second: predicted for full microbatches, without updates; None if the round does
        not fit.
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
    """Returns a cell for each shape class and number of tasks. The tasks have equal shares of every
    microbatch. The pool has the slots of `costs.pool`, or more if there are more tasks."""
    counts = list(tasks)
    return tuple(_cell(costs, shape, count) for shape in shapes for count in counts)


def largest_fitting(cells: Sequence[FitCell], tasks: int) -> FitCell | None:
    fitting = [cell for cell in cells if cell.tasks == tasks and cell.fits]
    return max(fitting, key=lambda cell: cell.tokens, default=None)


def fastest_fitting(cells: Sequence[FitCell], tasks: int) -> FitCell | None:
    """Returns the cell with the most tokens per second, of those that fit and have `tasks`
    tasks."""
    fitting = [cell for cell in cells if cell.tasks == tasks and cell.fits]
    return max(fitting, key=lambda cell: cell.tokens_per_second, default=None)


def _cell(costs: ReplicaCosts, shape: ShapeClass, tasks: int) -> FitCell:
    pool = costs.pool._replace(slots=max(tasks, costs.pool.slots))
    costs = dataclasses.replace(costs, pool=pool)
    fits, policies = bool(costs.depth(shape)), costs.policies(shape)
    speed = None
    if fits:
        # A chunk belongs to one task, so a microbatch has tokens of at most `shape.chunks` tasks.
        shares = min(tasks, shape.chunks)
        owned = (shape.tokens / shares,) * shares
        speed = shape.tokens / costs.times.microbatch(shape, owned, pool, policies)
    peak = costs.peak(shape, policies, in_flight=1)
    return FitCell(shape.tokens, tasks, fits, peak, dict(Counter(policies)), speed)


@dataclasses.dataclass(frozen=True)
class Admission:
    """Checks, before tasks are trained, whether their round fits into the devices' memory.

    Attributes:
      costs: predicted costs on the devices. The field `pool` of these costs is not used.
      tokens: N, the tokens per microbatch that the user asked for; None means those of `shape`.
      reserved: a pool whose slots, rank and adapted linears are always allocated.
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
        """Raises PlanningError if a round of all tasks does not fit into memory. The message names
        the first new task that does not fit alone. If each fits alone, it names the first that does
        not fit beside the tasks before it.

        Args:
          tasks: the new tasks in order of arrival; for each, the pool that it needs alone.
          live: the same for the tasks that already train.
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
        """Returns why rounds would not fit into memory with `slots` slots in the reserved pool and
        `rows` rows in a microbatch; None if they would fit."""
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
        """Returns the predicted peak memory, in bytes, of a round of tasks. `tasks` holds the pool
        that each task needs alone."""
        return self._costs(tasks).peak(self.shape, remat, in_flight)

    def observe(
        self, tasks: Sequence[PoolSpec], remat: str | Sequence[str], peak_bytes: int
    ) -> "Admission":
        """Returns a new `Admission` that has learnt from the measured peak memory of a round on one
        device."""
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
        """Returns the end of an error message: the longest samples with which a smaller round would
        fit. Empty if there are none."""
        tokens, row_len = self.tokens or self.shape.tokens, self.shape.row_len // 2
        while row_len >= MIN_CHUNK_LEN:
            rows = smallest_shape_class([row_len], tokens, self.shape.chunk_len, row_len)
            if rows.tokens < self.shape.tokens and costs.depth(rows):
                return f" or max_length={row_len}"
            row_len //= 2
        return ""
