"""VeRA adapters: trained factors between shared random projections (Kopiczko et al. 2024)."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float
from pydantic import Field

from jaxmux.field_checks import EXACT, Count, Names, Number, checked_dataclass
from jaxmux.models import BackboneConfig, linear_sizes
from jaxmux.models.adapter_ops import CHUNK_SLOT, AdapterOp
from jaxmux.planner.costs.pool_spec import PointWork

from . import lora_folder
from .kind import AdapterKind, BaseTensors, Changes, changed_weights
from .leaves import LeafSpec
from .lora import Adapter, Factors, LoRA
from .shared_projections import add_projected, first_alike
from .targets import (
    LayerMask,
    layer_tensors,
    refuse_size,
    resolve_targets,
    stacked,
    take_layers,
    take_tensor,
    target_names,
)

# PEFT's names of the two projections, which belong to no module.
_A, _B = "base_model.vera_A", "base_model.vera_B"
_NOT_SUPPORTED = ("fan_in_fan_out", "layers_to_transform", "layers_pattern", "exclude_modules")


@checked_dataclass
class VeRA:
    """Trained factors between random projections: `y = x W + lb · (((x A) · ld) B)` (Kopiczko et
    al. 2024).

    A [k, r] and B [r, n] are drawn once and not trained. All linears and layers share them: a
    linear takes the first k rows of A and the first n columns of B. The trained factors are ld [r],
    which begins at `d_initial`, and lb [n], which begins at 0. They need a learning rate about ten
    times as high as LoRA's. Weight decay pulls both to 0.

    Attributes:
      rank: r, at least 1.
      d_initial: initial value of ld.
      projection_key: seed of A and B, which are those of Hugging Face PEFT to the last bit.
      target_modules: the linears that are adapted, chosen as `LoRA.target_modules`. The widest of
        them determine the sizes of A and B, and with that their values.

    Raises:
      ValueError: a value is outside its range.
    """

    rank: Count = 256
    d_initial: Number = 0.1
    projection_key: Annotated[int, Field(ge=0, lt=2**32), EXACT] = 0
    target_modules: Names = "all-linear"


class _Factors(AdapterOp):
    """Adds the product of a linear's input with the projections and their trained factors."""

    of_slots = frozenset({"a0", "b0", "fingerprint"})

    def linear_output(self, own, x, y, first_column):
        group = first_alike(own["fingerprint"], own["a0"], own["b0"], own[CHUNK_SLOT])
        return add_projected(y, x, own["ld"], own["lb"], own["a0"], own["b0"], group)


def drawn_projections(
    key: int, rank: int, k: int, n: int
) -> tuple[Float[np.ndarray, "r k"], Float[np.ndarray, "n r"]]:
    """The projections A and B of Hugging Face PEFT in its layout, with the same bits.

    PEFT draws them with torch's generator for CPUs, which is NumPy's Mersenne Twister: first A,
    then B, uniformly in ±sqrt(6 / size of the last axis), with 24 random bits for each value.

    Args:
      key: seed of the generator.
      k: width of the widest input.
      n: width of the widest output.
    """
    rng = np.random.RandomState(key)

    def draw(*shape: int) -> Float[np.ndarray, "_ _"]:
        bound = float(np.sqrt(3.0) * (np.sqrt(2.0) / np.sqrt(shape[1])))
        bits = rng.randint(0, 2**32, size=shape, dtype=np.uint32) & 0xFFFFFF
        low, high = np.float32(-bound), np.float32(bound)
        # Rounded once at the end, as in a fused multiply-add.
        values = bits * 2.0**-24 * np.float64(high - low) + np.float64(low)
        return values.astype(np.float32)

    return draw(rank, k), draw(n, rank)


def _widest(spec: VeRA, config: BackboneConfig) -> tuple[int, int]:
    """The width of the widest input and of the widest output of the adapted linears."""
    sizes = [linear_sizes(config, m) for m in resolve_targets(spec.target_modules, config)]
    return max(k for k, _ in sizes), max(n for _, n in sizes)


