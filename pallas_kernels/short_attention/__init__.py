"""Causal attention of short rows."""

from .mosaic_gpu import TOTALS, refusal, short_attention

__all__ = ["TOTALS", "refusal", "short_attention"]
