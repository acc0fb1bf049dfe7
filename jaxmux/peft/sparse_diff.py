"""Diff-Pruning with fixed masks of single entries of weights (Guo et al. 2021)."""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxmux.data import Sample
from jaxmux.field_checks import Count, Names, checked_dataclass
from jaxmux.models import BackboneConfig, linear_sizes
from jaxmux.models.adapter_ops import CHUNK_SLOT, AdapterOp
from jaxmux.planner.costs.pool_spec import PointWork

from .diff_pruning import is_columns
from .kind import (
    AdapterKind,
    BaseTensors,
    Changes,
    base_values,
    calibrated,
    changed_weights,
)
from .leaves import LeafSpec
from .sparse_products import first_of_owner, sparse_product
from .targets import (
    PREFIX,
    LayerMask,
    full_name,
    layer_tensors,
    resolve_targets,
    take_tensor,
    target_names,
)

MASKS = ("random", "magnitude", "gradient")
# The number of an entry holds its row and its column, with 16 bits each.
_WIDEST = 2**16 - 1


@checked_dataclass
class SparseDiff:
    """Some entries of the weights of linears are trained: `y = x W + x D`.

    D [k, n] has `rank · (k + n)` entries, as many as a LoRA of this rank. Their places are chosen
    once, and their values begin at 0. This is Diff-Pruning (Guo et al. 2021) with a fixed mask,
    exported in the format of Hugging Face PEFT's SHiRA (Bhardwaj et al. 2024). Every task costs
    dense products with the whole microbatch; `DiffPruning`, whose entries are whole columns, costs
    less. D is stored separately from the weights, in float32. When an adapter is added to bfloat16
    weights, as in `peft` and in a merge, changes that are small compared with a weight are lost.

    Attributes:
      rank: number of entries of a linear, divided by the sum of its widths.
      mask: which entries. "random" draws them for every linear and layer from the task's seed;
        "magnitude" takes the weights with the largest absolute values, "gradient" those by which
        the loss of samples of the task's training data has the largest absolute derivatives.
      target_modules: the linears that are adapted, chosen as `LoRA.target_modules`.
      calibration_tokens: with "gradient", number of tokens of the training data that the backbone
        reads for the derivatives, from the samples that are trained first, at most 2048 of each.

    Raises:
      ValueError: a value is outside its range.
    """

    rank: Count = 16
    mask: Literal[*MASKS] = "magnitude"
    target_modules: Names = ("q_proj", "v_proj")
    calibration_tokens: Count = 2048

    @property
    def begins_slowly(self) -> bool:
        """Whether the places of the entries take long to compute (see
        `AdapterKind.begins_slowly`)."""
        return self.mask != "random"


class _Entries(AdapterOp):
    """Adds the product with the entries. If a device holds only some of the linear's inputs or
    outputs, it leaves out the entries of the others, so its result is one summand of the whole
    sum."""

    of_slots = frozenset({"outputs"})

    def linear_output(self, own, x, y, first_column):
        entries, (k, n) = own["entries"], (x.shape[-1], y.shape[-1])
        slots = own[CHUNK_SLOT]
        first_output = own["outputs"][:, 0][jnp.maximum(slots, 0)].astype(jnp.int32) - 1
        numbers = entries - 1
        row = (numbers >> 16).astype(jnp.int32) - first_column
        column = (numbers & 0xFFFF).astype(jnp.int32) - first_output[:, None]
        inside = (entries > 0) & (row >= 0) & (row < k) & (column >= 0) & (column < n)
        places = jnp.where(inside, row * n + column, k * n)
        first = first_of_owner(slots, (entries > 0).any(axis=1))
        return y + sparse_product(n, x, own["values"], places, first)


def _targets(spec: SparseDiff, config: BackboneConfig) -> dict[str, LayerMask]:
    targets = resolve_targets(spec.target_modules, config)
    for module in targets:
        k, n = linear_sizes(config, module)
        if spec.rank * (k + n) > k * n:
            raise ValueError(
                f"rank is {spec.rank}, so {spec.rank * (k + n)} entries of {module} would be "
                f"trained, but it has {k * n}"
            )
        if max(k, n) > _WIDEST:
            raise ValueError(f"{module} is {max(k, n)} wide; masks have at most {_WIDEST}")
    return targets


