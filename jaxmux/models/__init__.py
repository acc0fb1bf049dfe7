"""The frozen backbone: Llama-family decoders as pure functions of their weights, and Hugging Face
checkpoints."""

from .adapted_linears import Adapters
from .adapter_ops import AdapterOp, matmul_of_chunks
from .architectures import BACKBONE_FORMATS, MODULES, BackboneConfig, has_bias, linear_sizes
from .attention import pick_implementation
from .attention_cache import cache_bytes, empty_cache
from .backbone import (
    Backbone,
    backbone_dtype,
    check_backbone,
    load_backbone,
    resolve_backbone,
    save_backbone,
)
from .cached_forward import cached_hidden_states
from .calibration import FIRST_READERS, Calibration, calibration_of
from .checkpoint_reader import CheckpointReader, Progress, checkpoint_tensors
from .device_memory import (
    DeviceBytes,
    device_memory,
    device_peak,
    devices_bytes,
    free_memory,
    keep_small_arrays_together,
)
from .errors import BackboneError
from .fingerprint import backbone_fingerprint, may_be_the_same
from .forward import ForwardOptions, SlotTable, hidden_states, kept_bytes
from .head import head_kernel, logits_of, microbatch_log_probs, microbatch_losses
from .loss import TokenLosses, block_bytes, chunk_losses
from .modules import Weights, compute_dtype
from .quantised.writing import cached_checkpoint, write_quantised
from .remat_policies import NAMED_POLICIES, REMAT_POLICIES, planned_remat

__all__ = [
    "BACKBONE_FORMATS",
    "FIRST_READERS",
    "MODULES",
    "NAMED_POLICIES",
    "REMAT_POLICIES",
    "AdapterOp",
    "Adapters",
    "Backbone",
    "BackboneConfig",
    "BackboneError",
    "Calibration",
    "CheckpointReader",
    "Progress",
    "DeviceBytes",
    "ForwardOptions",
    "SlotTable",
    "TokenLosses",
    "Weights",
    "backbone_dtype",
    "backbone_fingerprint",
    "block_bytes",
    "cache_bytes",
    "cached_checkpoint",
    "cached_hidden_states",
    "calibration_of",
    "check_backbone",
    "checkpoint_tensors",
    "chunk_losses",
    "compute_dtype",
    "device_memory",
    "device_peak",
    "devices_bytes",
    "empty_cache",
    "free_memory",
    "has_bias",
    "head_kernel",
    "hidden_states",
    "keep_small_arrays_together",
    "kept_bytes",
    "linear_sizes",
    "load_backbone",
    "may_be_the_same",
    "logits_of",
    "matmul_of_chunks",
    "microbatch_log_probs",
    "microbatch_losses",
    "pick_implementation",
    "planned_remat",
    "resolve_backbone",
    "save_backbone",
    "write_quantised",
]
