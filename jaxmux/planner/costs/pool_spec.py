"""The sizes of a pool, which determine the compiled programs and the costs."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxmux.optimizers import OPTIMIZERS

from ..errors import PlanningError
from ..numbers import numbered
from .device_profile import BackboneSize

_FLOAT32 = 4
# Last components of the paths of the linears whose input tensor parallelism divides, as
# `models.weight_sharding.ROW_PARALLEL`.
_ROW_PARALLEL = ("o_proj", "down_proj")


class PointWork(NamedTuple):
    """What the adapters of a kind do at one point, for one token in the forward passes of all
    layers. The backward passes are twice as much.

    Attributes:
      flops: number of floating-point operations.
      moved: number of values of the stream that are read or written.
      kept: number of values that layers keep for their backward passes, unless they recompute all.
    """

    flops: int
    moved: int
    kept: int = 0


class PointSize(NamedTuple):
    """Numbers of values that the adapters of a kind have at one point, for one slot and all layers,
    and the work there for one token: some for every rank, and some besides.

    Attributes:
      point: place of the backbone at which the adapters do something, such as the path of a linear.
      trained_per_rank: number of trained values for each rank.
      trained: number of other trained values.
      frozen_per_rank: number of values that are not trained, for each rank.
      frozen: number of other values that are not trained.
      flops_per_rank: `PointWork.flops` for each rank.
      flops: other floating-point operations.
      moved: as `PointWork.moved`.
      kept: as `PointWork.kept`.
      kept_per_rank: the same for each rank.
      at_head: whether the adapters change logits. Every chunk of a microbatch then has a copy of
        its task's values and of their gradients, from its forward to its backward pass.
      at_both_ends: whether the adapters change both what enters the first layer and the logits.
      whole_per_rank: number of values, among those that are not trained, that every stage of a
        pipeline has, because they belong to no layer; for each rank.
      whole: number of other such values.
      end: 0 if the first stage of a pipeline has all values, -1 if the last one has; None if they
        are divided like the layers.
    """

    point: str
    trained_per_rank: int
    trained: int
    frozen_per_rank: int = 0
    frozen: int = 0
    flops_per_rank: int = 0
    flops: int = 0
    moved: int = 0
    kept: int = 0
    kept_per_rank: int = 0
    at_head: bool = False
    at_both_ends: bool = False
    whole_per_rank: int = 0
    whole: int = 0
    end: int | None = None


class KindSize(NamedTuple):
    """Sizes of the arrays of one adapter kind besides LoRA in a pool. They have a place in every
    slot.

    Attributes:
      kind: name of the kind.
      rank: size of the axis in which the adapters of this kind differ; all are padded to it.
      points: the points at which they do something, by name.
    """

    kind: str
    rank: int
    points: tuple[PointSize, ...]

    @property
    def trained(self) -> int:
        """Number of trained values of a slot, padding included."""
        return sum(p.trained_per_rank * self.rank + p.trained for p in self.points)

    @property
    def frozen(self) -> int:
        """Number of values of a slot that are not trained, padding included."""
        return sum(p.frozen_per_rank * self.rank + p.frozen for p in self.points)

    @property
    def at_head(self) -> int:
        """Number of values of a slot with which logits are changed, padding included."""
        at_head = self._replace(points=tuple(p for p in self.points if p.at_head))
        return at_head.trained + at_head.frozen

    @property
    def work(self) -> PointWork:
        """The work at all points together, padding included."""
        return PointWork(
            sum(p.flops_per_rank * self.rank + p.flops for p in self.points),
            sum(p.moved for p in self.points),
            sum(p.kept_per_rank * self.rank + p.kept for p in self.points),
        )


class PoolSpec(NamedTuple):
    """Sizes of a pool: the stacked adapters of several tasks, with gradients and optimizer state.
    Rank and modules are those of LoRA adapters.

    A slot is the place of one task in the pool. `PreparedTask.pool` gives the pool of a single
    task; `merge_pool_specs` gives the pool of several tasks.

    Attributes:
      slots: T, number of slots, the most tasks that train at the same time.
      rank: R, rank of the pool. The adapters of all slots are zero-padded to this rank.
      modules: module paths, for example "self_attn.q_proj", of the linears that carry an adapter;
        they are keys of `BackboneSize.linears` and of the result of `peft.resolve_targets`. None
        stands for all linears of `BackboneSize.linears`, and an empty tuple for none.
      dropout: whether any task applies dropout to the input of its adapter.
      optimizer: kind of the optimizer for which memory is reserved, a key of
        `jaxmux.optimizers.OPTIMIZERS`. If the tasks use several kinds, it is the kind with the most
        moments (state values per adapter parameter).
      others: the arrays of other adapter kinds than LoRA, by name of the kind.
    """

    slots: int
    rank: int
    modules: tuple[str, ...] | None = None
    dropout: bool = False
    optimizer: str = "adamw"
    others: tuple[KindSize, ...] = ()

    @property
    def largest_rank(self) -> int:
        """The largest rank that an adapter in the pool may have, of whatever kind; 0 if their sizes
        do not depend on a rank."""
        ranks = [
            kind.rank
            for kind in self.others
            if any(p.trained_per_rank or p.frozen_per_rank for p in kind.points)
        ]
        return max(ranks + [self.rank] * (self.modules != ()), default=0)

    def share(self, backbone: BackboneSize) -> float:
        """Returns the pool's adapter parameters as a fraction of those of a pool that adapts every
        linear.

        Both pools have equal slots and ranks.

        Args:
          backbone: sizes of the backbone.

        Raises:
          PlanningError: the backbone has no linear of a module path in `modules`.
        """
        if self.modules is None:
            return 1.0
        for module in self.modules:
            if module not in backbone.linears:
                known = ", ".join(backbone.linears)
                raise PlanningError(f"modules: {module!r} is no linear of the backbone: {known}")
        width = sum(sum(backbone.linears[module]) for module in self.modules)
        return width / backbone.adapter_width

    def parameters(self, backbone: BackboneSize) -> int:
        """Returns the number of adapter parameters of all slots and layers, padding to `rank`
        included.

        Args:
          backbone: sizes of the backbone.

        Raises:
          PlanningError: the backbone has no linear of a module path in `modules`.
        """
        width = round(self.share(backbone) * backbone.adapter_width)
        of_slot = backbone.layers * self.rank * width + sum(kind.trained for kind in self.others)
        return self.slots * of_slot

    def state_bytes(self, backbone: BackboneSize) -> int:
        """Returns the bytes of the train state of all slots and layers together.

        The train state holds, all in float32, the adapter parameters, their accumulated gradients
        and the optimizer's moments.

        Args:
          backbone: sizes of the backbone.

        Raises:
          PlanningError: as for `stage_bytes`.
        """
        (everything,) = self.stage_bytes(backbone, [backbone.layers])
        return everything

    def stage_bytes(self, backbone: BackboneSize, layers: Sequence[int], tp: int = 1) -> list[int]:
        """Returns the bytes of the train state of all slots on one device of every stage of a
        pipeline.

        Tensor-parallel devices divide the output side of column-parallel linears and the input side
        of row-parallel ones, and each has the other factor whole. The arrays of other adapter kinds
        are counted whole.

        Args:
          backbone: sizes of the backbone.
          layers: number of layers of each stage, in order.
          tp: number of tensor-parallel devices of a stage.

        Raises:
          PlanningError: the kind of optimizer is unknown, or the backbone has no linear of a module
            path in `modules`.
        """
        if self.optimizer not in OPTIMIZERS:
            known = ", ".join(OPTIMIZERS)
            raise PlanningError(f"optimizer: unknown kind {self.optimizer!r}; known: {known}")
        copies = 2 + OPTIMIZERS[self.optimizer].moments
        factors = self._factors(backbone, tp)
        of_layers, whole, of_ends = copies * factors, 0, {0: 0, len(layers) - 1: 0}
        for kind in self.others:
            for point in kind.points:
                values = self.slots * (
                    copies * (point.trained_per_rank * kind.rank + point.trained)
                    + (point.frozen_per_rank * kind.rank + point.frozen)
                )
                everywhere = self.slots * (point.whole_per_rank * kind.rank + point.whole)
                whole += everywhere
                if point.end is None:
                    of_layers += values - everywhere
                else:
                    of_ends[range(len(layers))[point.end]] += values
        return [
            _FLOAT32 * (of_layers * count // backbone.layers + whole + of_ends.get(stage, 0))
            for stage, count in enumerate(layers)
        ]

    def _factors(self, backbone: BackboneSize, tp: int) -> int:
        """Returns the values of all LoRA factors on one of the tensor-parallel devices."""
        everything = self._replace(others=()).parameters(backbone)
        if tp == 1:
            return everything
        modules = backbone.linears if self.modules is None else self.modules
        whole = sum(backbone.linears[module][module.endswith(_ROW_PARALLEL)] for module in modules)
        whole *= self.slots * backbone.layers * self.rank
        return whole + (everything - whole) // tp


def refuse_stages(pools: Mapping[str, PoolSpec], stages: int, parts: int | None = None) -> None:
    """Checks that a pipeline can train tasks: what changes the embedding and the head together is
    one array, and these lie on its first and its last stage.

    Args:
      pools: by what needs it, such as "task 'a'", a pool.
      stages: number of stages.
      parts: number of parts of the backbone, which is larger if stages have several; None for one
        part a stage.

    Raises:
      PlanningError: a pool cannot be trained with so many stages.
    """
    for what, pool in pools.items():
        if (parts or stages) > 1 and any(
            p.at_both_ends for kind in pool.others for p in kind.points
        ):
            raise PlanningError(
                f"{what}: the adapter changes the backbone's embedding and its head, which are one "
                f"table (tie_word_embeddings), but of {numbered(stages, 'stage')} of a pipeline "
                "the first has the embedding and the last the head; use a mesh with pp=1"
            )


def merge_pool_specs(pools: Sequence[PoolSpec], least: PoolSpec | None = None) -> PoolSpec:
    """Returns the sizes of one pool (stacked adapters) that holds several tasks together.

    Its number of slots (places of tasks) is the sum of those of `pools`. Its rank is the highest
    rank, it adapts every linear that any task adapts, and it has dropout if any task has. Its
    optimizer is the kind in `pools` with the most moments (state values per adapter parameter).

    Args:
      pools: for each task, the pool that the task needs alone (`PreparedTask.pool`). It may be
        empty only if `least` is given.
      least: a pool whose slots, rank, linears and dropout the result provides at least; None for no
        such minimum. Its optimizer counts only if `pools` is empty.
    """
    everything = [*pools, *([least] if least else [])]
    modules = dict.fromkeys(module for pool in everything for module in pool.modules or ())
    return PoolSpec(
        slots=max(sum(pool.slots for pool in pools), least.slots if least else 0),
        rank=max(pool.rank for pool in everything),
        modules=None if any(pool.modules is None for pool in everything) else tuple(modules),
        dropout=any(pool.dropout for pool in everything),
        optimizer=max((pool.optimizer for pool in pools or everything), key=_moments),
        others=_merged_kinds([kind for pool in everything for kind in pool.others]),
    )


def _merged_kinds(sizes: Sequence[KindSize]) -> tuple[KindSize, ...]:
    """For each kind, the largest rank and all points."""
    merged: dict[str, KindSize] = {}
    for size in sizes:
        before = merged.get(size.kind, size)
        points = {point.point: point for point in (*before.points, *size.points)}
        ordered = tuple(points[name] for name in sorted(points))
        merged[size.kind] = KindSize(size.kind, max(before.rank, size.rank), ordered)
    return tuple(merged[name] for name in sorted(merged))


def _moments(optimizer: str) -> tuple[int, str]:
    return OPTIMIZERS[optimizer].moments if optimizer in OPTIMIZERS else 0, optimizer
