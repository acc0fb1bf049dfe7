"""The settings of a training run, besides its backbone, its tasks and its folder."""

import dataclasses
from collections.abc import Sequence

from jaxmux.models import REMAT_POLICIES, attention
from jaxmux.pallas_kernels import grouped_lora
from jaxmux.planner import PlanningError
from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.tasks import Task, TaskError

_CHOICES = {
    "dtype": ("auto", "bfloat16", "float32"),
    "remat": ("auto", *REMAT_POLICIES),
    "attention": (None, *attention.IMPLEMENTATIONS),
    "grouped_lora": (None, *grouped_lora.IMPLEMENTATIONS),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Settings of a training run, the argument `options` of `fine_tune`.

    A *microbatch* is the unit of one forward and backward pass: rows of `row_len` tokens, divided
    into chunks of `chunk_len` tokens that each belong to one task. A *round* is one global batch
    (the samples of one optimizer update) of every task that still trains.

    Attributes:
      dtype: dtype of the backbone: "auto" (bfloat16 on an accelerator, float32 on CPU), "bfloat16"
        or "float32". Adapters and their optimizer states are always float32.
      tokens_per_microbatch: N, the most tokens of a microbatch; memory grows with N.
      row_len: tokens of a row, a power of two of at least 64 and at least the longest sample.
        Attention stays within a row. None chooses the row length that is predicted to train
        fastest.
      chunk_len: tokens of a chunk, a power of two of at least 64 (128 for the Hopper kernels). None
        chooses the chunk length that is predicted to train fastest. If `row_len` or `chunk_len` is
        None, microbatches may also get fewer tokens than N; if both are given, microbatches have N
        tokens, rounded up to whole rows and chunks.
      remat: the values that a layer keeps from its forward to its backward pass; all else is
        computed again. From most to least memory: "none" keeps everything, "norms" recomputes
        neither norms nor matrix products, "dots" recomputes norms but no matrix product, "lean"
        also recomputes the products of the MLP's gate and up, "full" keeps only each layer's input.
        "auto" picks a policy for each layer so that least is recomputed in the available memory.
      memory_gib: memory of the device to use, in GiB. Tasks that are predicted not to fit are
        refused, and remat="auto" chooses policies that fit. None stands for all memory that JAX may
        use; where JAX does not report it, as on CPU, no task is refused.
      attention: implementation of attention: "xla" (any device), "cudnn" (GPU, half precision) or
        "short" (a kernel for Hopper GPUs, rows of 64 or 128 tokens). None picks the fastest for the
        device, dtype and row length.
      grouped_lora: implementation of the linears with adapters: "mosaic_gpu" (Hopper GPUs),
        "triton" (Ampere, Ada and Hopper GPUs) or "xla" (any device). None picks the fastest.
      reserved_slots: number of tasks for which arrays are allocated at least, even if fewer train.
        On
        CPU, a task gets the same bits beside different other tasks if arrays and microbatches have
        the same sizes.
      reserved_rank: adapter rank for which arrays are allocated at least, with the same purpose as
        `reserved_slots`.
      checkpoint_every: number of rounds between two checkpoints.
      keep_checkpoints: number of checkpoints that are kept; older ones are deleted.
      max_bad_steps: number of consecutive non-finite updates after which a task fails. The training
        of the other tasks continues.
      sample_tokens: most tokens of the completions of a task's `sample_prompt`.

    Raises:
      PlanningError: a value is outside its range.
    """

    dtype: str = "auto"
    tokens_per_microbatch: int = 8192
    row_len: int | None = None
    chunk_len: int | None = None
    remat: str = "auto"
    memory_gib: float | None = None
    attention: str | None = None
    grouped_lora: str | None = None
    reserved_slots: int = 1
    reserved_rank: int = 1
    checkpoint_every: int = 50
    keep_checkpoints: int = 3
    max_bad_steps: int = 10
    sample_tokens: int = 64

    def __post_init__(self):
        for name, known in _CHOICES.items():
            if (found := getattr(self, name)) not in known:
                expected = ", ".join(map(str, known))
                raise PlanningError(f"{name} should be one of {expected}, found {found!r}")
        # Every integer among the options is a count.
        for name in (field.name for field in dataclasses.fields(self) if field.type is int):
            found = getattr(self, name)
            if type(found) is not int or found < 1:
                raise PlanningError(f"{name} should be an integer of at least 1, found {found!r}")
        if self.memory_gib is not None and not self.memory_gib > 0:
            raise PlanningError(f"memory_gib should be positive, found {self.memory_gib!r}")

    @property
    def reserved(self) -> PoolSpec:
        """The smallest pool for which arrays are allocated, from `reserved_slots` and
        `reserved_rank`."""
        return PoolSpec(self.reserved_slots, self.reserved_rank, modules=())

    @property
    def memory(self) -> int | None:
        """`memory_gib` in bytes; None if `memory_gib` is None."""
        return None if self.memory_gib is None else int(self.memory_gib * 2**30)


def check_names(tasks: Sequence[Task]) -> None:
    """Checks that no two tasks of a training run have the same name.

    Args:
      tasks: the tasks of a training run.

    Raises:
      TaskError: two tasks have the same name.
    """
    names = [task.name for task in tasks]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise TaskError(f"task {repeated[0]!r}: {names.count(repeated[0])} tasks have this name")
