"""The frozen backbone: Llama-family decoders, their mathematics as pure functions, Hugging Face
checkpoints.
"""

from .adapted_linears import MODULES, Adapters
from .architectures import BackboneConfig, BackboneError
from .attention import pick_implementation
from .backbone import Backbone, load_backbone, save_backbone
from .forward import ForwardOptions, SlotTable, head_kernel, hidden_states
from .loss import block_bytes, chunk_losses
from .memory import device_memory, device_peak, kept_bytes
from .modules import Weights
from .remat_policies import NAMED_POLICIES, REMAT_POLICIES, planned_remat

__all__ = [
    "MODULES",
    "NAMED_POLICIES",
    "REMAT_POLICIES",
    "Adapters",
    "Backbone",
    "BackboneConfig",
    "BackboneError",
    "ForwardOptions",
    "SlotTable",
    "Weights",
    "block_bytes",
    "chunk_losses",
    "device_memory",
    "device_peak",
    "head_kernel",
    "hidden_states",
    "kept_bytes",
    "load_backbone",
    "pick_implementation",
    "planned_remat",
    "save_backbone",
]
