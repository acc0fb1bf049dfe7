"""Whether a tuning server fits into the memory of its devices (mLoRA 3.4)."""

from jaxmux.engine import EngineOptions
from jaxmux.models import BackboneConfig, backbone_dtype, device_memory
from jaxmux.planner import PlanningError
from jaxmux.planner.costs.admission import Admission

from .run_shape import pool_costs
from .server_options import ServerOptions


def server_admissions(
    options: ServerOptions, config: BackboneConfig, engine_options: EngineOptions
) -> tuple[Admission, ...]:
    """What predicts whether the pool and microbatches of a size fit into memory, for each kind of
    replica, that of the first replica first. Empty if the devices' memory is unknown, as on CPU
    without `memory_gib`.

    Args:
      options: the settings of the server.
      config: configuration of the backbone.
      engine_options: the options with which its engine starts.

    Raises:
      PlanningError: the server does not fit as it starts. The message says what would.
    """
    if not (options.memory or device_memory()):
        return ()
    pool, shape, found = engine_options.reserved, engine_options.shape, []
    for replica in options.deployment.counts:
        costs = pool_costs(
            pool, config, backbone_dtype(options.dtype), options.remat, options.memory, replica
        )
        own = Admission(costs.replica, shape, reserved=pool, more_stages=False)
        if reason := own.refusal(pool.slots, shape.rows):
            place = f"mesh {replica}: " if options.mesh else ""
            raise PlanningError(f"{place}{reason}")
        found.append(own)
    return tuple(found)
