"""The settings of the engine."""

import dataclasses

from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.packing import ShapeClass

from .rounds import Packing, pack_tightly


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Settings of an `Engine`. They change speed and memory, and tasks' results only by rounding.

    Attributes:
      shape: shape class of the microbatches: rows, row_len, chunk_len (tokens) and the most
        sequences in a row. `best_shape` chooses one for given tasks.
      reserved: smallest pool that is allocated: its slots (tasks at a time), rank, module paths,
        and whether programs have dropout. `reserved.optimizer` is not used. A later task that fits
        into the pool, and whose optimizer has no more moments than the optimizers so far, is added
        without compiling `accumulate` again. On CPU, a task trains to the same bits with any other
        tasks as long as the pool does not change.
      remat: the values that a layer keeps from its forward to its backward pass; other values are
        computed again. From most to least memory: "none" keeps everything, "norms" recomputes
        neither norms nor matrix products, "dots" recomputes no matrix product, "lean" recomputes
        the products of gate and up, "full" keeps only each layer's input. "auto" picks a policy for
        each layer so that least is recomputed within `memory`; if the memory is unknown, it picks
        "dots".
      memory: bytes that weights, train state and microbatches may take together on the device. None
        for all memory that JAX may use.
      attention: implementation of attention: "xla" (any device), "cudnn" (GPU, half precision) or
        "short" (a kernel for Hopper GPUs, rows of at most 128 tokens). None picks the fastest for
        the device, dtype and row length.
      grouped_lora: implementation of the linears with adapters: "mosaic_gpu" (Hopper GPUs),
        "triton" (Ampere, Ada and Hopper GPUs) or "xla" (any device). None picks the fastest.
      unroll: True compiles every layer separately, which takes longer to compile and runs faster on
        a GPU. False compiles one layer and loops over it. None means True on a GPU, else False.
      max_bad_steps: number of consecutive skipped updates after which a task has failed. An update
        is skipped if its loss, gradient or new parameters are not finite.
      packing: function that lays out the samples of a training round. It takes the stream lengths
        in tokens of the samples, by slot, and the shape class; it returns, for each microbatch, the
        `Placement`s of its samples. Benchmarks compare the default with others, for example
        `planner.packing.pack_first_fit`.
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
