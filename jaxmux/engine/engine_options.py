"""The settings of the engine."""

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from jaxmux.planner import PlanningError
from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.devices import AUTO_SCHEDULE
from jaxmux.planner.numbers import numbered
from jaxmux.planner.packing import ShapeClass

from .rounds.rounds import Packing

if TYPE_CHECKING:
    from jaxmux.planner.replicas import SequenceCosts


class EngineSize(NamedTuple):
    """The sizes of an engine that can change while it trains: the number of slots of the pool,
    which is the most tasks that train at the same time, and the number of rows of a microbatch."""

    slots: int
    rows: int


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Settings of an `Engine`. Except for `max_bad_steps`, they affect speed and memory; the
    results of tasks differ only by rounding.

    Attributes:
      shape: shape of the microbatches: `rows` rows of `row_len` tokens, each with at most
        `max_sequences` samples, divided into chunks of `chunk_len` tokens that belong to one task
        each. `best_shape` chooses a shape for given tasks.
      reserved: least sizes of the arrays that hold all tasks; `reserved.optimizer` is not used. A
        later task that stays within the sizes reached so far, and whose optimizer has no more
        moments than earlier ones, is added without compiling the forward and backward pass again.
        On CPU and one replica, a task trains to the same bits beside any other tasks as long as
        these sizes and `shape` are the same.
      remat: the values that a layer keeps from its forward to its backward pass; all others are
        computed again. From most to least memory: "none" keeps everything, "norms" recomputes only
        operations other than norms and matrix products, "dots" also recomputes norms, "lean" also
        recomputes the products of the MLP's gate and up, "full" keeps only each layer's input.
        "auto" picks a policy for each layer so that least is recomputed within `memory`; if the
        memory is unknown, it picks "dots".
      memory: bytes on the device that backbone, arrays of the tasks and microbatches may take
        together. None stands for all memory that JAX may use.
      attention: "xla" (any device), "cudnn" (GPU, half precision) or "short" (a kernel for Hopper
        GPUs, rows of 64 or 128 tokens). None picks the fastest for the device, dtype and row
        length.
      grouped_lora: implementation of the linears with adapters: "mosaic_gpu" (Hopper GPUs),
        "triton" (Ampere, Ada and Hopper GPUs) or "xla" (any device). None picks the fastest.
      unroll: True compiles every layer separately, which takes longer to compile and runs faster on
        a GPU. False compiles one layer and loops over it. None means True on a GPU, else False.
      round_tokens: most tokens of a turn, without padding; a longer sample is a turn of its own,
        and a very short one counts as `shape.least_tokens`. Larger global batches and larger
        held-out data take several rounds, so that other tasks need not wait for them, and new tasks
        begin sooner. A task is updated in the last round of its batch, and does not train while it
        is measured. None lets every turn be a global batch.
      max_bad_steps: number of consecutive skipped updates after which a task has failed. An update
        is skipped if the task's loss, gradient or new parameters are not finite.
      packing: function that lays out the samples of tasks that share microbatches, for benchmarks;
        see `rounds.Packing`. None packs with `planner.packing.pack_round`, and lets groups of tasks
        that follow each other in a pipeline share the microbatch between them. With a function,
        objectives of pairs train in two passes.
      schedule: order of the passes in a pipeline of several devices, as in `RunOptions`.
        "interleaved" is for backbones with several parts on a device. Results do not depend on it.
        A stop waits for all microbatches that have begun, with "gpipe" for the whole round.
      replica_shapes: the shape of each replica's microbatches; `shape` is then the one with the
        longest rows. A sample goes to a replica whose rows hold it. Empty gives all `shape`.
      sequence_costs: the time that each replica takes for a sample, by which samples are divided
        among replicas. None takes a sample's tokens divided by the replica's devices.

    Raises:
      PlanningError: a row of `shape` is not as long as the longest of `replica_shapes`.
    """

    shape: ShapeClass
    reserved: PoolSpec = PoolSpec(slots=1, rank=1, modules=())
    remat: str = "auto"
    memory: int | None = None
    attention: str | None = None
    grouped_lora: str | None = None
    unroll: bool | None = None
    round_tokens: int | None = None
    max_bad_steps: int = 10
    packing: Packing | None = None
    schedule: str = AUTO_SCHEDULE
    replica_shapes: tuple[ShapeClass, ...] = ()
    sequence_costs: "SequenceCosts | None" = None

    def __post_init__(self):
        longest = max((shape.row_len for shape in self.replica_shapes), default=self.shape.row_len)
        if self.shape.row_len != longest:
            raise PlanningError(
                f"shape has rows of {self.shape.row_len} tokens, the longest of replica_shapes "
                f"{longest}; they should be equal"
            )

    def of_size(self, size: EngineSize) -> "EngineOptions":
        """The options of an engine of another size. Raises PlanningError if `replica_shapes` is not
        empty."""
        if self.replica_shapes:
            raise PlanningError("an engine whose replicas have different shapes keeps its size")
        shape = dataclasses.replace(self.shape, rows=size.rows)
        reserved = self.reserved._replace(slots=size.slots)
        return dataclasses.replace(self, shape=shape, reserved=reserved)

    def of_replicas(self, count: int) -> list["EngineOptions"]:
        """The options of each replica, whose `shape` is that of its own microbatches. PlanningError
        if `replica_shapes` has another length than `count`."""
        shapes = self.replica_shapes or (self.shape,) * count
        if len(shapes) != count:
            raise PlanningError(f"{numbered(count, 'replica')}, but {len(shapes)} replica_shapes")
        return [dataclasses.replace(self, shape=s, replica_shapes=()) for s in shapes]
