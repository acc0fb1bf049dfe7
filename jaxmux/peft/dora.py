"""DoRA: LoRA whose outputs are scaled by trained magnitudes (Liu et al. 2024)."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import numpy as np
from pydantic import BeforeValidator

from jaxmux.data import Sample
from jaxmux.field_checks import checked_dataclass
from jaxmux.models import BackboneConfig, linear_sizes
from jaxmux.models.adapter_ops import SCALE, AdapterOp
from jaxmux.pallas_kernels.grouped_lora import Factors
from jaxmux.planner.costs.pool_spec import PointWork

from . import lora_folder
from .kind import AdapterKind, BaseTensors, Changes, base_values, changed_weights
from .leaves import LeafSpec
from .lora import (
    ZERO_PRODUCTS,
    LoRA,
    as_stored,
    begins_at_weight,
    initial_adapter,
    lora_targets,
    relative_rates,
    supported_initialisation,
)
from .lora_pattern import factors_of, scale_leaf, scales_of
from .remembered import remembered
from .targets import LayerMask, full_name, layer_tensors, stacked, tables_among, take_layers

_MAGNITUDE = "lora_magnitude_vector"


def _supported(initialisation: Any) -> Any:
    if begins_at_weight(initialisation):
        raise ValueError(
            f"initialisation {initialisation!r} is not supported by DoRA, whose magnitudes begin "
            "at the norms of the whole weight; use it with LoRA"
        )
    return supported_initialisation(initialisation)


@checked_dataclass
class DoRA(LoRA):
    """LoRA with trained magnitudes: `y = (m / c) (x W + scale · dropout(x) A B) + bias`.

    m [n] has one trained magnitude for every output of the linear. c [n] are the norms of the
    columns of W + scale · A B; gradients treat c as a constant. m begins at the float32 norms of W,
    so the adapter does not change the backbone at first (Liu et al. 2024, in the form of Hugging
    Face PEFT).

    c is computed once per update, because it stays the same until the next update. Dropout does not
    act on the frozen product here. In PEFT it does where m / c is not 1; the mean is the same.

    The fields are those of `LoRA`. `trained_tokens` has to be empty, the `target_modules` are
    linears only, and initialisations that begin at the weight are refused. The learning rate of m
    is that of B.

    Raises:
      ValueError: a value is outside its range.
    """

    initialisation: Annotated[Literal[*ZERO_PRODUCTS], BeforeValidator(_supported)] = "kaiming"

    def __post_init__(self):
        if self.trained_tokens:
            raise ValueError("trained_tokens: DoRA trains linears only; use LoRA")
        if tables := tables_among(self.target_modules):
            raise ValueError(
                f"target_modules: DoRA trains linears only, found {tables[0]!r}; use LoRA"
            )
        super().__post_init__()


class _Magnitude(AdapterOp):
    low_rank = True

    def product(self, own, y):
        # Empty chunks have the norm 0.
        norm = jnp.where(own["norm"] == 0, 1, own["norm"])
        return y * (own["magnitude"] / norm)[:, None]

    def after_update(self, own, factors, weight, total):
        a, b = factors
        scale = own[SCALE][:, None]
        # |w + s A b|² = |w|² + 2 s b·(Aᵀw) + s² b·(AᵀA b), for each column w of W and b of B.
        rows = a.swapaxes(1, 2).astype(weight.decoded().dtype)
        # `weight.matmul` may encode its left operand, so it is not used here.
        columns = weight.decoded(rows.dtype)
        products = total(jnp.matmul(rows, columns, preferred_element_type=jnp.float32))
        gram = total(jnp.einsum("skr,skq->srq", a, a))
        squares = total(jnp.square(weight.decoded(jnp.float32)).sum(axis=0))
        mixed = 2 * scale * (b * products).sum(axis=1)
        own_squares = jnp.square(scale) * (b * jnp.einsum("srq,sqn->srn", gram, b)).sum(axis=1)
        norm = jnp.sqrt(jnp.maximum(squares + mixed + own_squares, 0))
        # In layers that the task does not adapt, the norm stays 1.
        return {"norm": jnp.where(scale == 0, own["norm"], norm)}


def _leaves(config: BackboneConfig, points: Sequence[str], slots: int, rank: int) -> dict[str, Any]:
    sizes = config.num_layers, slots

    def of(module: str) -> dict[str, LeafSpec]:
        shape, axes = (*sizes, linear_sizes(config, module)[1]), ("layer", "slot", "output")
        return {
            "magnitude": LeafSpec(shape, axes, padding=1.0),
            "norm": LeafSpec(shape, axes, trained=False, padding=1.0),
            SCALE: scale_leaf(config, slots),
        }

    return {module: of(module) for module in points}


def _work(config: BackboneConfig, point: str, rank: int) -> PointWork:
    width = config.num_layers * linear_sizes(config, point)[1]
    # Layers keep the products of gate and up anyway.
    return PointWork(width, 2 * width, 0 if point in ("mlp.gate_proj", "mlp.up_proj") else width)


def _initial(
    spec: DoRA,
    targets: Mapping[str, LayerMask],
    config: BackboneConfig,
    seed: int,
    base: BaseTensors | None,
    samples: Iterable[Sample] | None = None,
) -> dict[str, Any]:
    factors = initial_adapter(spec, targets, config, seed, base, samples)
    # The product of the factors is zero, so the norms are those of the backbone's weights.
    norms = _of_layers(partial(_weight_norms, base), targets, config)
    return _adapter(spec, factors, targets, norms, norms)


def _adapter(
    spec: DoRA,
    factors: Mapping[str, Factors],
    targets: Mapping[str, LayerMask],
    magnitudes: Mapping[str, np.ndarray],
    norms: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    return {
        module: {
            **factors[module]._asdict(),
            "magnitude": magnitudes[module],
            "norm": norms[module],
            SCALE: scales_of(spec, module, mask),
        }
        for module, mask in targets.items()
    }


def _of_layers(
    norms: Callable[[str, int], np.ndarray],
    targets: Mapping[str, LayerMask],
    config: BackboneConfig,
) -> dict[str, np.ndarray]:
    """Norms [L, n] of each linear, computed by `norms(module, layer)`; 1 in layers that are not
    adapted."""
    return {
        module: stacked(
            {layer: norms(module, layer) for layer in np.flatnonzero(mask).tolist()},
            config.num_layers,
            np.ones(linear_sizes(config, module)[1]),
        )
        for module, mask in targets.items()
    }


def _weight_norms(base: BaseTensors | None, module: str, layer: int) -> np.ndarray:
    name = f"{full_name(module, layer)}.weight"

    def norms() -> np.ndarray:
        return np.linalg.norm(base_values(base, name), axis=1)

    # A server prepares many tasks with the same backbone, whose weights are read from a disk.
    return norms() if base is None else remembered(base, ("norms", name), norms)


def _rates(spec: DoRA, targets: Mapping[str, LayerMask]) -> dict[str, Any]:
    return {
        module: {**factors._asdict(), "magnitude": factors.b}
        for module, factors in relative_rates(spec, targets).items()
    }


def _settings(spec: DoRA, config: BackboneConfig, serving: bool) -> dict[str, Any]:
    return lora_folder.settings(spec, config, False) | {"use_dora": True}


def _from_settings(settings: Mapping[str, Any], config: BackboneConfig) -> DoRA:
    plain = lora_folder.from_settings({**settings, "use_dora": False}, config)
    return DoRA(**{field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)})


def _tensors(
    spec: DoRA, adapter: Any, config: BackboneConfig, serving: bool, base: BaseTensors | None
) -> dict[str, np.ndarray]:
    tensors = lora_folder.tensors(spec, factors_of(adapter), config, False, base)
    for module, mask in lora_targets(spec, config).items():
        tensors |= layer_tensors(module, mask, _MAGNITUDE, adapter[module]["magnitude"])
    return tensors


def _from_tensors(
    spec: DoRA, tensors: dict[str, np.ndarray], config: BackboneConfig, base: BaseTensors | None
) -> dict[str, Any]:
    targets, magnitudes = lora_targets(spec, config), {}
    for module, mask in targets.items():
        width = linear_sizes(config, module)[1]
        (by_layer,) = take_layers(tensors, module, mask, {_MAGNITUDE: (width,)}).values()
        magnitudes[module] = stacked(by_layer, config.num_layers, np.ones(width))
    factors = lora_folder.from_tensors(spec, tensors, config, base)
    changes = lora_folder.merged(spec, factors, config)

    def norms(module: str, layer: int) -> np.ndarray:
        name = f"{full_name(module, layer)}.weight"
        return np.linalg.norm(changes[name](base_values(base, name)), axis=1)

    return _adapter(spec, factors, targets, magnitudes, _of_layers(norms, targets, config))


def _merged(spec: DoRA, adapter: Any, config: BackboneConfig) -> Changes:
    added = lora_folder.merged(spec, factors_of(adapter), config)

    def change(module: str, layer: int) -> Callable[[np.ndarray], np.ndarray]:
        add = added[f"{full_name(module, layer)}.weight"]

        def merge(weight: np.ndarray) -> np.ndarray:
            changed = add(weight)
            norm = np.linalg.norm(changed, axis=1)
            gain = adapter[module]["magnitude"][layer] / np.where(norm == 0, 1, norm)
            return changed * gain[:, None]

        return merge

    return changed_weights(lora_targets(spec, config), change)


dora_kind = AdapterKind(
    "dora",
    specification=DoRA,
    op=_Magnitude(),
    targets=lora_targets,
    leaves=_leaves,
    initial=_initial,
    relative_rates=_rates,
    recognise=lambda settings: lora_folder.is_low_rank(settings) and bool(settings.get("use_dora")),
    settings=_settings,
    from_settings=_from_settings,
    tensors=_tensors,
    from_tensors=_from_tensors,
    identity=("rank", "alpha", "rslora", "rank_pattern", "alpha_pattern"),
    rank=lambda spec: spec.largest_rank,
    merged=_merged,
    work=_work,
    as_stored=as_stored,
    reads_samples=True,
)