def _leaves(config: BackboneConfig, points: Sequence[str], slots: int, rank: int) -> dict[str, Any]:
    axes = ("layer", "slot", "rank")

    def of(module: str) -> dict[str, LeafSpec]:
        k, n = linear_sizes(config, module)
        shape = (config.num_layers, slots, rank * (k + n))
        return {
            "values": LeafSpec(shape, axes),
            # 1 + 2**16 · input + output; 0 marks padding.
            "entries": LeafSpec(shape, axes, trained=False, dtype="uint32"),
            # Numbers of the outputs, counted from 1; a device holds the numbers of its own outputs.
            "outputs": LeafSpec((slots, n), ("slot", "output"), trained=False, dtype="uint32"),
        }

    return {module: of(module) for module in points}


def _numbers(places: Int[np.ndarray, " entries"], k: int) -> Int[np.ndarray, " entries"]:
    """Numbers of the entries at indices output · k + input of a weight [n, k], in PEFT's order: row
    by row of the weight."""
    places = np.sort(places)
    return (1 + (places % k << 16) + places // k).astype(np.uint32)


def _places(numbers: Int[np.ndarray, " entries"]) -> Int[np.ndarray, "2 entries"]:
    """Outputs and inputs of numbered entries; (0, 0) for padding."""
    numbers = np.maximum(numbers.astype(np.int64) - 1, 0)
    return np.stack([numbers & 0xFFFF, numbers >> 16]).astype(np.int32)


def _empty(spec: SparseDiff, config: BackboneConfig) -> dict[str, Any]:
    """The arrays of an adapter that has no entries yet."""
    specs = _leaves(config, list(_targets(spec, config)), 1, spec.rank)
    adapter = {}
    for module, leaves in specs.items():
        arrays = {name: np.zeros(leaf.of_slot().shape, leaf.dtype) for name, leaf in leaves.items()}
        arrays["outputs"] += np.arange(1, 1 + len(arrays["outputs"]), dtype=np.uint32)
        adapter[module] = arrays
    return adapter


def _work(config: BackboneConfig, point: str, rank: int) -> PointWork:
    # For a microbatch with one task of this kind, whose entries become a dense matrix.
    k, n = linear_sizes(config, point)
    return PointWork(2 * config.num_layers * k * n, 3 * config.num_layers * n)


def _initial(
    spec: SparseDiff,
    targets: Mapping[str, LayerMask],
    config: BackboneConfig,
    seed: int,
    base: BaseTensors | None,
    samples: Iterable[Sample] | None = None,
) -> dict[str, Any]:
    adapter = _empty(spec, config)

    def choose(module: str, layer: int, values: Float[np.ndarray, "n k"]) -> None:
        entries = adapter[module]["entries"][layer]
        places = np.argpartition(-np.abs(values).reshape(-1), len(entries) - 1)[: len(entries)]
        entries[:] = _numbers(places, values.shape[1])

    if spec.mask == "gradient":
        calibration = calibrated(config, base, samples, spec.calibration_tokens)
        for layer, gradients in calibration.weight_gradients(list(targets)):
            for module, gradient in gradients.items():
                if targets[module][layer]:
                    choose(module, layer, gradient)
        return adapter
    for module, mask in targets.items():
        k, n = linear_sizes(config, module)
        for layer in np.flatnonzero(mask).tolist():
            if spec.mask == "magnitude":
                choose(module, layer, base_values(base, f"{full_name(module, layer)}.weight"))
            else:
                rng = np.random.default_rng([seed, zlib.crc32(module.encode()), layer])
                entries = spec.rank * (k + n)
                places = rng.choice(k * n, entries, replace=False, shuffle=False)
                adapter[module]["entries"][layer] = _numbers(places, k)
    return adapter


def _rates(spec: SparseDiff, targets: Mapping[str, LayerMask]) -> dict[str, Any]:
    return {module: {"values": mask.astype(np.float32)} for module, mask in targets.items()}


def _settings(spec: SparseDiff, config: BackboneConfig, serving: bool) -> dict[str, Any]:
    return {
        "peft_type": "SHIRA",
        "r": spec.rank,
        # PEFT draws a mask itself only for "random", and reads other masks from the file.
        "mask_type": f"{spec.mask}_entries",
        "target_modules": target_names(_targets(spec, config)),
        "fan_in_fan_out": False,
        "init_weights": True,
    }


def _from_settings(settings: Mapping[str, Any], config: BackboneConfig) -> SparseDiff:
    for key in ("fan_in_fan_out", "exclude_modules"):
        if settings.get(key):
            raise ValueError(f"{key}={settings[key]!r} is not supported")
    targets = settings.get("target_modules") or ()
    mask = str(settings.get("mask_type")).removesuffix("_entries")
    # Masks of other programs are kept as they are, and treated like random ones.
    spec = SparseDiff(
        settings["r"],
        mask if mask in MASKS else "random",
        targets if isinstance(targets, str) else tuple(targets),
    )
    _targets(spec, config)
    return spec


def _tensors(
    spec: SparseDiff, adapter: Any, config: BackboneConfig, serving: bool, base: BaseTensors | None
) -> dict[str, np.ndarray]:
    tensors = {}
    for module, mask in _targets(spec, config).items():
        arrays = adapter[module]
        indices = np.stack([_places(numbers) for numbers in arrays["entries"]])
        tensors |= layer_tensors(module, mask, "shira_weight", arrays["values"])
        tensors |= layer_tensors(module, mask, "shira_indices", indices)
    return tensors


def _from_tensors(
    spec: SparseDiff,
    tensors: dict[str, np.ndarray],
    config: BackboneConfig,
    base: BaseTensors | None,
) -> dict[str, Any]:
    adapter = _empty(spec, config)
    for module, mask in _targets(spec, config).items():
        (k, n), arrays = linear_sizes(config, module), adapter[module]
        entries = spec.rank * (k + n)
        for layer in np.flatnonzero(mask).tolist():
            name = f"{PREFIX}{full_name(module, layer)}"
            values = take_tensor(tensors, f"{name}.shira_weight", (entries,))
            rows, columns = take_tensor(tensors, f"{name}.shira_indices", (2, entries))
            if rows.min() < 0 or columns.min() < 0 or rows.max() >= n or columns.max() >= k:
                raise ValueError(f"an index of {name} is outside of its weight [{n}, {k}]")
            places = rows.astype(np.int64) * k + columns
            chosen, at = np.unique(places, return_inverse=True)
            # PEFT adds up entries that occur twice. Superfluous entries of a mask are all (0, 0).
            np.add.at(arrays["values"][layer], at, np.asarray(values, np.float32))
            arrays["entries"][layer, : len(chosen)] = _numbers(chosen, k)
    return adapter


def _merged(spec: SparseDiff, adapter: Any, config: BackboneConfig) -> Changes:
    def change(module: str, layer: int) -> Callable[[np.ndarray], np.ndarray]:
        arrays = adapter[module]

        def merge(weight: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "n k"]:
            weight = weight.copy()
            # Padding adds 0.
            np.add.at(weight, tuple(_places(arrays["entries"][layer])), arrays["values"][layer])
            return weight

        return merge

    return changed_weights(_targets(spec, config), change)


sparse_diff_kind = AdapterKind(
    "sparse_diff",
    specification=SparseDiff,
    op=_Entries(),
    targets=_targets,
    leaves=_leaves,
    initial=_initial,
    relative_rates=_rates,
    recognise=lambda settings: settings.get("peft_type") == "SHIRA" and not is_columns(settings),
    settings=_settings,
    from_settings=_from_settings,
    tensors=_tensors,
    from_tensors=_from_tensors,
    identity=("rank",),
    merged=_merged,
    work=_work,
    reads_samples=True,
)
