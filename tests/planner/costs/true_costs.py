"""Costs of the magnitude of an H200's, which the fits of the cost models should recover."""

from jaxmux.planner.costs.time_model import AdapterTimes

TRUE_ADAPTERS = AdapterTimes(
    floor=50e-6,
    per_task=5e-6,
    per_token=150e-9,
    per_token_rank=2e-9,
    per_task_rank=1e-6,
    per_chunk_rank=50e-9,
    per_dropped_token=60e-9,
    per_slot_rank=0.4e-6,
)
