"""Adapter kinds (LoRA), the pool that stacks the adapters of all tasks, and PEFT folders.

A *slot* is the place of one task in the pool. A *module* is the path of a linear within a layer,
for example "mlp.up_proj". Shapes use L layers, T slots, k and n for the input and output width of a
linear, r for the rank of a task's adapter, and R for the rank of the pool.
"""

from .kinds import KINDS, AdapterKind, kind_of
from .leaves import Layout, LeafSpec
from .lora import Adapter, Factors, LoRA, initial_adapter
from .peft_folder import AdapterError, export_adapter, import_adapter, is_adapter_folder
from .pool import SlotArrays, adapter_of, crop, empty_pool, own_leaves, pad
from .targets import LayerMask, full_name, resolve_targets

__all__ = [
    "KINDS",
    "Adapter",
    "AdapterError",
    "AdapterKind",
    "Factors",
    "LayerMask",
    "Layout",
    "LeafSpec",
    "LoRA",
    "SlotArrays",
    "adapter_of",
    "crop",
    "empty_pool",
    "export_adapter",
    "full_name",
    "import_adapter",
    "initial_adapter",
    "is_adapter_folder",
    "kind_of",
    "own_leaves",
    "pad",
    "resolve_targets",
]
