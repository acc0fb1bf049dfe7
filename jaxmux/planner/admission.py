"""Admits tasks to devices: those whose step fits into memory, by a model that learns from what
steps were seen to need (mLoRA 3.4)."""

import dataclasses
from collections.abc import Mapping, Sequence

from .mesh_costs import MeshCosts
from .pool import Pool, merge_pools
from .shape_class import MIN_CHUNK_LEN, PlanningError, ShapeClass, choose_shape_class


@dataclasses.dataclass(frozen=True)
class Admission:
    """What devices of known memory have room for.

    Attributes:
      costs: of the mesh, whatever its pool.
      shape: shape class of the microbatches.
      tokens: N, what was asked for of a microbatch; None if `shape` itself was.
      reserved: what there is room for at least, whoever trains.
      mesh_may_grow: whether more pipeline stages are among the changes to propose.
    """

    costs: MeshCosts
    shape: ShapeClass
    tokens: int | None = None
    reserved: Pool | None = None
    mesh_may_grow: bool = True

    def require(self, tasks: Mapping[str, Pool], live: Mapping[str, Pool] | None = None) -> None:
        """Checks that a step of all tasks fits.

        Args:
          tasks: what each needs alone, by name, in the order in which they came.
          live: likewise of those that train already.

        Raises:
          PlanningError: it does not. The message names the first task with which it does not, and
            of everything that could be changed alone, the smallest change that would make it fit.
        """
        for name, pool in tasks.items():
            self._require([pool], f"task {name!r} does not fit even alone on {self.costs.mesh}")
        together = {**(live or {}), **tasks}
        names, pools = list(together), list(together.values())
        for before in range(len(live or {}), len(names)):
            if not self._costs(pools[: before + 1]).depth(self.shape):
                others = ", ".join(map(repr, names[:before]))
                self._require(pools, f"task {names[before]!r} does not fit beside {others}")

    def _require(self, pools: Sequence[Pool], problem: str) -> None:
        costs = self._costs(pools)
        try:
            costs.require(self.shape, self.mesh_may_grow)
        except PlanningError as e:
            raise PlanningError(f"{problem}: {e}{self._shorter_rows(costs)}") from None

    def observe(
        self, tasks: Sequence[Pool], remat: str | Sequence[str], peak_bytes: int
    ) -> "Admission":
        """Admission after a step of these tasks, on one device, was seen to need `peak_bytes`."""
        pool = self._costs(tasks).pool
        memory = self.costs.memory.observe(self.shape, pool, remat, peak_bytes)
        return dataclasses.replace(self, costs=dataclasses.replace(self.costs, memory=memory))

    def _costs(self, pools: Sequence[Pool]) -> MeshCosts:
        pool = merge_pools(pools, self.reserved)
        return dataclasses.replace(self.costs, pool=pool)

    def _shorter_rows(self, costs: MeshCosts) -> str:
        """The longest samples with which it would fit, where they are what makes a microbatch too
        large."""
        tokens, row_len = self.tokens or self.shape.tokens, self.shape.row_len // 2
        while row_len >= MIN_CHUNK_LEN:
            rows = choose_shape_class([row_len], tokens, self.shape.chunk_len, row_len)
            if rows.tokens < self.shape.tokens and costs.depth(rows):
                return f" or max_length={row_len}"
            row_len //= 2
        return ""
