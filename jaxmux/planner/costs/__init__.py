"""Predicts the time and memory of training on a device, or on the devices of a replica.

The models take a backbone's sizes (`BackboneSize`), the pool of the tasks (`PoolSpec`), the devices
(`planner.devices.Replica`) and a profile that `jaxmux.profiling` measured, if there is one.
`TimeModel` predicts the seconds of a layer, `MemoryModel` the peak bytes of a round, and
`ReplicaCosts` the seconds and bytes of a microbatch on each stage of a replica. `Admission` checks
whether tasks fit into memory. `device_models` decides whether costs come from a profile or from
estimates.
"""

from .admission import Admission
from .cost_models import PROFILES, CostModels, CostSource, device_models, measured_models
from .device_profile import BackboneSize, Profile, ProfileError
from .memory_model import MemoryModel
from .pool_spec import PoolSpec, merge_pool_specs
from .replica_costs import ReplicaCosts
from .time_model import TimeModel

__all__ = [
    "PROFILES",
    "Admission",
    "BackboneSize",
    "CostModels",
    "CostSource",
    "MemoryModel",
    "PoolSpec",
    "Profile",
    "ProfileError",
    "ReplicaCosts",
    "TimeModel",
    "device_models",
    "measured_models",
    "merge_pool_specs",
]
