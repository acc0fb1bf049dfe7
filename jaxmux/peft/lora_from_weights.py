"""LoRA whose initial factors are parts of the adapted weights (PiSSA, OLoRA).

PEFT subtracts the initial product A0 B0 from the weights. Here tasks share the weights, so A0 B0 is
subtracted from the adapter's product instead, which then has twice the ranks: `A B - A0 B0 = A (B -
B0) + (A - A0) B0`. Both sums are small while A and B are near their initial values, so low
precision is enough.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxmux.models import BackboneConfig, linear_sizes
from jaxmux.models.adapter_ops import AdapterOp
from jaxmux.pallas_kernels.grouped_lora import Factors
from jaxmux.planner.costs.pool_spec import PointWork

from . import lora_folder
from .kind import AdapterKind, BaseTensors, Changes, base_values
from .lora import Adapter, LoRA, lora_targets, ranks_and_scales
from .lora_pattern import factors_of, rates_by_name, scale_leaves, with_scales
from .remembered import remembered
from .targets import LayerMask, full_name
from .weight_parts import approximate_principal_part, orthonormal_part, principal_part


class _Pairs(AdapterOp):
    """Marks the ranks as pairs and gives the scales to the fused products; changes nothing else."""

    low_rank = True
    paired_ranks = True


def _targets(spec: LoRA, config: BackboneConfig) -> dict[str, LayerMask]:
    targets = lora_targets(spec, config)
    for module, mask in targets.items():
        ranks, _ = ranks_and_scales(spec, module, config.num_layers)
        largest, narrow = int(ranks[mask].max()), min(linear_sizes(config, module))
        if largest > narrow:
            raise ValueError(
                f"rank is {largest}, but with initialisation {spec.initialisation!r} that of "
                f"{module} is at most its smaller width, {narrow}"
            )
    return targets


def _initial(
    spec: LoRA,
    targets: Mapping[str, LayerMask],
    config: BackboneConfig,
    seed: int,
    base: BaseTensors | None,
) -> dict[str, Any]:
    adapter = {}
    for module, mask in targets.items():
        (k, n), layers = linear_sizes(config, module), config.num_layers
        ranks, scales = ranks_and_scales(spec, module, layers)
        a = np.zeros((layers, k, 2 * spec.largest_rank), np.float32)
        b = np.zeros((layers, 2 * spec.largest_rank, n), np.float32)
        for layer in np.flatnonzero(mask).tolist():
            rng = np.random.default_rng([seed, zlib.crc32(module.encode()), layer])
            rank, name = int(ranks[layer]), f"{full_name(module, layer)}.weight"
            part = _part_of(spec.initialisation, base, name, rank, rng)
            # PiSSA decomposes scale · A B, so each factor is divided by the root of the scale.
            root = 1.0 if spec.initialisation == "olora" else math.sqrt(scales[layer])
            # A equals A0 and B equals B0, so both differences are zero.
            a[layer, :, 0 : 2 * rank : 2] = part.a / root
            b[layer, 1 : 2 * rank : 2] = part.b / root
        adapter[module] = Factors(a, b)
    return with_scales(spec, adapter, targets)


def _part_of(
    initialisation: str,
    base: BaseTensors | None,
    name: str,
    rank: int,
    rng: np.random.Generator,
) -> Factors:
    """The part of a weight with which the factors begin, before PiSSA divides it by the scale."""
    weight = base_values(base, name)
    if initialisation == "olora":
        return orthonormal_part(weight, rank)
    if initialisation == "pissa":
        return remembered(base, (name, rank), lambda: principal_part(weight, rank))
    iterations = int(initialisation.removeprefix("pissa_niter_"))
    return approximate_principal_part(weight, rank, iterations, rng)


def _as_lora(spec: LoRA) -> LoRA:
    """The LoRA that computes the same as the adapter: it has twice the ranks, and the same
    scales."""
    factor = math.sqrt(2) if spec.rslora else 2
    return dataclasses.replace(
        spec,
        rank=2 * spec.rank,
        alpha=factor * spec.alpha,
        initialisation="kaiming",
        rank_pattern=tuple((name, 2 * rank) for name, rank in spec.rank_pattern),
        alpha_pattern=tuple((name, factor * alpha) for name, alpha in spec.alpha_pattern),
    )


def _reordered(spec: LoRA, adapter: Adapter, order: Callable[[int], np.ndarray]) -> Adapter:
    """The factors with their ranks in another order. `order` takes the rank r of a linear and
    returns the old numbers of its 2 r ranks in the new order."""
    reordered = {}
    for module, (a, b) in adapter.items():
        a, b = a.copy(), b.copy()
        for layer, rank in enumerate(ranks_and_scales(spec, module, len(a))[0].tolist()):
            numbers = order(rank)
            a[layer, :, : 2 * rank] = a[layer][:, numbers]
            b[layer, : 2 * rank] = b[layer, numbers]
        reordered[module] = Factors(a, b)
    return reordered


def _halves(rank: int) -> np.ndarray:
    """The even ranks, then the odd ranks."""
    return np.arange(2 * rank).reshape(rank, 2).T.reshape(-1)


def _pairs(rank: int) -> np.ndarray:
    """The inverse of `_halves`."""
    return np.arange(2 * rank).reshape(2, rank).T.reshape(-1)


def _settings(spec: LoRA, config: BackboneConfig, serving: bool) -> dict[str, Any]:
    return lora_folder.settings(_as_lora(spec), config, serving)


def _tensors(
    spec: LoRA, adapter: Any, config: BackboneConfig, serving: bool, base: BaseTensors | None
) -> dict[str, np.ndarray]:
    """The tensors of a LoRA with the factors [A, A - A0] and [B - B0, B0]."""
    factors = _reordered(spec, factors_of(adapter), _halves)
    return lora_folder.tensors(_as_lora(spec), factors, config, serving, base)


def _from_tensors(
    spec: LoRA, tensors: dict[str, np.ndarray], config: BackboneConfig, base: BaseTensors | None
) -> dict[str, Any]:
    factors = lora_folder.from_tensors(_as_lora(spec), tensors, config, base)
    return with_scales(spec, _reordered(spec, factors, _pairs), _targets(spec, config))


def _merged(spec: LoRA, adapter: Any, config: BackboneConfig) -> Changes:
    return lora_folder.merged(_as_lora(spec), factors_of(adapter), config)


lora_from_weights_kind = AdapterKind(
    "lora_from_weights",
    specification=LoRA,
    op=_Pairs(),
    targets=_targets,
    leaves=scale_leaves,
    initial=_initial,
    relative_rates=rates_by_name,
    # Its folders hold LoRAs of twice the rank, and are read as such.
    recognise=lambda settings: False,
    settings=_settings,
    from_settings=lora_folder.from_settings,
    tensors=_tensors,
    from_tensors=_from_tensors,
    rank=lambda spec: 2 * spec.largest_rank,
    serves=lambda spec: spec.begins_at_weight and not spec.adapts_tables,
    merged=_merged,
    work=lambda config, point, rank: PointWork(0, 0),
    as_stored=_as_lora,
)
