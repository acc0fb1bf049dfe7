"""Planning on the host, before anything runs on a device.

`packing` lays samples out in microbatches. `costs` predicts the time and memory of training.
`pipeline` orders microbatches over pipeline stages. `replicas` divides samples among replicas.
`devices` describes stages, replicas and deployments as values. No module of this package imports
device code. Every planner error is a `PlanningError`, a `ValueError` whose message names the limit.
"""

from .errors import PlanningError

__all__ = ["PlanningError"]
