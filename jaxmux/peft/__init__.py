"""Adapter kinds (LoRA), the pool that stacks them over slots, and Hugging Face PEFT folders."""

from .kinds import KINDS, AdapterKind, kind_of
from .leaves import Layout, LeafSpec
from .lora import Adapter, Factors, LoRA, initial_adapter
from .peft_folder import AdapterError, export_adapter, import_adapter
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
    "kind_of",
    "own_leaves",
    "pad",
    "resolve_targets",
]
