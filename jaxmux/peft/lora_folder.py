"""The folders of LoRA adapters, in the format of Hugging Face PEFT."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxmux.field_checks import why_left_out
from jaxmux.models import BackboneConfig, linear_sizes

from .kind import BaseTensors, Changes, changed_weights
from .lora import Adapter, Factors, LoRA, as_stored, lora_targets, ranks_and_scales
from .targets import (
    PREFIX,
    full_name,
    layer_tensors,
    resolve_targets,
    tables_among,
    take_tensor,
    target_names,
)

# Settings of PEFT that change the adapter's outputs and are not supported in a plain LoRA.
_NOT_SUPPORTED = (
    "use_dora",
    "use_qalora",
    "lora_bias",
    "fan_in_fan_out",
    "layers_to_transform",
    "layer_replication",
    "exclude_modules",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "use_bdlora",
)


# Initialisations for which PEFT also changes the backbone, so that the factors alone are useless.
_CHANGES_BACKBONE = re.compile(r"pissa(_niter_\d+)?|olora|corda|lora_ga")


def is_low_rank(settings: Mapping[str, Any]) -> bool:
    """Whether an adapter_config.json with these values describes a LoRA or DoRA of PEFT."""
    return settings.get("peft_type", "LORA") == "LORA" and "config" not in settings


def is_plain(settings: Mapping[str, Any]) -> bool:
    """Whether an adapter_config.json with these values describes a LoRA with one rank and one scale
    for all linears, and without other features."""
    features = ("use_dora", "rank_pattern", "alpha_pattern", "trainable_token_indices")
    present = [settings.get(key) for key in features] + tables_among(settings.get("target_modules"))
    return is_low_rank(settings) and not any(present)


def settings(spec: LoRA, config: BackboneConfig, serving: bool) -> dict[str, Any]:
    spec = as_stored(spec)
    rank = spec.largest_rank if serving else spec.rank
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank if serving else _plain(spec.alpha),
        "lora_dropout": spec.dropout,
        "bias": "none",
        "target_modules": target_names(resolve_targets(spec.target_modules, config)),
        "use_rslora": spec.rslora and not serving,
        "use_dora": False,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "rank_pattern": {} if serving else dict(spec.rank_pattern),
        "alpha_pattern": {} if serving else {n: _plain(a) for n, a in spec.alpha_pattern},
    }


def _plain(alpha: float) -> float | int:
    return int(alpha) if math.floor(alpha) == alpha else alpha


def from_settings(settings: Mapping[str, Any], config: BackboneConfig) -> LoRA:
    """The inverse of `settings`. Raises ValueError if the adapter is not a plain LoRA, for example
    if it has biases. PEFT does not record `initialisation` and `loraplus_ratio`, so these get their
    defaults."""
    if (bias := settings.get("bias", "none")) != "none":
        raise ValueError(f"bias={bias!r} is not supported, only 'none'")
    for key in _NOT_SUPPORTED:
        if settings.get(key):
            raise ValueError(f"{key}={settings[key]!r} is not supported")
    start = settings.get("init_lora_weights")
    if start == "loftq":
        raise ValueError(f"init_lora_weights={start!r}; {why_left_out(start)}")
    if isinstance(start, str) and _CHANGES_BACKBONE.fullmatch(start):
        raise ValueError(
            f"init_lora_weights={start!r}: PEFT trained this adapter on a changed backbone; let "
            "PEFT convert it (save_pretrained with path_initial_model_for_weight_conversion)"
        )
    targets = settings.get("target_modules")
    spec = LoRA(
        rank=settings["r"],
        alpha=settings["lora_alpha"],
        dropout=settings.get("lora_dropout", 0.0),
        target_modules=targets if isinstance(targets, str) else tuple(targets or ()),
        rslora=settings.get("use_rslora", False),
        rank_pattern=settings.get("rank_pattern") or (),
        alpha_pattern=settings.get("alpha_pattern") or (),
    )
    lora_targets(spec, config)
    return spec


def tensors(
    spec: LoRA,
    adapter: Adapter,
    config: BackboneConfig,
    serving: bool,
    base: BaseTensors | None,
) -> dict[str, np.ndarray]:
    by_name = {}
    for module, mask in resolve_targets(spec.target_modules, config).items():
        ranks, scales = ranks_and_scales(spec, module, config.num_layers)
        if serving:
            # Servers support one rank and one scale. Ranks that a linear does not have are zero.
            ranks[:] = spec.largest_rank
        scales = scales if serving else np.ones_like(scales)
        a, b = adapter[module]
        factors_a = [x[:, :rank].T for x, rank in zip(a, ranks, strict=True)]
        factors_b = [x[:rank].T * s for x, rank, s in zip(b, ranks, scales, strict=True)]
        by_name |= layer_tensors(module, mask, "lora_A.weight", factors_a)
        by_name |= layer_tensors(module, mask, "lora_B.weight", factors_b)
    return by_name


def from_tensors(
    spec: LoRA, tensors: dict[str, np.ndarray], config: BackboneConfig, base: BaseTensors | None
) -> Adapter:
    """The inverse of `tensors`. The factors are zero in layers that are not adapted."""
    adapter = {}
    for module, mask in resolve_targets(spec.target_modules, config).items():
        ranks, _ = ranks_and_scales(spec, module, config.num_layers)
        (k, n), by_layer = linear_sizes(config, module), {}
        # Check all tensors before anything is allocated for all layers, because the file determines
        # sizes.
        for layer in np.flatnonzero(mask).tolist():
            name, r = f"{PREFIX}{full_name(module, layer)}", int(ranks[layer])
            a = take_tensor(tensors, f"{name}.lora_A.weight", (r, k))
            by_layer[layer] = a, take_tensor(tensors, f"{name}.lora_B.weight", (n, r))
        adapter[module] = Factors(
            np.zeros((config.num_layers, k, spec.largest_rank), np.float32),
            np.zeros((config.num_layers, spec.largest_rank, n), np.float32),
        )
        for layer, (a, b) in by_layer.items():
            adapter[module].a[layer, :, : len(a)] = a.T
            adapter[module].b[layer, : len(a)] = b.T
    return adapter


def merged(spec: LoRA, adapter: Adapter, config: BackboneConfig) -> Changes:
    """See `AdapterKind.merged`: a weight becomes `W + scale · A B`."""

    def change(module: str, layer: int) -> Callable[[np.ndarray], np.ndarray]:
        a, b = adapter[module]
        _, scales = ranks_and_scales(spec, module, config.num_layers)
        return lambda weight: weight + scales[layer] * (a[layer] @ b[layer]).T

    return changed_weights(resolve_targets(spec.target_modules, config), change)
