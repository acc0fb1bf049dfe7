"""The peak memory of a step: MuxTune's model (Eq. 5) for what can be counted, mLoRA's online fit
(Eq. 5) for the rest. Decides whether tasks are admitted.

  M_stage = [M_b + Σ M_g] / S + Σ M_a(b, l)                                  (MuxTune)

M_b are the weights. M_g is what each task's adapters take: masters, accumulators, moments. M_a is
what layers keep for the backward pass, which is counted too, and what a pass needs while it runs:
temporaries, workspaces, blocks of logits. Where S does not divide the layers, a stage is one of
those with a layer more. Only what a pass needs is learnt, for rows of one sequence, as

  Mem = β0 + β1 · B · L + β2 · B · L²                                        (mLoRA)

over B rows of L tokens, by non-negative least squares; first from the profile, then from each
peak that is observed.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .online_fit import OnlineFit
from .pool import Pool
from .profile import (
    AttentionPoint,
    BackboneSize,
    HeadPoint,
    LayerPoint,
    Profile,
    ProfileError,
)
from .remat_choice import USABLE, fill_stages, keeps_attention, split_stages, working_bytes
from .shape_class import PlanningError, ShapeClass, numbered
from .time_model import Pipeline

# One observed step says more than a program of a few layers.
_PROFILE_WEIGHT = 0.01
# What attention is counted to need may be so much too little.
_SLACK = 1.05


class Placement(NamedTuple):
    """How the backbone is spread over devices.

    Attributes:
      stages: S, of the pipeline; they share the layers as `time_model.Pipeline` does, and what lies
        outside the layers in equal parts.
      tp: devices that share each stage's weights and adapters.
      in_flight: microbatches whose kept values a stage holds at once; S in 1F1B.
    """

    stages: int = 1
    tp: int = 1
    in_flight: int = 1


ONE_DEVICE = Placement()


@dataclasses.dataclass(frozen=True)
class MemoryModel:
    """A fitted memory model; `fit_memory_model` makes one. All sizes in bytes, of one device.

    Attributes:
      backbone: that was profiled.
      memory: that there is.
      working: the online fit of what a pass needs beyond what is counted.
      packed_from: shortest rows in which attention takes memory for each seat (`PackedBytes`);
        infinite where it does not.
    """

    backbone: BackboneSize
    memory: int
    working: OnlineFit
    packed_from: float

    @functools.cached_property
    def _coefficients(self) -> np.ndarray:
        return self.working.coefficients()

    def resident(self, pool: Pool, placement: Placement = ONE_DEVICE) -> float:
        """[M_b + Σ M_g] / S, weights and train state, on a stage with the most layers."""
        size = self.backbone
        of_layer = size.layer_bytes + pool.state_bytes(size) / size.layers
        fullest = max(self._stage_layers(placement))
        return (fullest * of_layer + size.outside_bytes / placement.stages) / placement.tp

    def kept(self, tokens: int, rank: int, remat: str, tp: int = 1) -> float:
        """What one layer keeps for its backward pass of `tokens` tokens, on each of `tp` devices:
        all of the stream, before and behind attention, of its norms and of the adapters' rank-r
        values, and their part of all else, which lies between column- and row-parallel linears.

        Raises:
          ProfileError: the profile knows no such policy.
        """
        if remat not in self.backbone.kept:
            known = ", ".join(self.backbone.kept)
            raise ProfileError(f"the profile counts no remat policy {remat!r}; known: {known}")
        of_token, of_rank = self.backbone.kept[remat]
        # "norms" keeps besides what "dots" keeps the inputs of column-parallel linears.
        without_norms = min(of_token, self.backbone.kept.get("dots", (of_token, 0.0))[0])
        stream = min(without_norms, 2 * self.backbone.hidden_size * self.backbone.stream_bytes)
        whole = stream + of_token - without_norms
        return tokens * (whole + (of_token - whole) / tp + rank * of_rank)

    def peak(
        self,
        shape: ShapeClass,
        pool: Pool,
        remat: str | Sequence[str] | None = None,
        placement: Placement = ONE_DEVICE,
    ) -> float:
        """M_stage, peak memory of a step on the stage that needs most.

        Args:
          remat: policy of all layers, or of each; None for those that the engine picks.
        """
        counted = self._counted(shape, pool, remat, placement)
        return counted + max(self._packed(shape, placement), self._learnt(shape))

    def policies(
        self, shape: ShapeClass, pool: Pool, placement: Placement = ONE_DEVICE
    ) -> tuple[str, ...]:
        """The remat policy of every layer that the engine's "auto" picks: the one that recomputes
        less for as many layers of a stage as there is room for, and the same in every stage."""
        sizes = {r: self._of_layer(shape, pool, r, placement) for r in self.backbone.kept}
        packed = self._packed(shape, placement)
        working = working_bytes(sizes, self.backbone.head_block_bytes, packed)
        room = USABLE * self.memory - self.resident(pool, placement) - working
        return fill_stages(sizes, self._stage_layers(placement), room / placement.in_flight)

    def fits(self, shape: ShapeClass, pool: Pool, placement: Placement = ONE_DEVICE) -> bool:
        """Whether a step fits into memory if layers recompute all that they can."""
        least = list(self.backbone.kept)[-1]
        return self.peak(shape, pool, least, placement) <= USABLE * self.memory

    def require(
        self,
        shape: ShapeClass,
        pool: Pool,
        placement: Placement = ONE_DEVICE,
        mesh_may_grow: bool = True,
    ) -> None:
        """Checks that a step fits.

        Args:
          mesh_may_grow: whether more pipeline stages are among the changes that are named.

        Raises:
          PlanningError: it does not; the message says what it needs, and of everything that could
            be changed alone, the smallest change that would make it fit.
        """
        if self.fits(shape, pool, placement):
            return
        needed = self.peak(shape, pool, list(self.backbone.kept)[-1], placement)
        changes = " or ".join(self._changes(shape, pool, placement, mesh_may_grow))
        raise PlanningError(
            f"a step of {numbered(pool.slots, 'slot')} of rank {pool.rank} with {shape.tokens} "
            f"tokens a microbatch needs {_shown(needed)}, usable are "
            f"{_shown(USABLE * self.memory)} of {_shown(self.memory)}; it would fit with "
            + (changes or "no single change of slots, rank or tokens")
        )

    def observe(
        self, shape: ShapeClass, pool: Pool, remat: str | Sequence[str], peak_bytes: int
    ) -> "MemoryModel":
        """The model after a step on one device was seen to need `peak_bytes` at most."""
        beyond = peak_bytes - self._counted(shape, pool, remat, ONE_DEVICE)
        if max(beyond, self._learnt(shape)) <= _SLACK * self._packed(shape, ONE_DEVICE):
            # It was attention that needed most, and says nothing of all else.
            return self
        working = self.working.observe(_features(shape), max(0.0, beyond))
        return dataclasses.replace(self, working=working)

    def _learnt(self, shape: ShapeClass) -> float:
        """What a pass needs, by the online fit."""
        return float(self._coefficients @ _features(shape))

    def _counted(self, shape, pool, remat, placement) -> float:
        layers = self.backbone.layers
        if remat is None:
            remat = self.policies(shape, pool, placement)
        policies = (remat,) * layers if isinstance(remat, str) else remat
        of_layer = {r: self._of_layer(shape, pool, r, placement) for r in set(policies)}
        stages = split_stages(policies, self._stage_layers(placement))
        kept = max(sum(of_layer[policy] for policy in stage) for stage in stages)
        return self.resident(pool, placement) + placement.in_flight * kept

    def _of_layer(self, shape: ShapeClass, pool: Pool, remat: str, placement: Placement) -> float:
        """What one layer keeps, attention in rows of several sequences included."""
        kept = self.kept(shape.tokens, pool.rank, remat, placement.tp)
        packed = self.backbone.packed.kept_by(shape.tokens, self._seats(shape)) / placement.tp
        return kept + packed * keeps_attention(remat)

    def _packed(self, shape: ShapeClass, placement: Placement) -> float:
        """What attention needs in rows of several sequences while a layer goes backward."""
        needed = self.backbone.packed.needed_by(shape.tokens, self._seats(shape))
        return needed / placement.tp

    def _seats(self, shape: ShapeClass) -> int:
        """Of a row, those that attention takes memory for."""
        return shape.max_sequences if shape.row_len >= self.packed_from else 1

    def _stage_layers(self, placement: Placement) -> list[int]:
        return Pipeline(placement.stages).layers(self.backbone.layers)

    def _changes(
        self, shape: ShapeClass, pool: Pool, placement: Placement, mesh_may_grow: bool
    ) -> list[str]:
        """For each of slots, rank, tokens and stages, its value nearest to now that fits."""
        unit = max(1, shape.chunk_len // shape.row_len)
        shapes = [dataclasses.replace(shape, rows=r) for r in range(unit, shape.rows, unit)]
        tokens = [s.tokens for s in shapes if self.fits(s, pool, placement)]
        pools = [pool._replace(slots=t) for t in range(1, pool.slots)]
        slots = [p.slots for p in pools if self.fits(shape, p, placement)]
        pools = [pool._replace(rank=r) for r in range(1, pool.rank)]
        ranks = [p.rank for p in pools if self.fits(shape, p, placement)]
        deeper = range(placement.stages + 1, mesh_may_grow * self.backbone.layers + 1)
        placements = (placement._replace(stages=s) for s in deeper)
        stages = next((p.stages for p in placements if self.fits(shape, pool, p)), None)
        return [
            *([f"at most {numbered(max(slots), 'slot')}"] if slots else []),
            *([f"ranks of at most {max(ranks)}"] if ranks else []),
            *([f"at most {max(tokens)} tokens a microbatch"] if tokens else []),
            *([f"{stages} pipeline stages"] if stages else []),
        ]


def fit_memory_model(profile: Profile, memory: int | None = None) -> MemoryModel:
    """The memory model of the profiled backbone and device.

    Args:
      memory: bytes of a device; None for what the profile says.

    Raises:
      ProfileError: the profile does not know the memory, or no peak of an adapted layer.
    """
    memory = memory or profile.memory_bytes
    if not memory:
        raise ProfileError(
            f"memory_bytes is null in the profile of {profile.device}: give the memory of a device"
        )
    model = MemoryModel(
        profile.backbone, memory, OnlineFit.of_features(3), _shortest_packed_rows(profile)
    )
    heads = {
        point.tokens: peak
        for point, _, peak in profile.measurements
        if isinstance(point, HeadPoint) and peak
    }
    working = model.working
    for point, _, peak in profile.measurements:
        if not isinstance(point, LayerPoint) or not (point.rank and point.backward and peak):
            continue
        beyond = peak - point.layers * model.kept(point.tokens, point.rank, point.remat)
        needed = max(beyond, heads.get(point.tokens, 0), 0)
        features = _row_features(point.tokens, point.row_len)
        working = working.observe(features, needed, _PROFILE_WEIGHT)
    if not working.observations:
        raise ProfileError("the profile measures no peak_bytes of an adapted layer")
    return dataclasses.replace(model, working=working)


def _shortest_packed_rows(profile: Profile) -> float:
    """The shortest rows in which each seat may take attention memory: those next to the longest
    measured ones in which it did not. Infinite if it never did."""
    peaks = {p: peak for p, _, peak in profile.measurements if isinstance(p, AttentionPoint)}
    taken: dict[int, bool] = {}
    for point, peak in peaks.items():
        one = peaks.get(dataclasses.replace(point, max_sequences=1))
        seats = profile.backbone.packed.needed_by(point.tokens, point.max_sequences)
        if point.backward and seats and peak and one:
            taken[point.row_len] = peak - one > seats / 2
    if not any(taken.values()):
        return math.inf
    shortest = min(row_len for row_len, took in taken.items() if took)
    without = [row_len for row_len in taken if row_len < shortest]
    return min(shortest, 2 * max(without)) if without else shortest


def _shown(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _features(shape: ShapeClass) -> np.ndarray:
    return _row_features(shape.tokens, shape.row_len)


def _row_features(tokens: int, row_len: int) -> np.ndarray:
    """1, B · L and B · L²."""
    return np.array([1.0, tokens, tokens * row_len])
