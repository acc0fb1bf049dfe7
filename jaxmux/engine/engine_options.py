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
      remat: "none", "norms", "dots", "lean" or "full": what is kept from forward to backward.
        "auto" picks for every layer what recomputes least in `memory`; "dots" where that is
        unknown.
      memory: bytes that weights, train state and step may take; None for all that JAX may use of
        the device.
      attention: "xla", "cudnn" or "short"; None picks by device, dtype and shape class.
      grouped_lora: implementation of the grouped LoRA linear; None picks the fastest.
      unroll: whether every layer is compiled on its own; None where it pays, on GPU.
      max_bad_steps: consecutive skipped updates after which a task has failed.
      packing: lays out the samples of training rounds; others are what benchmarks compare with.
      slots, rank, modules, dropout: what the compiled step has room for at least: slots, pool rank,
        adapted modules, and whether it can drop. A task that fits arrives without compiling the
        step again, and on CPU trains to the same bits in any company.
    """

    shape: ShapeClass
    slots: int = 1
    rank: int = 1
    modules: tuple[str, ...] = ()
    dropout: bool = False
    remat: str = "auto"
    memory: int | None = None
    attention: str | None = None
    grouped_lora: str | None = None
    unroll: bool | None = None
    max_bad_steps: int = 10
    packing: Packing = pack_tightly

    @property
    def least_pool(self) -> PoolSpec:
        """What the compiled step has room for at least."""
        return PoolSpec(self.slots, self.rank, self.modules, self.dropout)
