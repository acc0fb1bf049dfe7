"""`y = x W + scale[t] · dropout_t(x) A[t] B[t]` for a stream whose chunks belong to different
tasks.
"""

from .api import Projection, Routing, grouped_lora_linear

__all__ = ["Projection", "Routing", "grouped_lora_linear"]
