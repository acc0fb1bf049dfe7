"""Host-side planning: which samples share a microbatch, what training them takes, which microbatch
runs when, and which replica takes which samples. Imports no device code.

`packing` lays samples out in microbatches, `costs` predicts time and memory, `pipeline` orders
microbatches over pipeline stages, `replicas` divides samples among replicas. `devices` holds the
values that name devices.
"""

from .errors import PlanningError

__all__ = ["PlanningError"]
