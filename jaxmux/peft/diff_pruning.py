"""Diff-Pruning with fixed masks of columns: sparse differences of weights (Guo et al. 2021)."""

import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmux.field_checks import Count, Names, checked_dataclass
from jaxmux.models import BackboneConfig, linear_sizes
from jaxmux.models.adapter_ops import AdapterOp, matmul_of_chunks

from .kind import AdapterKind, BaseTensors, Changes, changed_weights
from .leaves import LeafSpec
from .targets import (
    PREFIX,
    LayerMask,
    full_name,
    layer_tensors,
    resolve_targets,
    take_tensor,
    target_names,
)

# PEFT's `mask_type` for masks of whole columns, with the number of columns.
_MASK_TYPE = re.compile(r"columns_(\d+)")


@checked_dataclass
class DiffPruning:
    """Some columns of the weights of linears are trained: `y = x W + x[:, S] V`.

    S are `columns` features of the linear's input, drawn at random for every linear and layer from
    the task's seed. V begins at 0. This is Diff-Pruning (Guo et al. 2021) with a mask that is
    chosen once. It is exported in the format of Hugging Face PEFT's SHiRA, whose masks are also
    chosen once. V is stored separately from the weights, in float32. When an adapter is added to
    bfloat16 weights, as in `peft` and in a merge, changes that are small compared with a weight are
    lost.

    Attributes:
      columns: number of features of each linear's input.
      target_modules: the linears that are adapted, chosen as `LoRA.target_modules`.

    Raises:
      ValueError: a value is outside its range.
    """

    columns: Count = 32
    target_modules: Names = ("q_proj", "v_proj")


class _Columns(AdapterOp):
    """Adds the products of some input features and trained rows. "columns" counts features from 1;
    0 marks padding."""

    def linear_output(self, own, x, y, first_column):
        index = own["columns"] - 1 - first_column
        inside = (own["columns"] > 0) & (index >= 0) & (index < x.shape[-1])
        taken = jnp.take_along_axis(x, jnp.clip(index, 0, x.shape[-1] - 1)[:, None], axis=2)
        return y + matmul_of_chunks(jnp.where(inside[:, None], taken, 0), own["values"])


def is_columns(settings: Mapping[str, Any]) -> bool:
    """Whether an adapter_config.json of PEFT's SHiRA has a mask of whole columns."""
    kind = settings.get("mask_type")
    return isinstance(kind, str) and _MASK_TYPE.fullmatch(kind) is not None


def _targets(spec: DiffPruning, config: BackboneConfig) -> dict[str, LayerMask]:
    targets = resolve_targets(spec.target_modules, config)
    for module in targets:
        if spec.columns > (width := linear_sizes(config, module)[0]):
            raise ValueError(f"columns is {spec.columns}, but the input of {module} has {width}")
    return targets


def _leaves(config: BackboneConfig, points: Sequence[str], slots: int, rank: int) -> dict[str, Any]:
    sizes, both = (config.num_layers, slots), ("layer", "slot")

    def of(module: str) -> dict[str, LeafSpec]:
        n = linear_sizes(config, module)[1]
        return {
            "values": LeafSpec((*sizes, rank, n), (*both, "rank", "output")),
            "columns": LeafSpec((*sizes, rank), (*both, "rank"), trained=False, dtype="int32"),
        }

    return {module: of(module) for module in points}


def _initial(
    spec: DiffPruning,
    targets: Mapping[str, LayerMask],
    config: BackboneConfig,
    seed: int,
    base: BaseTensors | None,
) -> dict[str, Any]:
    adapter = {}
    for module, mask in targets.items():
        k, n = linear_sizes(config, module)
        columns = np.zeros((config.num_layers, spec.columns), np.int32)
        for layer in np.flatnonzero(mask):
            rng = np.random.default_rng([seed, zlib.crc32(module.encode()), int(layer)])
            columns[layer] = 1 + np.sort(rng.choice(k, spec.columns, replace=False))
        values = np.zeros((config.num_layers, spec.columns, n), np.float32)
        adapter[module] = {"values": values, "columns": columns}
    return adapter


def _rates(spec: DiffPruning, targets: Mapping[str, LayerMask]) -> dict[str, Any]:
    return {module: {"values": mask.astype(np.float32)} for module, mask in targets.items()}


