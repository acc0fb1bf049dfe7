"""Adapter kinds, the pool that stacks the adapters of all tasks, and PEFT folders.

A *slot* is the place of one task in the pool. A *module* is the path of a linear within a layer,
for example "mlp.up_proj". Shapes use L layers, T slots, k and n for the input and output width of a
linear, r for the rank of a task's adapter, and R for the rank of the pool.
"""

from .bottleneck import Bottleneck
from .diff_pruning import DiffPruning
from .dora import DoRA
from .ia3 import IA3
from .kind import AdapterKind
from .kinds import (
    KINDS,
    SPECIFICATIONS,
    SlotArrays,
    adapter_of,
    crop,
    dropout_of,
    empty_pool,
    kind_of,
    ops_of,
    own_leaves,
    pad,
    register_kind,
    scale_of,
    size_of_adapter,
)
from .leaves import Layout, LeafSpec
from .ln_tuning import LNTuning
from .lora import Adapter, Factors, LoRA, initial_adapter
from .merged_checkpoint import write_merged
from .model_card import Notes
from .peft_folder import (
    AdapterError,
    adapter_tokenizer,
    export_adapter,
    import_adapter,
    is_adapter_folder,
    trained_on,
)
from .prompt_tuning import PromptTuning
from .sparse_diff import SparseDiff
from .targets import LayerMask, full_name, resolve_targets
from .trained_tokens import TrainedTokens
from .vera import VeRA

__all__ = [
    "IA3",
    "KINDS",
    "SPECIFICATIONS",
    "Adapter",
    "AdapterError",
    "AdapterKind",
    "Bottleneck",
    "DiffPruning",
    "DoRA",
    "Factors",
    "LNTuning",
    "LayerMask",
    "Layout",
    "LeafSpec",
    "LoRA",
    "Notes",
    "PromptTuning",
    "SlotArrays",
    "SparseDiff",
    "TrainedTokens",
    "VeRA",
    "adapter_of",
    "adapter_tokenizer",
    "crop",
    "dropout_of",
    "empty_pool",
    "export_adapter",
    "full_name",
    "import_adapter",
    "initial_adapter",
    "is_adapter_folder",
    "kind_of",
    "ops_of",
    "own_leaves",
    "pad",
    "register_kind",
    "resolve_targets",
    "scale_of",
    "size_of_adapter",
    "trained_on",
    "write_merged",
]
