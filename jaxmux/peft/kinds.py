"""The adapter kinds that tasks can use.

The engine, checkpoints and commands look a kind up here, by its name or by the class of a task's
specification. To add a kind, write one file, or two if its folders need much code, and add it to
`KINDS`.
"""

from collections.abc import Mapping
from typing import Any

from jaxmux.left_out import why_left_out
from jaxmux.models import BackboneConfig
from jaxmux.models.adapter_ops import AdapterOps
from jaxmux.planner.costs.pool_spec import KindSize

from . import lora_folder
from .bottleneck_folder import bottleneck_kind
from .diff_pruning import diff_pruning_kind
from .dora import DoRA, dora_kind
from .ia3 import ia3_kind
from .kind import AdapterKind
from .ln_tuning import ln_tuning_kind
from .lora import LoRA, as_stored, initial_adapter, lora_leaves, lora_targets, relative_rates
from .lora_from_weights import lora_from_weights_kind
from .lora_pattern import has_patterns, lora_pattern_kind
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
            or has_patterns(spec)
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
# The class of specifications of each kind, by its name. LoRA, which several kinds share, is listed
# once.
SPECIFICATIONS: dict[str, type] = {
    kind.name: kind.specification
    for kind in KINDS.values()
    if kind.specification is not LoRA or kind is _lora_kind
}


def register_kind(kind: AdapterKind) -> None:
    """Adds an adapter kind, so that tasks can use it. ValueError if there is one of this name."""
    if kind.name in KINDS:
        raise ValueError(f"there is an adapter kind {kind.name!r} already")
    KINDS[kind.name] = kind
    SPECIFICATIONS[kind.name] = kind.specification


def kind_of(specification: Any) -> AdapterKind:
    """The kind to which an adapter specification, for example a `LoRA`, belongs. ValueError if
    there is none."""
    for kind in KINDS.values():
        if isinstance(specification, kind.specification) and kind.serves(specification):
            return kind
    known = ", ".join(cls.__name__ for cls in SPECIFICATIONS.values())
    reason = why_left_out(type(specification).__name__)
    raise ValueError(
        f"adapter should be one of {known}, found {specification!r}{reason and f'; {reason}'}"
    )


def size_of_adapter(specification: Any, config: BackboneConfig) -> KindSize | None:
    """Sizes of a pool for one adapter, without low-rank factors; None for LoRA, which has nothing
    else. ValueError if the adapter does something nowhere in the backbone."""
    kind = kind_of(specification)
    points = list(kind.targets(specification, config))
    return kind.size(kind.rank(specification), points, config) if kind.op else None


def scale_of(specification: Any) -> float:
    """The factor of an adapter's low-rank products in `SlotTable.scale`. It is 0 if the adapter has
    no such products, or if its kind stores the factor among arrays of its own."""
    kind = kind_of(specification)
    return 0.0 if kind.op else specification.scale


def dropout_of(specification: Any) -> float:
    """Dropout rate of the inputs of an adapter's low-rank products; 0 if it has none."""
    kind = kind_of(specification)
    return 0.0 if kind.op and not kind.low_rank else specification.dropout


def ops_of(adapters: Mapping[str, Any]) -> AdapterOps:
    """The operations of the kinds whose pools are in `adapters`, of which only the names are
    read."""
    return tuple((name, KINDS[name].op) for name in sorted(adapters) if KINDS[name].op)