def _entries_per_width(spec: DiffPruning, config: BackboneConfig) -> int:
    """PEFT's r, with which every module has r (k + n) entries. Entries that are not needed lie at
    (0, 0) and have the value 0."""
    sizes = [linear_sizes(config, module) for module in _targets(spec, config)]
    return max(math.ceil(spec.columns * n / (k + n)) for k, n in sizes)


def _settings(spec: DiffPruning, config: BackboneConfig, serving: bool) -> dict[str, Any]:
    return {
        "peft_type": "SHIRA",
        "r": _entries_per_width(spec, config),
        # PEFT draws a mask itself only for "random", and reads other masks from the file.
        "mask_type": f"columns_{spec.columns}",
        "target_modules": target_names(_targets(spec, config)),
        "fan_in_fan_out": False,
        "init_weights": True,
    }


def _from_settings(settings: Mapping[str, Any], config: BackboneConfig) -> DiffPruning:
    match = _MASK_TYPE.fullmatch(settings["mask_type"])
    targets = settings.get("target_modules") or ()
    spec = DiffPruning(int(match[1]), targets if isinstance(targets, str) else tuple(targets))
    _targets(spec, config)
    return spec


def _tensors(
    spec: DiffPruning, adapter: Any, config: BackboneConfig, serving: bool, base: BaseTensors | None
) -> dict[str, np.ndarray]:
    r, layers, tensors = _entries_per_width(spec, config), config.num_layers, {}
    for module, mask in _targets(spec, config).items():
        k, n = linear_sizes(config, module)
        weights = np.zeros((layers, r * (k + n)), np.float32)
        indices = np.zeros((layers, 2, r * (k + n)), np.int32)
        entries = spec.columns * n
        for layer in np.flatnonzero(mask):
            # PEFT's order: row by row of the weight [n, k].
            weights[layer, :entries] = adapter[module]["values"][layer].T.reshape(-1)
            indices[layer, 0, :entries] = np.repeat(np.arange(n), spec.columns)
            indices[layer, 1, :entries] = np.tile(adapter[module]["columns"][layer] - 1, n)
        tensors |= layer_tensors(module, mask, "shira_weight", weights)
        tensors |= layer_tensors(module, mask, "shira_indices", indices)
    return tensors


def _from_tensors(
    spec: DiffPruning,
    tensors: dict[str, np.ndarray],
    config: BackboneConfig,
    base: BaseTensors | None,
) -> dict[str, Any]:
    targets, r = _targets(spec, config), _entries_per_width(spec, config)
    adapter = _initial(spec, targets, config, 0, base)
    for module, mask in targets.items():
        k, n = linear_sizes(config, module)
        for layer in np.flatnonzero(mask).tolist():
            name = f"{PREFIX}{full_name(module, layer)}"
            values = take_tensor(tensors, f"{name}.shira_weight", (r * (k + n),))
            rows, columns = take_tensor(tensors, f"{name}.shira_indices", (2, r * (k + n)))
            entries = spec.columns * n
            chosen = columns[: spec.columns]
            whole = np.array_equal(rows[:entries], np.repeat(np.arange(n), spec.columns))
            if not (whole and np.array_equal(columns[:entries], np.tile(chosen, n))):
                raise ValueError(f"the entries of {name} are not whole columns")
            adapter[module]["columns"][layer] = chosen + 1
            adapter[module]["values"][layer] = values[:entries].reshape(n, spec.columns).T
    return adapter


def _merged(spec: DiffPruning, adapter: Any, config: BackboneConfig) -> Changes:
    def change(module: str, layer: int) -> Callable[[np.ndarray], np.ndarray]:
        arrays = adapter[module]

        def merge(weight: np.ndarray) -> np.ndarray:
            weight = weight.copy()
            weight[:, arrays["columns"][layer] - 1] += arrays["values"][layer].T
            return weight

        return merge

    return changed_weights(_targets(spec, config), change)


diff_pruning_kind = AdapterKind(
    "diff_pruning",
    specification=DiffPruning,
    op=_Columns(),
    targets=_targets,
    leaves=_leaves,
    initial=_initial,
    relative_rates=_rates,
    recognise=lambda settings: settings.get("peft_type") == "SHIRA" and is_columns(settings),
    settings=_settings,
    from_settings=_from_settings,
    tensors=_tensors,
    from_tensors=_from_tensors,
    identity=("columns",),
    merged=_merged,
    rank=lambda spec: spec.columns,
    size_field="columns",
)
