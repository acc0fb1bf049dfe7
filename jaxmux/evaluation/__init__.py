"""Compares adapters with the bare backbone on held-out data."""

from .completions import matches_of
from .losses import EvalCase, HeldOutData, losses_of
from .scores import Score, scores_of

__all__ = ["EvalCase", "HeldOutData", "Score", "losses_of", "matches_of", "scores_of"]
