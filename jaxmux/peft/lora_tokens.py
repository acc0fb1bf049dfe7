"""LoRA of linears, together with trained tokens (PEFT's `trainable_token_indices`).

The factors of the linears lie in the pool of LoRA, and their scales in the pool of this kind, as
with `lora_pattern`. The rows of the tokens are stored as in `trained_tokens`.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxmux.data import Sample
from jaxmux.models import BackboneConfig
from jaxmux.models.adapter_ops import EMBEDDING, OUTSIDE, SCALE
from jaxmux.planner.costs.pool_spec import PointWork

from . import lora_folder
from .kind import AdapterKind, BaseTensors, Changes
from .lora import LoRA, as_stored, initial_adapter, lora_targets
from .lora_pattern import factors_of, rates_by_name, scale_leaf, with_scales
from .targets import PREFIX, LayerMask, linears_of
from .trained_tokens import TOKENS_TENSOR, Rows, TrainedTokens, trained_tokens_kind

_TENSOR = f"{PREFIX}model.{EMBEDDING}.token_adapter.trainable_tokens_delta"


class _RowsAndScales(Rows):
    """Adds rows to embeddings, and gives the scales to the fused products."""

    low_rank = True


def _parts(spec: LoRA) -> tuple[LoRA, TrainedTokens]:
    """The specification of the linears alone, and that of the tokens alone."""
    tokens = TrainedTokens(spec.trained_tokens)
    return dataclasses.replace(spec, trained_tokens=()), tokens


def _divided(points: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divides values by point into those of linears and those of tokens."""
    linears = linears_of(points)
    return linears, {point: value for point, value in points.items() if point not in linears}


def _targets(spec: LoRA, config: BackboneConfig) -> dict[str, LayerMask]:
    linears, tokens = _parts(spec)
    try:
        rows = trained_tokens_kind.targets(tokens, config)
    except ValueError as e:
        raise ValueError(str(e).replace("indices", "trained_tokens")) from None
    return lora_targets(linears, config) | rows


def _leaves(config: BackboneConfig, points: Sequence[str], slots: int, rank: int) -> dict[str, Any]:
    tables = [point for point in points if point in OUTSIDE]
    scales = {point: {SCALE: scale_leaf(config, slots)} for point in points if point not in tables}
    return scales | trained_tokens_kind.leaves(config, tables, slots, rank)


def _initial(
    spec: LoRA,
    targets: Mapping[str, LayerMask],
    config: BackboneConfig,
    seed: int,
    base: BaseTensors | None,
    samples: Iterable[Sample] | None = None,
) -> dict[str, Any]:
    (linears, tokens), (modules, rows) = _parts(spec), _divided(targets)
    factors = initial_adapter(linears, modules, config, seed, base, samples)
    first = trained_tokens_kind.initial(tokens, rows, config, seed, base)
    return with_scales(linears, factors, modules) | first


def _rates(spec: LoRA, targets: Mapping[str, LayerMask]) -> dict[str, Any]:
    (linears, tokens), (modules, rows) = _parts(spec), _divided(targets)
    return rates_by_name(linears, modules) | trained_tokens_kind.relative_rates(tokens, rows)


def _recognise(settings: Mapping[str, Any]) -> bool:
    is_low_rank = lora_folder.is_low_rank(settings) and not settings.get("use_dora")
    return is_low_rank and bool(settings.get("trainable_token_indices"))


def _settings(spec: LoRA, config: BackboneConfig, serving: bool) -> dict[str, Any]:
    values = lora_folder.settings(_parts(spec)[0], config, serving)
    return values | {"trainable_token_indices": list(spec.trained_tokens)}


def token_indices(settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """The ids of the trained tokens in an adapter_config.json, unchecked; empty if there are none.
    Raises ValueError if they are not a list, or if tokens of other tables than the embedding are
    trained."""
    tokens = setting = settings.get("trainable_token_indices") or []
    if isinstance(setting, Mapping) and [name.split(".")[-1] for name in setting] == [EMBEDDING]:
        (tokens,) = setting.values()
    if not isinstance(tokens, list | tuple):
        raise ValueError(
            f"trainable_token_indices={setting!r} is not supported; expected a list of tokens of "
            f"{EMBEDDING!r} only"
        )
    return tuple(tokens)


def _from_settings(settings: Mapping[str, Any], config: BackboneConfig) -> LoRA:
    others = lora_folder.from_settings({**settings, "trainable_token_indices": None}, config)
    spec = dataclasses.replace(others, trained_tokens=token_indices(settings))
    _targets(spec, config)
    return spec


def _tensors(
    spec: LoRA, adapter: Any, config: BackboneConfig, serving: bool, base: BaseTensors | None
) -> dict[str, np.ndarray]:
    (linears, tokens), (of_linears, rows) = _parts(spec), _divided(adapter)
    by_name = lora_folder.tensors(linears, factors_of(of_linears), config, serving, base)
    of_tokens = trained_tokens_kind.tensors(tokens, rows, config, serving, base)
    return by_name | {_TENSOR: of_tokens[TOKENS_TENSOR]}


def _from_tensors(
    spec: LoRA, tensors: dict[str, np.ndarray], config: BackboneConfig, base: BaseTensors | None
) -> dict[str, Any]:
    linears, tokens = _parts(spec)
    factors = lora_folder.from_tensors(linears, tensors, config, base)
    if _TENSOR not in tensors:
        raise ValueError(f"tensor {_TENSOR} is missing")
    of_tokens = {TOKENS_TENSOR: tensors.pop(_TENSOR)}
    rows = trained_tokens_kind.from_tensors(tokens, of_tokens, config, base)
    return with_scales(linears, factors, lora_targets(linears, config)) | rows


def _merged(spec: LoRA, adapter: Any, config: BackboneConfig) -> Changes:
    (linears, tokens), (of_linears, rows) = _parts(spec), _divided(adapter)
    changes = lora_folder.merged(linears, factors_of(of_linears), config)
    return {**changes, **trained_tokens_kind.merged(tokens, rows, config)}


def _work(config: BackboneConfig, point: str, rank: int) -> PointWork:
    d = config.hidden_size
    return PointWork(2 * rank * d, 3 * d) if point in OUTSIDE else PointWork(0, 0)


lora_tokens_kind = AdapterKind(
    "lora_tokens",
    specification=LoRA,
    op=_RowsAndScales(),
    targets=_targets,
    leaves=_leaves,
    initial=_initial,
    relative_rates=_rates,
    recognise=_recognise,
    settings=_settings,
    from_settings=_from_settings,
    tensors=_tensors,
    from_tensors=_from_tensors,
    identity=("rank", "alpha", "rslora", "rank_pattern", "alpha_pattern", "trained_tokens"),
    rank=lambda spec: len(spec.trained_tokens),
    size_field="trained_tokens",
    factor_rank=lambda spec: spec.largest_rank,
    serves=lambda spec: bool(spec.trained_tokens),
    merged=_merged,
    work=_work,
    as_stored=as_stored,
    reads_samples=True,
)
