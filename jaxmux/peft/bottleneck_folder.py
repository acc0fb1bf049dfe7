"""The folders of bottleneck adapters, in the format of AdapterHub's library `adapters` 1.x."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxmux.field_checks import why_left_out
from jaxmux.models import BackboneConfig

from .bottleneck import (
    ACTIVATIONS,
    ATTENTION,
    FORMS,
    Bottleneck,
    BottleneckOp,
    bottleneck_leaves,
    bottleneck_rates,
    bottleneck_targets,
    bottleneck_work,
    initial_bottleneck,
    with_numbers,
)
from .kind import AdapterKind, BaseTensors
from .targets import take_tensor

# The name that an exported adapter has within its folder.
_NAME = "jaxmux"
# For each form, the settings in which AdapterHub's configuration differs from the defaults.
_CONFIGS: dict[str, dict[str, Any]] = {
    "pfeiffer": {"mh_adapter": False, "original_ln_before": True, "is_parallel": False},
    "houlsby": {"mh_adapter": True, "original_ln_before": False, "is_parallel": False},
    "parallel": {"mh_adapter": False, "original_ln_before": False, "is_parallel": True},
}
# For each name of a whole configuration, its form and its reduction factor.
_NAMED = {
    "seq_bn": ("pfeiffer", 16),
    "pfeiffer": ("pfeiffer", 16),
    "double_seq_bn": ("houlsby", 16),
    "houlsby": ("houlsby", 16),
    "par_bn": ("parallel", 2),
    "parallel": ("parallel", 2),
}
# Settings that change an adapter's outputs, each with the only value that is supported.
_FIXED = {
    "output_adapter": True,
    "ln_before": False,
    "ln_after": False,
    "use_gating": False,
    "inv_adapter": None,
    "cross_adapter": False,
    "phm_layer": False,
    "leave_out": [],
    "dropout": 0.0,
}


def _settings(spec: Bottleneck, config: BackboneConfig, serving: bool) -> dict[str, Any]:
    d, m = config.hidden_size, spec.size
    # The library computes m as int(d // reduction_factor).
    reduction = d // m if d % m == 0 else d / (m + 0.5)
    return {
        "name": _NAME,
        "hidden_size": d,
        "model_type": config.architecture.removesuffix("ForCausalLM").lower(),
        "model_class": config.architecture,
        "version": "adapters.1.3.0",
        "config": {
            **_FIXED,
            **_CONFIGS[spec.form],
            "reduction_factor": reduction,
            "non_linearity": spec.chosen_activation,
            "scaling": spec.chosen_scaling,
            "original_ln_after": True,
            "residual_before_ln": True,
            "adapter_residual_before_ln": False,
            "init_weights": "bert" if FORMS[spec.form].up_is_random else "mam_adapter",
        },
    }


def _from_settings(settings: Mapping[str, Any], config: BackboneConfig) -> Bottleneck:
    values = settings["config"]
    if isinstance(values, str):
        values = _expanded(values)
    if architecture := values.get("architecture"):
        reason = why_left_out(architecture) or "only bottlenecks are"
        raise ValueError(f"architecture={architecture!r} is not supported; {reason}")
    for key, only in _FIXED.items():
        if values.get(key, only) != only:
            raise ValueError(f"{key}={values[key]!r} is not supported, only {only!r}")
    forms = [
        form
        for form, form_values in _CONFIGS.items()
        if (bool(values.get("mh_adapter")), bool(values.get("is_parallel")))
        == (form_values["mh_adapter"], form_values["is_parallel"])
    ]
    if not forms:
        raise ValueError("a parallel adapter behind attention is not supported")
    scaling = values.get("scaling", 1.0)
    if isinstance(scaling, str):
        raise ValueError(f"scaling={scaling!r} is not supported, only a number")
    reduction = values["reduction_factor"]
    if isinstance(reduction, Mapping):
        raise ValueError("reduction_factor: one for each layer is not supported, only a number")
    activation = values["non_linearity"]
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"non_linearity={activation!r} is not supported; known: {known}")
    return Bottleneck(forms[0], int(config.hidden_size // reduction), activation, float(scaling))


def _expanded(text: str) -> dict[str, Any]:
    """The configuration that a text such as "double_seq_bn[reduction_factor=4]" names."""
    match = re.fullmatch(r"(\w+)(?:\[(.*)\])?", text)
    if not match or match[1] not in _NAMED:
        reason = why_left_out(text) or f"known names: {', '.join(_NAMED)}"
        raise ValueError(f"config={text!r} is not supported; {reason}")
    form, reduction = _NAMED[match[1]]
    config: dict[str, Any] = {
        **_CONFIGS[form],
        "reduction_factor": reduction,
        "non_linearity": FORMS[form].activation,
        "scaling": FORMS[form].scaling,
    }
    for part in filter(None, (match[2] or "").split(",")):
        key, _, value = (piece.strip() for piece in part.partition("="))
        config[key] = _value(value)
    return config


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text.strip("'\"")


def _prefix(point: str, layer: int) -> str:
    block = "attention_adapters" if point == ATTENTION else "output_adapters"
    return f"model.layers.{layer}.{block}.adapters."


# For each array, the name of its tensor. Matrices are transposed.
_TENSORS = {
    "down": "adapter_down.0.weight",
    "down_bias": "adapter_down.0.bias",
    "up": "adapter_up.weight",
    "up_bias": "adapter_up.bias",
}


def _tensors(
    spec: Bottleneck, adapter: Any, config: BackboneConfig, serving: bool, base: BaseTensors | None
) -> dict[str, np.ndarray]:
    return {
        f"{_prefix(point, layer)}{_NAME}.{tensor}": np.ascontiguousarray(
            adapter[point][name][layer].T
        )
        for point in bottleneck_targets(spec, config)
        for layer in range(config.num_layers)
        for name, tensor in _TENSORS.items()
    }


def _from_tensors(
    spec: Bottleneck,
    tensors: dict[str, np.ndarray],
    config: BackboneConfig,
    base: BaseTensors | None,
) -> dict[str, Any]:
    d, m, layers = config.hidden_size, spec.size, range(config.num_layers)
    shapes = {"down": (m, d), "down_bias": (m,), "up": (d, m), "up_bias": (d,)}
    names = {name.partition(".adapters.")[2].partition(".")[0] for name in tensors}
    if len(names) != 1:
        raise ValueError(f"holds {len(names)} adapters; expected one")
    (name,) = names
    adapter = {}
    for point in bottleneck_targets(spec, config):
        arrays = {
            key: np.stack(
                [
                    take_tensor(tensors, f"{_prefix(point, layer)}{name}.{tensor}", shapes[key]).T
                    for layer in layers
                ]
            ).astype(np.float32)
            for key, tensor in _TENSORS.items()
        }
        adapter[point] = with_numbers(spec, arrays)
    return adapter


bottleneck_kind = AdapterKind(
    "bottleneck",
    specification=Bottleneck,
    op=BottleneckOp(),
    targets=bottleneck_targets,
    leaves=bottleneck_leaves,
    initial=initial_bottleneck,
    relative_rates=bottleneck_rates,
    recognise=lambda settings: "config" in settings and "peft_type" not in settings,
    settings=_settings,
    from_settings=_from_settings,
    tensors=_tensors,
    from_tensors=_from_tensors,
    identity=("form", "size", "chosen_activation", "chosen_scaling"),
    weights_file="adapter.safetensors",
    rank=lambda spec: spec.size,
    size_field="size",
    work=bottleneck_work,
    same_in_any_rows=False,
)
