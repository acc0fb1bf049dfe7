"""`y = x W + scale[t] · dropout_t(x) A[t] B[t]` for a stream whose chunks belong to different
tasks.
"""

from .api import IMPLEMENTATIONS, Factors, Projection, Routing, grouped_lora_linear
from .base import LOW_RANK

__all__ = ["IMPLEMENTATIONS", "LOW_RANK", "Factors", "Projection", "Routing", "grouped_lora_linear"]
