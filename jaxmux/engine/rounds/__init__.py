"""Rounds as the host sees them: their microbatches, their place in the data, and their results."""
