"""Compares adapters with the bare backbone on held-out data."""

from .completions import matches_of
from .losses import EvalCase, losses_of

__all__ = ["EvalCase", "losses_of", "matches_of"]
