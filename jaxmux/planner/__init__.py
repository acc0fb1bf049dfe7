"""Planning on the host, before anything runs on a device.

No module of this package imports device code. Every planner error is a `PlanningError`, a
`ValueError` whose message names the limit.
"""

from .errors import PlanningError

__all__ = ["PlanningError"]
