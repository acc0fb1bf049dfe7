"""The folders of LoRA adapters, in the format of Hugging Face PEFT."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxmux.models import BackboneConfig, linear_sizes

from .kind import BaseTensors, Changes
from .lora import Adapter, Factors, LoRA
from .peft_tensors import layer_tensors, stacked, take_layers
from .targets import full_name, resolve_targets, target_names

# Settings of PEFT that change what an adapter computes. They are unset in a plain LoRA.
_NOT_SUPPORTED = (
    "use_dora",
    "use_qalora",
    "lora_bias",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "layer_replication",
    "exclude_modules",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
)


# Initialisations with which PEFT changes the backbone too, so that the factors alone say nothing.
_CHANGES_BACKBONE = re.compile(r"pissa(_niter_\d+)?|olora|corda|lora_ga|loftq")


def is_low_rank(settings: Mapping[str, Any]) -> bool:
    """Whether an adapter_config.json with these values is one of PEFT's LoRA adapters, DoRA
    included."""
    return settings.get("peft_type", "LORA") == "LORA" and "config" not in settings


def settings(spec: LoRA, config: BackboneConfig, serving: bool) -> dict[str, Any]:
    """The settings of an adapter, see `AdapterKind.settings`."""
    alpha = float(spec.rank) if serving else spec.alpha
    return {
        "peft_type": "LORA",
        "r": spec.rank,
        "lora_alpha": int(alpha) if math.floor(alpha) == alpha else alpha,
        "lora_dropout": spec.dropout,
        "bias": "none",
        "target_modules": target_names(resolve_targets(spec.target_modules, config)),
        "use_rslora": spec.rslora and not serving,
        "use_dora": False,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def from_settings(settings: Mapping[str, Any], config: BackboneConfig) -> LoRA:
    """The inverse of `settings`. ValueError if it is no plain LoRA: if it uses DoRA, biases, or
    ranks or alphas per module. `initialisation` and `loraplus_ratio` have their defaults, because
    PEFT does not record them."""
    if (bias := settings.get("bias", "none")) != "none":
        raise ValueError(f"bias={bias!r} is not supported, only 'none'")
    for key in _NOT_SUPPORTED:
        if settings.get(key):
            raise ValueError(f"{key}={settings[key]!r} is not supported")
    if whole := settings.get("modules_to_save"):
        raise ValueError(
            f"modules_to_save={whole!r} is not supported: it would be a whole copy for each task"
        )
    start = settings.get("init_lora_weights")
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
    )
    resolve_targets(spec.target_modules, config)
    return spec


def tensors(
    spec: LoRA,
    adapter: Adapter,
    config: BackboneConfig,
    serving: bool,
    base: BaseTensors | None,
) -> dict[str, np.ndarray]:
    """The tensors of an adapter, see `AdapterKind.tensors`."""
    scale, found = np.float32(spec.scale if serving else 1.0), {}
    for module, mask in resolve_targets(spec.target_modules, config).items():
        a, b = adapter[module]
        found |= layer_tensors(module, mask, "lora_A.weight", a.swapaxes(1, 2))
        found |= layer_tensors(module, mask, "lora_B.weight", b.swapaxes(1, 2) * scale)
    return found


def from_tensors(
    spec: LoRA, tensors: dict[str, np.ndarray], config: BackboneConfig, base: BaseTensors | None
) -> Adapter:
    """The inverse of `tensors`. The factors are zero in layers that are not adapted."""
    adapter = {}
    for module, mask in resolve_targets(spec.target_modules, config).items():
        (k, n), r = linear_sizes(config, module), spec.rank
        shapes = {"lora_A.weight": (r, k), "lora_B.weight": (n, r)}
        found = take_layers(tensors, module, mask, shapes)
        factors = []
        for name, shape in shapes.items():
            own = {layer: tensor.T for layer, tensor in found[name].items()}
            factors.append(stacked(own, config.num_layers, np.zeros(shape[::-1])))
        adapter[module] = Factors(*factors)
    return adapter


def merged(spec: LoRA, adapter: Adapter, config: BackboneConfig) -> Changes:
    """What merging an adapter does, see `AdapterKind.merged`: `W + scale · A B`."""

    def change(module: str, layer: int) -> Callable[[np.ndarray], np.ndarray]:
        a, b = adapter[module]
        return lambda weight: weight + np.float32(spec.scale) * (a[layer] @ b[layer]).T

    return {
        f"{full_name(module, layer)}.weight": change(module, layer)
        for module, mask in resolve_targets(spec.target_modules, config).items()
        for layer in np.flatnonzero(mask)
    }
