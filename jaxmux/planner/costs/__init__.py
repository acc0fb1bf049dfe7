"""Predicts the time and memory of training on a device, or on the devices of a replica.

Begin with `device_models`: it returns a `TimeModel` and a `MemoryModel`. They are fitted to a
profile that `jaxmux.profiling` measured, or estimated if there is no profile. `ReplicaCosts`
combines both models for the devices of a replica. `Admission` checks whether tasks fit into memory
together.

A remat policy says which values a layer keeps for its backward pass; the backward pass recomputes
the other values. From least to most recomputation: "norms" recomputes neither norms nor matrix
products; "dots" recomputes norms, but no matrix product; "lean" also recomputes the matrix products
of the gate and up projections; "full" keeps only the input of each layer.
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
