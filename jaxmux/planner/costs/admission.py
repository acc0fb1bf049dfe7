"""Admits tasks whose round fits into memory, by a model that learns from the memory that rounds
were seen to need (mLoRA 3.4)."""

import dataclasses
from collections.abc import Mapping, Sequence

from ..errors import PlanningError
from ..packing.shape_class import MIN_CHUNK_LEN, ShapeClass, smallest_shape_class
from .pool_spec import PoolSpec, merge_pool_specs
from .replica_costs import ReplicaCosts


@dataclasses.dataclass(frozen=True)
class Admission:
    """The tasks that devices of known memory have room for.

    Attributes:
      costs: costs on the devices; their pool is replaced by that of the tasks at hand.
      shape: shape class of the microbatches.
      tokens: N, the tokens of a microbatch that the user asked for; None if `shape` was given.
      reserved: the pool has room for at least this, whoever trains.
      more_stages: whether messages may propose more pipeline stages.
    """

    costs: ReplicaCosts
    shape: ShapeClass
    tokens: int | None = None
    reserved: PoolSpec | None = None
    more_stages: bool = True

    def require(
        self, tasks: Mapping[str, PoolSpec], live: Mapping[str, PoolSpec] | None = None
    ) -> None:
        """Checks that a round of all tasks fits.

        Args:
          tasks: by name, the pool that each task needs alone, in the order in which they came.
          live: the same for the tasks that train already.

        Raises:
          PlanningError: it does not fit. The message names the first task with which it does not
            and, for everything that could be changed alone, the smallest change that would make it
            fit.
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
        """Admission after a round of these tasks on one device needed at most `peak_bytes`."""
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
        """The end of the message: the longest samples with which a round would fit, where they are
        the reason that a microbatch is too large."""
        tokens, row_len = self.tokens or self.shape.tokens, self.shape.row_len // 2
        while row_len >= MIN_CHUNK_LEN:
            rows = smallest_shape_class([row_len], tokens, self.shape.chunk_len, row_len)
            if rows.tokens < self.shape.tokens and costs.depth(rows):
                return f" or max_length={row_len}"
            row_len //= 2
        return ""
