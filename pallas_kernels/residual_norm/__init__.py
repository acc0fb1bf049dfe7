"""`stream = x + branch` and its RMS norm, in one pass over memory."""

from .api import IMPLEMENTATIONS, residual_norm
from .base import STREAM

__all__ = ["IMPLEMENTATIONS", "STREAM", "residual_norm"]
