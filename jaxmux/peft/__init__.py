"""Adapter kinds (LoRA), the pool that stacks them over slots, and Hugging Face PEFT folders."""

from .lora import Adapter, Factors, LoRA, initial_adapter
from .peft_folder import AdapterError, export_adapter, import_adapter
from .pool import SlotArrays, adapter_of, empty_pool, slot_arrays, slot_tree
from .targets import LayerMask, full_name, resolve_targets

__all__ = [
    "Adapter",
    "AdapterError",
    "LayerMask",
    "LoRA",
    "Factors",
    "SlotArrays",
    "adapter_of",
    "empty_pool",
    "export_adapter",
    "full_name",
    "import_adapter",
    "initial_adapter",
    "resolve_targets",
    "slot_arrays",
    "slot_tree",
]
