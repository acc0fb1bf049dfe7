"""IA3 adapters: learned factors of the inputs or outputs of linears (Liu et al. 2022)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxmux.field_checks import Names, checked_dataclass
from jaxmux.models import BackboneConfig, has_bias, linear_sizes
from jaxmux.models.adapter_ops import AdapterOp
from jaxmux.planner.costs.pool_spec import PointWork

from .kind import AdapterKind, BaseTensors, Changes, spec_tree
from .leaves import LeafSpec
from .targets import (
    LayerMask,
    full_name,
    layer_tensors,
    resolve_targets,
    stacked,
    take_layers,
    target_names,
)

# Names of the trained arrays of a linear: the factors of its input and of its output.
INPUT, OUTPUT = "input", "output"


@checked_dataclass
class IA3:
    """Learned factors of the features of linears, which begin at 1 (Liu et al. 2022).

    The output of a linear becomes `l · (x W + bias)`, or its input, `(l · x) W + bias`. An adapter
    has one number per feature, far fewer than LoRA. It needs a learning rate that is 10 to 100
    times as high as LoRA's; the paper uses 3e-3. `AdamW` with weight decay pulls the factors to 0,
    not to 1.

    Attributes:
      target_modules: the linears that are adapted, chosen as `LoRA.target_modules`.
      feedforward_modules: those of them whose inputs are multiplied, not their outputs, chosen
        likewise.

    Raises:
      ValueError: a value has the wrong type.
    """

    target_modules: Names = ("k_proj", "v_proj", "down_proj")
    feedforward_modules: Names = ("down_proj",)


class _Factors(AdapterOp):
    """Multiplies the input or the output of a linear by a task's factors, where the task has
    factors."""

    def changes_input(self, own: Mapping[str, Any]) -> bool:
        return INPUT in own

    def linear_input(self, own, x):
        return x * own[INPUT][:, None] if INPUT in own else x

    def linear_output(self, own, x, y, first_column):
        return y * own[OUTPUT][:, None] if OUTPUT in own else y


def targets(spec: IA3, config: BackboneConfig) -> dict[str, LayerMask]:
    """The layers in which an adapter multiplies, by linear and part ("mlp.down_proj/input")."""
    adapted = resolve_targets(spec.target_modules, config)
    inputs = {}
    if spec.feedforward_modules:
        try:
            inputs = resolve_targets(spec.feedforward_modules, config)
        except ValueError as e:
            raise ValueError(str(e).replace("target_modules", "feedforward_modules")) from None
    none = np.zeros(config.num_layers, bool)
    if others := [m for m in inputs if (inputs[m] & ~adapted.get(m, none)).any()]:
        raise ValueError(f"feedforward_modules: {others[0]} is not among the target_modules")
    masks = {}
    for module, mask in adapted.items():
        of_input = inputs.get(module, none)
        masks |= {f"{module}/{INPUT}": of_input, f"{module}/{OUTPUT}": mask & ~of_input}
    return {point: mask for point, mask in masks.items() if mask.any()}


def leaves(config: BackboneConfig, points: Sequence[str], slots: int, rank: int) -> dict[str, Any]:
    def of(point: str) -> LeafSpec:
        module, part = point.split("/")
        width = linear_sizes(config, module)[part == OUTPUT]
        shape = (config.num_layers, slots, width)
        return LeafSpec(shape, ("layer", "slot", part), padding=1.0)

    return spec_tree({point: of(point) for point in points})


def _work(config: BackboneConfig, point: str, rank: int) -> PointWork:
    module, part = point.split("/")
    width = config.num_layers * linear_sizes(config, module)[part == OUTPUT]
    return PointWork(width, 2 * width)


def _initial(
    spec: IA3,
    targets: Mapping[str, LayerMask],
    config: BackboneConfig,
    seed: int,
    base: BaseTensors | None,
) -> dict[str, Any]:
    specs = leaves(config, list(targets), 1, 1)
    return jax.tree.map(lambda spec: np.ones(spec.of_slot().shape, np.float32), specs)


def _rates(spec: IA3, targets: Mapping[str, LayerMask]) -> dict[str, Any]:
    return spec_tree({point: mask.astype(np.float32) for point, mask in targets.items()})


def _settings(spec: IA3, config: BackboneConfig, serving: bool) -> dict[str, Any]:
    masks = targets(spec, config)
    inputs = {point.split("/")[0]: m for point, m in masks.items() if point.endswith(INPUT)}
    return {
        "peft_type": "IA3",
        "target_modules": target_names(resolve_targets(spec.target_modules, config)),
        "feedforward_modules": target_names(inputs),
        "fan_in_fan_out": False,
        "init_ia3_weights": True,
    }


def _from_settings(settings: Mapping[str, Any], config: BackboneConfig) -> IA3:
    for key in ("fan_in_fan_out", "exclude_modules"):
        if settings.get(key):
            raise ValueError(f"{key}={settings[key]!r} is not supported")

    def named(key: str) -> str | tuple[str, ...]:
        value = settings.get(key) or ()
        return value if isinstance(value, str) else tuple(value)

    spec = IA3(named("target_modules"), named("feedforward_modules"))
    targets(spec, config)
    return spec


def _shape(point: str, config: BackboneConfig) -> tuple[int, int]:
    """The shape in which PEFT stores the factors: a column for outputs, a row for inputs."""
    module, part = point.split("/")
    k, n = linear_sizes(config, module)
    return (n, 1) if part == OUTPUT else (1, k)


def _tensors(
    spec: IA3, adapter: Any, config: BackboneConfig, serving: bool, base: BaseTensors | None
) -> dict[str, np.ndarray]:
    tensors = {}
    for point, mask in targets(spec, config).items():
        module, part = point.split("/")
        values = adapter[module][part].reshape(-1, *_shape(point, config))
        tensors |= layer_tensors(module, mask, "ia3_l", values)
    return tensors


def _from_tensors(
    spec: IA3, tensors: dict[str, np.ndarray], config: BackboneConfig, base: BaseTensors | None
) -> dict[str, Any]:
    factors = {}
    for point, mask in targets(spec, config).items():
        shape = _shape(point, config)
        by_layer = take_layers(tensors, point.split("/")[0], mask, {"ia3_l": shape})["ia3_l"]
        flat = {layer: tensor.reshape(-1) for layer, tensor in by_layer.items()}
        factors[point] = stacked(flat, config.num_layers, np.ones(max(shape)))
    return spec_tree(factors)


def _merged(spec: IA3, adapter: Any, config: BackboneConfig) -> Changes:
    """The factors of an output multiply the rows of the weight, and the bias; the factors of an
    input multiply its columns."""
    changes: dict[str, Callable[[np.ndarray], np.ndarray]] = {}
    for point, mask in targets(spec, config).items():
        module, part = point.split("/")
        for layer in np.flatnonzero(mask):
            name, factors = full_name(module, layer), adapter[module][part][layer]
            if part == INPUT:
                changes[f"{name}.weight"] = lambda weight, gain=factors: weight * gain
                continue
            changes[f"{name}.weight"] = lambda weight, gain=factors: weight * gain[:, None]
            if has_bias(config, module):
                changes[f"{name}.bias"] = lambda bias, gain=factors: bias * gain
    return changes


ia3_kind = AdapterKind(
    "ia3",
    specification=IA3,
    op=_Factors(),
    targets=targets,
    leaves=leaves,
    initial=_initial,
    relative_rates=_rates,
    recognise=lambda settings: settings.get("peft_type") == "IA3",
    settings=_settings,
    from_settings=_from_settings,
    tensors=_tensors,
    from_tensors=_from_tensors,
    merged=_merged,
    work=_work,
)
