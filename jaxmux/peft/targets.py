"""Chooses the linears that an adapter changes, by the rules of Hugging Face PEFT, and finds the
tensors of these linears in adapter folders."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool

from jaxmux.models import MODULES, BackboneConfig, linear_sizes
from jaxmux.models.adapter_ops import EMBEDDING, HEAD, OUTSIDE

ALL_LINEAR = "all-linear"
# The names of linears from which users choose: "q_proj" and "self_attn.q_proj".
MODULE_NAMES = frozenset(MODULES) | {module.split(".")[-1] for module in MODULES}
# The points of the tables before and after the layers, by the names from which users choose.
TABLES = {"embed_tokens": EMBEDDING, "model.embed_tokens": EMBEDDING, "lm_head": HEAD}
# The full name of each table, by point.
_TABLE_NAMES = {EMBEDDING: "model.embed_tokens", HEAD: "lm_head"}
# For each layer, whether a module is adapted in it.
LayerMask = Bool[np.ndarray, "L"]

# Largest size of an adapter's inner arrays, as a multiple of the widest linear's width.
_MOST_WIDTHS = 8
PREFIX = "base_model.model."


def resolve_targets(
    target_modules: str | tuple[str, ...], config: BackboneConfig
) -> dict[str, LayerMask]:
    """Chooses the linears that an adapter changes, by the rules of Hugging Face PEFT.

    Args:
      target_modules: "all-linear" (all linears of attention and MLP), a name ("q_proj") or a tuple
        of names, or one regular expression. A linear is adapted if its full name (`full_name`)
        equals one of the names, or ends with a dot and one of the names, or if the expression
        matches the whole full name.

    Returns:
      By path of a linear within a layer ("self_attn.q_proj"), a bool mask [L] of the layers in
      which it is adapted. Linears that are adapted in no layer are left out. Functions of
      `jaxmux.peft` take this result as `targets`.

    Raises:
      ValueError: `target_modules` is empty, a name or the expression matches no linear that can
        carry an adapter, or the expression is not valid.
    """
    masks = {module: np.zeros(config.num_layers, bool) for module in MODULES}
    # A single name is not treated as an expression, because no full name would match it as a whole.
    is_expression = isinstance(target_modules, str) and target_modules not in MODULE_NAMES
    patterns = (target_modules,) if isinstance(target_modules, str) else target_modules
    if not target_modules:
        raise ValueError("target_modules is empty")
    for pattern in patterns:
        has_match = False
        for module, mask in masks.items():
            for layer in range(config.num_layers):
                if _matches(pattern, full_name(module, layer), is_expression):
                    mask[layer] = has_match = True
        if not has_match:
            names = ", ".join(m.split(".")[-1] for m in MODULES)
            raise ValueError(
                f"target_modules: {pattern!r} matches no linear of the backbone; "
                f"a full name is {full_name(MODULES[0], 0)!r}, the names are {names}"
            )
    return {module: mask for module, mask in masks.items() if mask.any()}


def tables_among(target_modules: Any) -> list[str]:
    """The points of the tables that `target_modules` names, sorted. Expressions and values of other
    types name no table."""
    names = [target_modules] if isinstance(target_modules, str) else target_modules
    names = names if isinstance(names, list | tuple) else []
    return sorted({TABLES[name] for name in names if isinstance(name, str) and name in TABLES})


def linears_among(target_modules: str | tuple[str, ...]) -> str | tuple[str, ...]:
    if isinstance(target_modules, str):
        return () if target_modules in TABLES else target_modules
    return tuple(name for name in target_modules if name not in TABLES)


def linears_of(points: Mapping[str, Any]) -> dict[str, Any]:
    """The values at linears, from values by point."""
    return {point: value for point, value in points.items() if point not in OUTSIDE}


def target_names(targets: Mapping[str, LayerMask]) -> list[str]:
    """The shortest names that choose exactly these linears, sorted, as exported adapters record
    them: the last part of the name ("q_proj") for a module that is adapted in every layer, and full
    names for other modules. Expressions are not recorded, because PEFT would match them with all
    modules."""
    names = []
    for module, mask in targets.items():
        some = [full_name(module, layer) for layer in np.flatnonzero(mask)]
        names += [module.split(".")[-1]] if mask.all() else some
    return sorted(names)


def refuse_size(field: str, size: int, config: BackboneConfig) -> None:
    """Raises ValueError if the size of an adapter's inner arrays is more than 8 times the width of
    the widest linear. The message names `field` of the specification."""
    widest = max(max(linear_sizes(config, module)) for module in MODULES)
    if size > _MOST_WIDTHS * widest:
        raise ValueError(
            f"{field} is {size}, more than {_MOST_WIDTHS} times the width {widest} of the "
            f"backbone's widest linear; lower {field}"
        )


def full_name(module: str, layer: int) -> str:
    """The name in Hugging Face models ("model.layers.3.self_attn.q_proj") of a linear in a layer,
    counted from 0. For a table, the layer has no effect."""
    return _TABLE_NAMES.get(module) or f"model.layers.{layer}.{module}"


def _matches(pattern: str, name: str, is_expression: bool) -> bool:
    if not is_expression:
        return name == pattern or name.endswith(f".{pattern}")
    if pattern == ALL_LINEAR:
        return True
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as e:
        raise ValueError(
            f"target_modules: {pattern!r} is no valid regular expression: {e}"
        ) from None


def layer_tensors(
    module: str, mask: LayerMask, name: str, values: np.ndarray
) -> dict[str, np.ndarray]:
    """The tensors of one parameter of a module, for example "lora_A.weight", in all layers in which
    the module is adapted. `values` [L, ...] are those of all layers."""
    return {
        f"{PREFIX}{full_name(module, layer)}.{name}": np.ascontiguousarray(values[layer])
        for layer in np.flatnonzero(mask)
    }


def take_layers(
    tensors: dict[str, np.ndarray], module: str, mask: LayerMask, names: Mapping[str, tuple]
) -> dict[str, dict[int, np.ndarray]]:
    """Removes the tensors of a module from `tensors` and returns them by name and layer. `names`
    gives the shape of each parameter in one layer. Raises ValueError if a tensor is missing or has
    another shape.

    All tensors are checked before anything is allocated for all layers, because the file determines
    sizes.
    """
    taken: dict[str, dict[int, np.ndarray]] = {name: {} for name in names}
    for layer in np.flatnonzero(mask):
        for name, shape in names.items():
            full = f"{PREFIX}{full_name(module, layer)}.{name}"
            taken[name][int(layer)] = take_tensor(tensors, full, shape)
    return taken


def take_tensor(tensors: dict[str, np.ndarray], name: str, shape: tuple) -> np.ndarray:
    """Removes one tensor from `tensors` and returns it. Raises ValueError if it is missing or has
    another shape."""
    if name not in tensors:
        raise ValueError(f"tensor {name} is missing")
    tensor = tensors.pop(name)
    if tensor.shape != shape:
        raise ValueError(
            f"tensor {name} has shape {list(tensor.shape)}, rank and backbone imply {list(shape)}"
        )
    return tensor


def stacked(by_layer: Mapping[int, np.ndarray], layers: int, empty: np.ndarray) -> np.ndarray:
    """Stacks arrays of some layers to one float32 array [L, ...]; other layers get `empty`."""
    values = np.repeat(np.asarray(empty, np.float32)[None], layers, axis=0)
    for layer, value in by_layer.items():
        values[layer] = value
    return values
