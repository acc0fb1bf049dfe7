"""How the engine runs."""

import dataclasses

from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.packing import ShapeClass

from .rounds import Packing, pack_tightly


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """How the engine runs; none of it changes what a task learns beyond rounding.

    Attributes:
      shape: shape class of the microbatches; `jaxmux.best_shape` chooses one for some tasks.
      reserved: the compiled step has room for at least these slots, this rank and these modules,
        and can drop if it says so. A task that fits arrives without compiling the step again, and
        on CPU trains to the same bits in any company.
      remat: "none", "norms", "dots", "lean" or "full": what is kept from forward to backward.
        "auto" picks for every layer what recomputes least in `memory`; "dots" where that is
        unknown.
      memory: bytes that weights, train state and step may take; None for all that JAX may use of
        the device.
      attention: "xla", "cudnn" or "short"; None picks by device, dtype and shape class.
      grouped_lora: implementation of the grouped LoRA linear; None picks the fastest.
      unroll: whether every layer is compiled on its own; None where it pays, on GPU.
      max_bad_steps: consecutive skipped updates after which a task has failed.
      packing: lays out the samples of training rounds; benchmarks compare others with it.
    """

    shape: ShapeClass
    reserved: PoolSpec = PoolSpec(slots=1, rank=1, modules=())
    remat: str = "auto"
    memory: int | None = None
    attention: str | None = None
    grouped_lora: str | None = None
    unroll: bool | None = None
    max_bad_steps: int = 10
    packing: Packing = pack_tightly
