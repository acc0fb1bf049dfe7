"""LoRA whose linears have different ranks and scales (`rank_pattern`, `alpha_pattern`).

The fused product takes one scale for each task. If the linears of a task have different scales,
these lie in a separate pool. The factors lie in LoRA's pool, as for every kind with low-rank
factors.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxmux.data import Sample
from jaxmux.models import BackboneConfig
from jaxmux.models.adapter_ops import SCALE, AdapterOp
from jaxmux.pallas_kernels.grouped_lora import Factors
from jaxmux.planner.costs.pool_spec import PointWork

from . import lora_folder
from .kind import AdapterKind, BaseTensors, Changes
from .leaves import LeafSpec
from .lora import (
    Adapter,
    LoRA,
    as_stored,
    initial_adapter,
    lora_targets,
    ranks_and_scales,
    relative_rates,
)
from .targets import LayerMask, tables_among


def scale_leaf(config: BackboneConfig, slots: int) -> LeafSpec:
    """Describes the scales [L, T] of a linear, in kinds with low-rank factors."""
    return LeafSpec((config.num_layers, slots), ("layer", "slot"), trained=False)


def scales_of(spec: LoRA, module: str, mask: LayerMask) -> np.ndarray:
    """The scale of a linear in every layer, float32 [L]; 0 in layers outside `mask`."""
    _, scales = ranks_and_scales(spec, module, len(mask))
    return np.where(mask, scales, np.float32(0))


def factors_of(adapter: Any) -> Adapter:
    """The low-rank factors of an adapter whose kind also has other arrays, by linear."""
    return {module: Factors(arrays["a"], arrays["b"]) for module, arrays in adapter.items()}


class _Scales(AdapterOp):
    """Gives the scales to the fused products; changes nothing else."""

    low_rank = True


def scale_leaves(
    config: BackboneConfig, points: Sequence[str], slots: int, rank: int
) -> dict[str, Any]:
    """Describes the pool of a kind that has only scales besides factors (see
    `AdapterKind.leaves`)."""
    return {module: {SCALE: scale_leaf(config, slots)} for module in points}


def with_scales(spec: LoRA, factors: Adapter, targets: Mapping[str, LayerMask]) -> dict[str, Any]:
    return {
        module: {**factors[module]._asdict(), SCALE: scales_of(spec, module, mask)}
        for module, mask in targets.items()
    }


def _initial(
    spec: LoRA,
    targets: Mapping[str, LayerMask],
    config: BackboneConfig,
    seed: int,
    base: BaseTensors | None,
    samples: Iterable[Sample] | None = None,
) -> dict[str, Any]:
    return with_scales(spec, initial_adapter(spec, targets, config, seed, base, samples), targets)


def rates_by_name(spec: LoRA, targets: Mapping[str, LayerMask]) -> dict[str, Any]:
    return {module: factors._asdict() for module, factors in relative_rates(spec, targets).items()}


def _tensors(
    spec: LoRA, adapter: Any, config: BackboneConfig, serving: bool, base: BaseTensors | None
) -> dict[str, np.ndarray]:
    return lora_folder.tensors(spec, factors_of(adapter), config, serving, base)


def _from_tensors(
    spec: LoRA, tensors: dict[str, np.ndarray], config: BackboneConfig, base: BaseTensors | None
) -> dict[str, Any]:
    factors = lora_folder.from_tensors(spec, tensors, config, base)
    return with_scales(spec, factors, lora_targets(spec, config))


def _merged(spec: LoRA, adapter: Any, config: BackboneConfig) -> Changes:
    return lora_folder.merged(spec, factors_of(adapter), config)


lora_pattern_kind = AdapterKind(
    "lora_pattern",
    specification=LoRA,
    op=_Scales(),
    targets=lora_targets,
    leaves=scale_leaves,
    initial=_initial,
    relative_rates=rates_by_name,
    recognise=lambda settings: (
        lora_folder.is_low_rank(settings)
        and not settings.get("use_dora")
        and not lora_folder.is_plain(settings)
        and not settings.get("trainable_token_indices")
        and not tables_among(settings.get("target_modules"))
    ),
    settings=lora_folder.settings,
    from_settings=lora_folder.from_settings,
    tensors=_tensors,
    from_tensors=_from_tensors,
    identity=("rank", "alpha", "rslora", "rank_pattern", "alpha_pattern"),
    rank=lambda spec: spec.largest_rank,
    serves=lambda spec: spec.has_patterns and not spec.begins_at_weight and not spec.adapts_tables,
    merged=_merged,
    work=lambda config, point, rank: PointWork(0, 0),
    as_stored=as_stored,
    reads_samples=True,
)
