"""The adapter kinds that tasks can use, and the pool, which stacks the adapters of all slots.

The engine, checkpoints and commands look a kind up here, by its name or by the class of a task's
specification. To add a kind, write one file, or two if its folders need much code, and add it to
`KINDS`.

A pool has the largest rank and all modules of its tasks. For one task, higher ranks and modules
that it does not adapt are padding; `crop` removes it and `pad` adds it. LoRA's padding is zero and
stays zero in training: the gradient of a zero column of A is a product with the zero row of B, and
the gradient of this row of B is a product with the zero column of A.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxmux.field_checks import why_left_out
from jaxmux.models import BackboneConfig
from jaxmux.models.adapter_ops import LOW_RANK_KIND, AdapterOps
from jaxmux.planner.costs.pool_spec import KindSize

from . import lora_folder
from .bottleneck_folder import bottleneck_kind
from .diff_pruning import diff_pruning_kind
from .dora import DoRA, dora_kind
from .ia3 import ia3_kind
from .kind import AdapterKind
from .leaves import LeafSpec, named_leaves
from .ln_tuning import ln_tuning_kind
from .lora import (
    Adapter,
    LoRA,
    as_stored,
    initial_adapter,
    lora_leaves,
    lora_targets,
    relative_rates,
)
from .lora_from_weights import lora_from_weights_kind
from .lora_pattern import lora_pattern_kind
from .lora_tables import lora_tables_kind
from .lora_tokens import lora_tokens_kind
from .prompt_tuning import prompt_tuning_kind
from .sparse_diff import sparse_diff_kind
from .trained_tokens import trained_tokens_kind
from .vera import vera_kind

_lora_kind = AdapterKind(
    "lora",
    specification=LoRA,
    op=None,
    targets=lora_targets,
    leaves=lora_leaves,
    initial=initial_adapter,
    relative_rates=relative_rates,
    recognise=lora_folder.is_plain,
    settings=lora_folder.settings,
    from_settings=lora_folder.from_settings,
    tensors=lora_folder.tensors,
    from_tensors=lora_folder.from_tensors,
    identity=("rank", "alpha", "rslora"),
    rank=lambda spec: spec.common_rank,
    serves=lambda spec: (
        not (
            isinstance(spec, DoRA)
            or spec.has_patterns
            or spec.begins_at_weight
            or spec.adapts_tables
        )
    ),
    merged=lora_folder.merged,
    as_stored=as_stored,
    reads_samples=True,
)

# All adapter kinds by name.
KINDS: dict[str, AdapterKind] = {
    kind.name: kind
    for kind in (
        _lora_kind,
        dora_kind,
        lora_pattern_kind,
        lora_from_weights_kind,
        lora_tables_kind,
        lora_tokens_kind,
        ia3_kind,
        ln_tuning_kind,
        bottleneck_kind,
        diff_pruning_kind,
        vera_kind,
        sparse_diff_kind,
        prompt_tuning_kind,
        trained_tokens_kind,
    )
}
# The class of specifications of each kind, by the kind's name. Several kinds share LoRA, which is
# listed once.
SPECIFICATIONS: dict[str, type] = {
    kind.name: kind.specification
    for kind in KINDS.values()
    if kind.specification is not LoRA or kind is _lora_kind
}
# The NumPy arrays of one task, by path ("adapter/mlp.up_proj/a"), at the task's own rank and
# modules. Checkpoints have this form.
SlotArrays = dict[str, np.ndarray]


def register_kind(kind: AdapterKind) -> None:
    """Adds an adapter kind, so that tasks can use it. Raises ValueError if its name is taken."""
    if kind.name in KINDS:
        raise ValueError(f"there is an adapter kind {kind.name!r} already")
    KINDS[kind.name] = kind
    SPECIFICATIONS[kind.name] = kind.specification


def kind_of(specification: Any) -> AdapterKind:
    """The kind of an adapter specification, for example of a `LoRA`. Raises ValueError if there is
    none."""
    for kind in KINDS.values():
        if isinstance(specification, kind.specification) and kind.serves(specification):
            return kind
    known = ", ".join(cls.__name__ for cls in SPECIFICATIONS.values())
    reason = why_left_out(type(specification).__name__)
    raise ValueError(
        f"adapter should be one of {known}, found {specification!r}{reason and f'; {reason}'}"
    )


def size_of_adapter(specification: Any, config: BackboneConfig) -> KindSize | None:
    """Sizes of a pool for one adapter, without low-rank factors; None for LoRA, which has only
    these. Raises ValueError if the adapter has no place in the backbone."""
    kind = kind_of(specification)
    points = list(kind.targets(specification, config))
    return kind.size(kind.rank(specification), points, config) if kind.op else None


def scale_of(specification: Any) -> float:
    """The scale of an adapter's low-rank products in `SlotTable.scale`. It is 0 if the adapter has
    no such products, or if its kind stores the scale among its own arrays."""
    kind = kind_of(specification)
    return 0.0 if kind.op else specification.scale


def dropout_of(specification: Any) -> float:
    """Dropout rate of the inputs of an adapter's low-rank products; 0 if there are no such
    products."""
    kind = kind_of(specification)
    return 0.0 if kind.op and not kind.low_rank else specification.dropout


def ops_of(adapters: Mapping[str, Any]) -> AdapterOps:
    """The operations of the kinds whose names are keys of `adapters`."""
    return tuple((name, KINDS[name].op) for name in sorted(adapters) if KINDS[name].op)


def empty_pool(config: BackboneConfig, modules: Sequence[str], slots: int, rank: int) -> Adapter:
    """The LoRA arrays for several tasks before any task uses them: zero factors.

    Args:
      modules: paths of the adapted linears within a layer, for example "mlp.up_proj".
      slots: number of slots T, one for each task.
      rank: rank R of the pool, at least the largest rank of any task.

    Returns:
      By path of a linear, `Factors` with a [L, T, k, R] and b [L, T, R, n], float32.

    Raises:
      KeyError: a path names no linear.
    """
    return jax.tree.map(LeafSpec.empty, lora_leaves(config, modules, slots, rank))


def own_leaves(spec: Any, modules: Sequence[str], config: BackboneConfig) -> Any:
    """Describes the arrays of one adapter alone: with a single slot, its own rank and its own
    modules. `modules` are the points at which the adapter does something, the keys of
    `AdapterKind.targets`.

    Returns a tree of `LeafSpec`, with the modules as keys and a slot axis of size 1. With this
    tree, without the slot axis (`LeafSpec.of_slot`), `crop` cuts the adapter out of a larger pool.
    Raises ValueError if no kind has such a specification.
    """
    kind = kind_of(spec)
    pools = {kind.name: kind.leaves(config, modules, 1, kind.rank(spec))}
    if kind.low_rank:
        rank = kind.rank_in(LOW_RANK_KIND, spec)
        pools[LOW_RANK_KIND] = lora_leaves(config, modules, 1, rank)
    return kind.from_pools(pools)


def crop(tree: Any, own: Any) -> SlotArrays:
    """Cuts the arrays of a task out of its slot, which has the largest rank and all modules of any
    task. The inverse is `pad`.

    Args:
      tree: arrays of one slot, without the slot axis, at the pool's rank and modules. They are
        copied to the host as a whole.
      own: tree of `LeafSpec` with the task's own shapes and modules, without the slot axis.

    Returns:
      The task's arrays as NumPy arrays, by their path in the tree ("mlp.up_proj/a").

    Raises:
      KeyError: `tree` lacks an array that `own` describes.
    """
    leaves = named_leaves(tree)
    return {
        name: np.asarray(np.asarray(leaves[name])[tuple(map(slice, spec.shape))], order="C")
        for name, spec in named_leaves(own).items()
    }


def pad(arrays: Mapping[str, np.ndarray], specs: Any) -> Any:
    """Enlarges the arrays of a task, by path, to the size of a slot. The inverse is `crop`.

    Args:
      specs: tree of `LeafSpec` of the slot, at the pool's rank and modules, without the slot axis.

    Returns:
      A tree of NumPy arrays with the structure of `specs`. Ranks and modules that the task does not
      have hold the padding value of their `LeafSpec`.

    Raises:
      ValueError: `specs` does not describe one of the arrays, describes it with a smaller size or
        another number of axes, or describes a scalar that `arrays` lacks.
    """
    used = set()

    def fill(name: str, spec: LeafSpec) -> np.ndarray:
        if name not in arrays:
            if not spec.axes:
                raise ValueError(f"{name} is missing")
            return _empty(spec)
        used.add(name)
        value = np.asarray(arrays[name], spec.dtype)
        missing = [full - size for full, size in zip(spec.shape, value.shape, strict=True)]
        if min(missing, default=0) < 0:
            raise ValueError(f"{name} has shape {value.shape}, its place {spec.shape}")
        if not any(missing):
            return value
        padded = _empty(spec)
        padded[tuple(map(slice, value.shape))] = value
        return padded

    filled = [fill(name, spec) for name, spec in named_leaves(specs).items()]
    if unknown := sorted(set(arrays) - used):
        raise ValueError(f"no place for {unknown[0]}")
    return jax.tree.unflatten(jax.tree.structure(specs), filled)


def _empty(spec: LeafSpec) -> np.ndarray:
    if spec.padding:
        return np.full(spec.shape, spec.padding, spec.dtype)
    # Tasks wait for this array between two rounds. The operating system provides zeroed memory
    # without writing it, which is several times as fast as `np.pad` for large backbones.
    return np.zeros(spec.shape, spec.dtype)


def adapter_of(arrays: SlotArrays, spec: Any, config: BackboneConfig) -> Any:
    """Extracts a task's adapter from the arrays in its checkpoint, for example to export it.
    `arrays` are the task's arrays by path, from `runs.read_task` or `Engine.task_arrays`.

    Returns:
      The adapter at its own rank. For LoRA: by path of a linear within a layer ("mlp.up_proj"), the
      NumPy arrays a [L, k, r] and b [L, r, n].

    Raises:
      ValueError: the adapter has no place in the backbone.
      KeyError: `arrays` lacks an array of the adapter.
    """
    specs = own_leaves(spec, list(kind_of(spec).targets(spec, config)), config)
    values = [np.asarray(arrays[f"adapter/{name}"]) for name in named_leaves(specs)]
    return jax.tree.unflatten(jax.tree.structure(specs), values)
