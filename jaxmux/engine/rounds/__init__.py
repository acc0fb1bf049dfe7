"""Rounds on the host: their microbatches, the position within them, and their results."""
