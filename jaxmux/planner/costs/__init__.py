"""Predicts the time and memory of training on a device, or on the devices of a replica.

`device_models` is the place to begin: it returns a `TimeModel` and a `MemoryModel`, either fitted
to a profile that `jaxmux.profiling` measured or estimated without one. `ReplicaCosts` combines both
for the devices of a replica. `Admission` checks whether tasks fit into memory together.

A remat policy says which values a layer keeps for its backward pass; the backward pass recomputes
the others. From least to most recomputation: "norms" recomputes neither norms nor matrix products;
"dots" recomputes no matrix product; "lean" recomputes the matrix products of the gate and up
projections; "full" keeps only the input of each layer.
"""

from .admission import Admission, FitCell, fastest_fitting, fit_cells, largest_fitting
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
    "FitCell",
    "MemoryModel",
    "PoolSpec",
    "Profile",
    "ProfileError",
    "ReplicaCosts",
    "TimeModel",
    "device_models",
    "fastest_fitting",
    "fit_cells",
    "largest_fitting",
    "measured_models",
    "merge_pool_specs",
]