def _projections(
    spec: VeRA, config: BackboneConfig, a: np.ndarray, b: np.ndarray
) -> dict[str, dict[str, np.ndarray]]:
    """For each linear, its parts of the projections and a hash of the whole projections. `a` and
    `b` are in PEFT's layout."""
    whole = b"".join(np.asarray(x, np.float32, "C").tobytes() for x in (a, b))
    words = np.frombuffer(hashlib.blake2b(whole).digest(), np.int32)
    fingerprint, by_module = np.resize(words, spec.rank), {}
    for module in resolve_targets(spec.target_modules, config):
        k, n = linear_sizes(config, module)
        parts = {"a0": a[:, :k].T, "b0": b[:n].T}
        by_module[module] = {name: np.asarray(x, np.float32, "C") for name, x in parts.items()}
        by_module[module]["fingerprint"] = fingerprint
    return by_module


def _targets(spec: VeRA, config: BackboneConfig) -> dict[str, LayerMask]:
    refuse_size("rank", spec.rank, config)
    return resolve_targets(spec.target_modules, config)


def _leaves(config: BackboneConfig, points: Sequence[str], slots: int, rank: int) -> dict[str, Any]:
    sizes, both = (config.num_layers, slots), ("layer", "slot")

    def of(module: str) -> dict[str, LeafSpec]:
        k, n = linear_sizes(config, module)
        return {
            "ld": LeafSpec((*sizes, rank), (*both, "rank")),
            "lb": LeafSpec((*sizes, n), (*both, "output")),
            "a0": LeafSpec((slots, k, rank), ("slot", "input", "rank"), trained=False),
            "b0": LeafSpec((slots, rank, n), ("slot", "rank", "output"), trained=False),
            "fingerprint": LeafSpec((slots, rank), ("slot", "rank"), trained=False, dtype="int32"),
        }

    return {module: of(module) for module in points}


def _work(config: BackboneConfig, point: str, rank: int) -> PointWork:
    # For a microbatch with one pair of projections.
    k, n = linear_sizes(config, point)
    layers = config.num_layers
    return PointWork(2 * layers * rank * (k + n), 3 * layers * n, layers * rank)


def _initial(
    spec: VeRA,
    targets: Mapping[str, LayerMask],
    config: BackboneConfig,
    seed: int,
    base: BaseTensors | None,
) -> dict[str, Any]:
    drawn = drawn_projections(spec.projection_key, spec.rank, *_widest(spec, config))
    adapter = _projections(spec, config, *drawn)
    for module, mask in targets.items():
        ld = np.outer(mask, np.full(spec.rank, spec.d_initial, np.float32))
        n = linear_sizes(config, module)[1]
        adapter[module] |= {
            "ld": ld.astype(np.float32),
            "lb": np.zeros((config.num_layers, n), np.float32),
        }
    return adapter


def _rates(spec: VeRA, targets: Mapping[str, LayerMask]) -> dict[str, Any]:
    return {
        module: dict.fromkeys(("ld", "lb"), mask.astype(np.float32))
        for module, mask in targets.items()
    }


def _as_lora(spec: VeRA) -> LoRA:
    """The LoRA with scale 1 that computes the same."""
    return LoRA(spec.rank, float(spec.rank), target_modules=spec.target_modules)


def _factors(arrays: Mapping[str, np.ndarray]) -> Factors:
    return Factors(arrays["a0"] * arrays["ld"][:, None], arrays["b0"] * arrays["lb"][:, None])


def _settings(spec: VeRA, config: BackboneConfig, serving: bool) -> dict[str, Any]:
    if serving:
        return lora_folder.settings(_as_lora(spec), config, serving)
    return {
        "peft_type": "VERA",
        "r": spec.rank,
        "target_modules": target_names(_targets(spec, config)),
        "projection_prng_key": spec.projection_key,
        "save_projection": True,
        "d_initial": spec.d_initial,
        "vera_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_weights": True,
    }


