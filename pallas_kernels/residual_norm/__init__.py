"""The RMS norm of a residual stream; its backward pass also adds the stream's own gradient."""

from .api import IMPLEMENTATIONS, residual_norm

__all__ = ["IMPLEMENTATIONS", "residual_norm"]
