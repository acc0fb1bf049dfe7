"""The sizes of a pool, which determine the compiled programs and the costs."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxmux.optimizers import OPTIMIZERS

from ..errors import PlanningError
from ..numbers import numbered
from .device_profile import BackboneSize

_FLOAT32 = 4
# Last components of the paths of the linears whose input tensor parallelism divides. Repeated from
# `models.weight_sharding`, because that module imports device code.
_ROW_PARALLEL = ("o_proj", "down_proj")


class PointWork(NamedTuple):
    """Work of a kind's adapters at one point of the backbone, for one token in the forward passes
    of all layers. The backward passes take twice as much. `moved` is the number of stream values
    that are read or written. `kept` is the number of values that layers keep for their backward
    passes under every remat policy but "full"."""

    flops: int
    moved: int
    kept: int = 0


class PointSize(NamedTuple):
    """Sizes of the adapters of one kind at one point of the backbone. `trained` and `frozen` are
    numbers of values for one slot and all layers; the work is that of one token, as in `PointWork`.
    A quantity is the field without the ending `_per_rank`, plus the rank times the field with this
    ending.

    Attributes:
      at_head: whether the adapters change logits. Then every chunk of a microbatch has a copy of
        its task's values and of their gradients, from its forward to its backward pass.
      at_both_ends: whether the adapters change both the input of the first layer and the logits.
      whole: number of frozen values that belong to no layer, so that every stage of a pipeline has
        them.
      end: index of the one stage of a pipeline that has all values, 0 or -1; None if the stages
        divide the values.
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
    """Sizes of a pool's arrays for one adapter kind other than LoRA. All adapters of the kind are
    padded to `rank`; the numbers of values include this padding."""

    kind: str
    rank: int
    points: tuple[PointSize, ...]

    @property
    def trained(self) -> int:
        return sum(p.trained_per_rank * self.rank + p.trained for p in self.points)

    @property
    def frozen(self) -> int:
        return sum(p.frozen_per_rank * self.rank + p.frozen for p in self.points)

    @property
    def at_head(self) -> int:
        """Number of values per slot that change logits."""
        at_head = self._replace(points=tuple(p for p in self.points if p.at_head))
        return at_head.trained + at_head.frozen

    @property
    def work(self) -> PointWork:
        return PointWork(
            sum(p.flops_per_rank * self.rank + p.flops for p in self.points),
            sum(p.moved for p in self.points),
            sum(p.kept_per_rank * self.rank + p.kept for p in self.points),
        )


class PoolSpec(NamedTuple):
    """Sizes of a pool: the stacked adapters of several tasks, their gradients and optimizer state.

    Attributes:
      slots: T, number of slots, the most tasks that train at the same time.
      rank: R, the rank to which the LoRA adapters of all slots are zero-padded.
      modules: module paths of the linears that carry a LoRA adapter, for example
        "self_attn.q_proj". None means all linears of the backbone, an empty tuple none.
      dropout: whether any task applies dropout to the input of its adapter.
      optimizer: of the tasks' optimizers, the one with the most moments; the pool has memory for
        it.
      others: the arrays of adapter kinds other than LoRA.
    """

    slots: int
    rank: int
    modules: tuple[str, ...] | None = None
    dropout: bool = False
    optimizer: str = "adamw"
    others: tuple[KindSize, ...] = ()

    @property
    def largest_rank(self) -> int:
        """The largest rank that an adapter of any kind may have in the pool; 0 if no array's size
        depends on a rank."""
        ranks = [
            kind.rank
            for kind in self.others
            if any(p.trained_per_rank or p.frozen_per_rank for p in kind.points)
        ]
        return max(ranks + [self.rank] * (self.modules != ()), default=0)

    def share(self, backbone: BackboneSize) -> float:
        """Returns the number of the pool's LoRA parameters as a fraction of the number if every
        linear were adapted."""
        if self.modules is None:
            return 1.0
        for module in self.modules:
            if module not in backbone.linears:
                known = ", ".join(backbone.linears)
                raise PlanningError(f"modules: {module!r} is no linear of the backbone: {known}")
        width = sum(sum(backbone.linears[module]) for module in self.modules)
        return width / backbone.adapter_width

    def parameters(self, backbone: BackboneSize) -> int:
        """Returns the number of trained parameters of all slots and layers, padding included."""
        width = round(self.share(backbone) * backbone.adapter_width)
        of_slot = backbone.layers * self.rank * width + sum(kind.trained for kind in self.others)
        return self.slots * of_slot

    def state_bytes(self, backbone: BackboneSize) -> int:
        """Returns the bytes of the train state of all slots and layers together."""
        (everything,) = self.stage_bytes(backbone, [backbone.layers])
        return everything

    def stage_bytes(self, backbone: BackboneSize, layers: Sequence[int], tp: int = 1) -> list[int]:
        """Returns, for each stage of a pipeline, the bytes of the train state of all slots on one
        device. The train state is the trained parameters, their accumulated gradients and the
        optimizer's moments, all in float32. Tensor-parallel devices divide the output side of
        column-parallel linears and the input side of row-parallel linears; each device has all
        other arrays whole."""
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
        """Number of values of all LoRA factors on one tensor-parallel device."""
        everything = self._replace(others=()).parameters(backbone)
        if tp == 1:
            return everything
        modules = backbone.linears if self.modules is None else self.modules
        whole = sum(backbone.linears[module][module.endswith(_ROW_PARALLEL)] for module in modules)
        whole *= self.slots * backbone.layers * self.rank
        return whole + (everything - whole) // tp


def refuse_stages(pools: Mapping[str, PoolSpec], stages: int, parts: int | None = None) -> None:
    """Raises PlanningError if a pipeline cannot train a pool. This is so if one array of an adapter
    changes both the embedding and the head, because these lie on the first and the last stage.
    `parts` is the number of parts of the backbone, if stages have several."""
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
    """Returns the sizes of one pool that holds several tasks together. Its slots, rank, linears and
    dropout are at least those of `least`."""
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
    """For each kind, the largest rank and the points of all pools."""
    merged: dict[str, KindSize] = {}
    for size in sizes:
        before = merged.get(size.kind, size)
        points = {point.point: point for point in (*before.points, *size.points)}
        ordered = tuple(points[name] for name in sorted(points))
        merged[size.kind] = KindSize(size.kind, max(before.rank, size.rank), ordered)
    return tuple(merged[name] for name in sorted(merged))


def _moments(optimizer: str) -> tuple[int, str]:
    return OPTIMIZERS[optimizer].moments if optimizer in OPTIMIZERS else 0, optimizer
