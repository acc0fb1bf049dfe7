"""The grouped LoRA linear: `y = x W + scale[t] · dropout_t(x) A[t] B[t]` for a stream whose chunks
belong to different tasks t."""

from .api import IMPLEMENTATIONS, IN_ORDER, Factors, Projection, Routing, grouped_lora_linear
from .base import GATE, LOW_RANK, UP

__all__ = [
    "IMPLEMENTATIONS",
    "IN_ORDER",
    "GATE",
    "LOW_RANK",
    "UP",
    "Factors",
    "Projection",
    "Routing",
    "grouped_lora_linear",
]