def _from_settings(settings: Mapping[str, Any], config: BackboneConfig) -> VeRA:
    if (bias := settings.get("bias", "none")) != "none":
        raise ValueError(f"bias={bias!r} is not supported, only 'none'")
    for key in _NOT_SUPPORTED:
        if settings.get(key):
            raise ValueError(f"{key}={settings[key]!r} is not supported")
    if dropout := settings.get("vera_dropout"):
        raise ValueError(
            f"vera_dropout={dropout!r} is not supported in training; with 0 in its place, the "
            "adapter computes the same"
        )
    targets = settings.get("target_modules") or ()
    spec = VeRA(
        settings["r"],
        settings.get("d_initial", 0.1),
        settings.get("projection_prng_key", 0),
        targets if isinstance(targets, str) else tuple(targets),
    )
    _targets(spec, config)
    return spec


def _tensors(
    spec: VeRA, adapter: Any, config: BackboneConfig, serving: bool, base: BaseTensors | None
) -> dict[str, np.ndarray]:
    if serving:
        factors: Adapter = {module: _factors(arrays) for module, arrays in adapter.items()}
        return lora_folder.tensors(_as_lora(spec), factors, config, serving, base)
    targets, tensors = _targets(spec, config), {}
    for module, mask in targets.items():
        tensors |= layer_tensors(module, mask, "vera_lambda_d", adapter[module]["ld"])
        tensors |= layer_tensors(module, mask, "vera_lambda_b", adapter[module]["lb"])
    # The widest linears have the whole projections.
    a = max((adapter[module]["a0"] for module in targets), key=np.size)
    b = max((adapter[module]["b0"] for module in targets), key=np.size)
    return tensors | {_A: np.ascontiguousarray(a.T), _B: np.ascontiguousarray(b.T)}


def _from_tensors(
    spec: VeRA, tensors: dict[str, np.ndarray], config: BackboneConfig, base: BaseTensors | None
) -> dict[str, Any]:
    k, n = _widest(spec, config)
    if _A in tensors or _B in tensors:
        a = take_tensor(tensors, _A, (spec.rank, k))
        b = take_tensor(tensors, _B, (n, spec.rank))
    else:
        # PEFT's `save_projection=False`.
        a, b = drawn_projections(spec.projection_key, spec.rank, k, n)
    adapter = _projections(spec, config, a, b)
    for module, mask in _targets(spec, config).items():
        names = {"ld": "vera_lambda_d", "lb": "vera_lambda_b"}
        shapes = {"ld": (spec.rank,), "lb": (linear_sizes(config, module)[1],)}
        taken = take_layers(tensors, module, mask, {names[x]: shapes[x] for x in names})
        for leaf, name in names.items():
            adapter[module][leaf] = stacked(taken[name], config.num_layers, np.zeros(shapes[leaf]))
    return adapter


def _merged(spec: VeRA, adapter: Any, config: BackboneConfig) -> Changes:
    def change(module: str, layer: int) -> Callable[[np.ndarray], np.ndarray]:
        arrays = adapter[module]

        def merge(weight: np.ndarray) -> np.ndarray:
            product = (arrays["a0"] * arrays["ld"][layer]) @ arrays["b0"]
            return weight + (product * arrays["lb"][layer]).T

        return merge

    return changed_weights(_targets(spec, config), change)


vera_kind = AdapterKind(
    "vera",
    specification=VeRA,
    op=_Factors(),
    targets=_targets,
    leaves=_leaves,
    initial=_initial,
    relative_rates=_rates,
    recognise=lambda settings: settings.get("peft_type") == "VERA",
    settings=_settings,
    from_settings=_from_settings,
    tensors=_tensors,
    from_tensors=_from_tensors,
    identity=("rank", "projection_key"),
    merged=_merged,
    work=_work,
    same_in_any_rows=False,
)
