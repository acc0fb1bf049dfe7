"""Compares adapters with the bare backbone on held-out data."""

from .cases import EvalCase
from .completions import matches_of
from .losses import losses_of

__all__ = ["EvalCase", "losses_of", "matches_of"]
