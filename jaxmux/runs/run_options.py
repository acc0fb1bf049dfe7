"""What a training run is told besides its backbone, its tasks and its folder."""

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
_COUNTS = (
    "tokens_per_microbatch",
    "reserved_slots",
    "reserved_rank",
    "checkpoint_every",
    "keep_checkpoints",
    "max_bad_steps",
    "sample_tokens",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a training run is carried out.

    Attributes:
      dtype: of the backbone: "auto" (bfloat16 on an accelerator, float32 on CPU), "bfloat16" or
        "float32". Adapters and their optimizer states are always float32.
      tokens_per_microbatch: N, the most tokens of a forward and backward pass; memory grows with
        it.
      row_len: tokens that attention sees together, a power of two, at least the longest sample.
      chunk_len: tokens of the unit that belongs to one task, a power of two; the kernels need 128
        or more. Where `row_len` or `chunk_len` is None, it is chosen, together with the tokens of a
        pass (at most N), so that training is predicted to be fastest. Where both are given, a pass
        takes N tokens.
      remat: what a layer keeps from forward to backward, from most to least memory: "none",
        "norms", "dots" (recomputes no matrix product), "lean" or "full". "auto" mixes them over the
        layers so that least is recomputed in the memory that there is.
      memory_gib: memory of the device to use, in GiB. Tasks that do not fit are refused, and "auto"
        chooses by it. None stands for all that JAX may use.
      attention: implementation of attention: "xla", "cudnn" or "short"; None picks by device, dtype
        and shape class.
      grouped_lora: implementation of the grouped LoRA linear; None picks the fastest.
      reserved_slots, reserved_rank: the compiled step has room for at least this many tasks and
        this rank.
      checkpoint_every: rounds between checkpoints. A round is one global batch of every task.
      keep_checkpoints: how many checkpoints are kept.
      max_bad_steps: consecutive non-finite updates after which a task fails; the others go on.
      sample_tokens: length of the longest completion of a task's `sample_prompt`, in tokens.

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
        for name in _COUNTS:
            found = getattr(self, name)
            if type(found) is not int or found < 1:
                raise PlanningError(f"{name} should be an integer of at least 1, found {found!r}")
        if self.memory_gib is not None and not self.memory_gib > 0:
            raise PlanningError(f"memory_gib should be positive, found {self.memory_gib!r}")

    @property
    def reserved(self) -> PoolSpec:
        """The pool that the compiled step has room for at least."""
        return PoolSpec(self.reserved_slots, self.reserved_rank, modules=())

    @property
    def memory(self) -> int | None:
        """`memory_gib` in bytes."""
        return None if self.memory_gib is None else int(self.memory_gib * 2**30)


def check_names(tasks: Sequence[Task]) -> None:
    """Checks that no two tasks have one name.

    Raises:
      TaskError: they have.
    """
    names = [task.name for task in tasks]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise TaskError(f"task {repeated[0]!r}: {names.count(repeated[0])} tasks have this name")
