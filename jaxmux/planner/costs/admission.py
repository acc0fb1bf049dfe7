"""Admits tasks if their round fits into memory, by a model that learns from the peak memory of the
rounds that have been trained (mLoRA 3.4)."""

import dataclasses
from collections.abc import Mapping, Sequence

from ..errors import PlanningError
from ..packing.shape_class import MIN_CHUNK_LEN, ShapeClass, smallest_shape_class
from .pool_spec import PoolSpec, merge_pool_specs
from .replica_costs import ReplicaCosts


@dataclasses.dataclass(frozen=True)
class Admission:
    """Checks whether tasks fit into the devices' memory together.

    `ReplicaCosts.require` checks one given pool; an `Admission` builds the pool from tasks that
    come and go, and its messages name the tasks. It does not change: `observe` returns a new value.

    Attributes:
      costs: costs on the devices. Their `pool` is ignored; each check uses the pool of its tasks.
      shape: shape class of the microbatches.
      tokens: N, the tokens of a microbatch that the user asked for, for the advice on shorter
        samples in error messages; None if the user gave `shape` itself.
      reserved: a pool whose slots, rank and linears are always allocated, even if the tasks need
        less; None for no such pool.
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
        """Raises an error if a round of all tasks, old and new, does not fit into memory.

        Args:
          tasks: the tasks to admit, in the order in which they came: for each name, the pool that
            the task needs alone (`PreparedTask.pool`).
          live: the tasks that train already, in the same form; None if there are none.

        Raises:
          PlanningError: the round does not fit. The message names a task that does not fit alone,
            or else the first new task that does not fit beside the tasks before it. It also lists
            changes; each of them alone would make the round fit.
        """
        for name, pool in tasks.items():
            self._require([pool], f"task {name!r} does not fit even alone on {self.costs.replica}")
        together = {**(live or {}), **tasks}
        names, pools = list(together), list(together.values())
        for before in range(len(live or {}), len(names)):
            if not self._costs(pools[: before + 1]).depth(self.shape):
                others = ", ".join(map(repr, names[:before]))
                self._require(pools, f"task {names[before]!r} does not fit beside {others}")

    def observe(
        self, tasks: Sequence[PoolSpec], remat: str | Sequence[str], peak_bytes: int
    ) -> "Admission":
        """Returns a new `Admission` that has learnt from the measured peak memory of a round.

        The round ran on one device.

        Args:
          tasks: for each task of the round, the pool that the task needs alone.
          remat: remat policy of all layers in the round, or one policy for each layer.
          peak_bytes: the most bytes of the device's memory that were in use at the same time.
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
        pool = merge_pool_specs(pools, self.reserved)
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
