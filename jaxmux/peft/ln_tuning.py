"""LN-tuning: the weights of norms are trained (Zhao et al. 2023)."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmux.field_checks import Names, checked_dataclass
from jaxmux.models import BackboneConfig
from jaxmux.models.adapter_ops import FINAL_NORM, AdapterOp
from jaxmux.planner.costs.pool_spec import PointWork

from .kind import AdapterKind, BaseTensors, Changes, base_values
from .leaves import LeafSpec
from .targets import PREFIX, LayerMask, full_name, take_tensor

NORMS = ("input_layernorm", "post_attention_layernorm", FINAL_NORM)
_PARAMETER = "ln_tuning_layers.weight"


@checked_dataclass
class LNTuning:
    """The weights of norms are trained, beginning with those of the backbone (Zhao et al. 2023).

    The trained values are the differences from the backbone's weights, in float32. Weight decay
    therefore pulls the weights back to the backbone's, not to 0 as in Hugging Face PEFT; without
    weight decay, both train in the same way.

    Attributes:
      target_modules: the norms: any of "input_layernorm", "post_attention_layernorm" and "norm"
        (the one behind the last layer).

    Raises:
      ValueError: a name is none of these, or there is none.
    """

    target_modules: Names = NORMS

    def __post_init__(self):
        if unknown := [name for name in self.norms if name not in NORMS]:
            raise ValueError(
                f"target_modules: {unknown[0]!r} is no norm that can be trained; the names are "
                + ", ".join(NORMS)
            )
        if not self.norms:
            raise ValueError("target_modules is empty")

    @property
    def norms(self) -> tuple[str, ...]:
        given = self.target_modules
        return (given,) if isinstance(given, str) else given


class _Norm(AdapterOp):
    """Adds the product of the norm's normalised input and the trained difference of weights."""

    def norm_output(self, own, x, h, eps):
        x = x.astype(jnp.float32)
        normed = x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + eps)
        return h + normed * own[:, None]


def _targets(spec: LNTuning, config: BackboneConfig) -> dict[str, LayerMask]:
    every = np.ones(config.num_layers, bool)
    last = np.arange(config.num_layers) == config.num_layers - 1
    return {name: last if name == FINAL_NORM else every for name in sorted(set(spec.norms))}


def _leaves(config: BackboneConfig, points: Sequence[str], slots: int, rank: int) -> dict[str, Any]:
    # The norm after the last layer is stored with this layer, so it has an axis of layers too.
    shape = config.num_layers, slots, config.hidden_size
    return {point: LeafSpec(shape, ("layer", "slot", "output")) for point in points}


def _work(config: BackboneConfig, point: str, rank: int) -> PointWork:
    """For each value: two operations for the mean square, one for its root times the stream, and
    two for the trained weight. The stream and the norm's output are read, and a sum is written."""
    width = config.hidden_size * (1 if point == FINAL_NORM else config.num_layers)
    return PointWork(5 * width, 3 * width)


def _initial(
    spec: LNTuning,
    targets: Mapping[str, LayerMask],
    config: BackboneConfig,
    seed: int,
    base: BaseTensors | None,
) -> dict[str, np.ndarray]:
    shape = config.num_layers, config.hidden_size
    return {point: np.zeros(shape, np.float32) for point in targets}


def _rates(spec: LNTuning, targets: Mapping[str, LayerMask]) -> dict[str, np.ndarray]:
    return {point: mask.astype(np.float32) for point, mask in targets.items()}


def _settings(spec: LNTuning, config: BackboneConfig, serving: bool) -> dict[str, Any]:
    return {"peft_type": "LN_TUNING", "target_modules": sorted(set(spec.norms))}


def _from_settings(settings: Mapping[str, Any], config: BackboneConfig) -> LNTuning:
    if excluded := settings.get("exclude_modules"):
        raise ValueError(f"exclude_modules={excluded!r} is not supported")
    modules = settings.get("target_modules") or ()
    return LNTuning(modules if isinstance(modules, str) else tuple(modules))


def _names(spec: LNTuning, config: BackboneConfig) -> list[tuple[str, int, str]]:
    """(point, layer, name in the backbone) of each norm in each layer."""
    return [
        (point, layer, f"model.{FINAL_NORM}" if point == FINAL_NORM else full_name(point, layer))
        for point, mask in _targets(spec, config).items()
        for layer in np.flatnonzero(mask).tolist()
    ]


def _tensors(
    spec: LNTuning, adapter: Any, config: BackboneConfig, serving: bool, base: BaseTensors | None
) -> dict[str, np.ndarray]:
    return {
        f"{PREFIX}{name}.{_PARAMETER}": base_values(base, f"{name}.weight") + adapter[point][layer]
        for point, layer, name in _names(spec, config)
    }


def _from_tensors(
    spec: LNTuning, tensors: dict[str, np.ndarray], config: BackboneConfig, base: BaseTensors | None
) -> dict[str, np.ndarray]:
    adapter = _initial(spec, _targets(spec, config), config, 0, base)
    for point, layer, name in _names(spec, config):
        weight = take_tensor(tensors, f"{PREFIX}{name}.{_PARAMETER}", (config.hidden_size,))
        adapter[point][layer] = weight - base_values(base, f"{name}.weight")
    return adapter


def _merged(spec: LNTuning, adapter: Any, config: BackboneConfig) -> Changes:
    return {
        f"{name}.weight": lambda weight, added=adapter[point][layer]: weight + added
        for point, layer, name in _names(spec, config)
    }


ln_tuning_kind = AdapterKind(
    "ln_tuning",
    specification=LNTuning,
    op=_Norm(),
    targets=_targets,
    leaves=_leaves,
    initial=_initial,
    relative_rates=_rates,
    recognise=lambda settings: settings.get("peft_type") == "LN_TUNING",
    settings=_settings,
    from_settings=_from_settings,
    tensors=_tensors,
    from_tensors=_from_tensors,
    merged=_merged,
    work=_work,
)
