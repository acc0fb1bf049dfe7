"""Planning on the host, before anything runs on a device.

`packing` lays samples out in microbatches, `costs` predicts the time and memory of training,
`pipeline` orders microbatches over pipeline stages, and `replicas` divides samples among replicas.
`devices` describes devices as values. No module of this package imports device code.
"""

from .errors import PlanningError

__all__ = ["PlanningError"]
