"""The settings of a training run besides its backbone, its tasks and its folder."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import SkipValidation

from jaxmux.engine.tasks.prepared_task import pool_of_adapter
from jaxmux.field_checks import Count, Names, Positive, Text, checked_dataclass
from jaxmux.models import BACKBONE_FORMATS, REMAT_POLICIES, BackboneConfig, attention
from jaxmux.models.adapter_ops import LOW_RANK_KIND
from jaxmux.pallas_kernels import grouped_lora
from jaxmux.peft import SPECIFICATIONS, LoRA, kind_of, resolve_targets, size_of_adapter
from jaxmux.planner import PlanningError
from jaxmux.planner.costs.pool_spec import PoolSpec, merge_pool_specs
from jaxmux.planner.devices import AUTO_SCHEDULE, ONE_DEVICE, SCHEDULES, Deployment
from jaxmux.planner.packing import ShapeRequest
from jaxmux.similar_names import did_you_mean
from jaxmux.tasks import Task, TaskError

from .trackers.tracker import TRACKERS

# The value of `RunOptions.mesh` for the best layout of all devices.
AUTO_MESH = "auto"
_Attention = Literal[*attention.IMPLEMENTATIONS]
_GroupedLora = Literal[*grouped_lora.IMPLEMENTATIONS]


@checked_dataclass(kw_only=True)
class RunOptions:
    """Settings of a training run, the argument `options` of `fine_tune`.

    A *microbatch* is the unit of one forward and backward pass: rows of `row_len` tokens, divided
    into chunks of `chunk_len` tokens that each belong to one task. A *round* is one global batch
    (the samples of one optimizer update) of every task that still trains.

    Attributes:
      dtype: dtype of the backbone: "auto" (bfloat16 on an accelerator, float32 on CPU), "bfloat16"
        or "float32". Adapters and their optimizer states are always float32.
      backbone_format: format in which the weights of the layers' linears are stored. "float8"
        (e4m3, one byte a weight) also encodes activations and gradients, with a scale for each
        token, and multiplies in float8. On Hopper GPUs, a step then takes seven tenths of the time;
        products are exact to about 3%. "int8" (one byte) and "nf4" (half a byte, in blocks of 64 as
        in QLoRA) are decoded to `dtype` right before each product, so that memory shrinks and every
        step takes a little longer. None stores weights in `dtype`. A checkpoint that is already
        quantised keeps its own format if the format can be decoded for products.
      backbone_cache: folder in which the backbone is kept in its `backbone_format`, so that later
        training runs read less and encode nothing. Its entries are named after the backbone's
        fingerprint; transformers and vLLM can load them too. None keeps nothing.
      mesh: the devices to train on, as sizes of axes: "pp4", or "dp2,pp2,tp2" for eight devices.
        "pp" (pipeline parallelism) divides the layers among stages. "dp" (data parallelism) trains
        different samples on copies of the weights. "fsdp" (fully sharded data parallelism) also
        trains different samples, and divides the weights; layers are gathered when they are needed.
        "tp" (tensor parallelism) divides every linear. An axis that is not named has size 1. The
        results are those of one device, with "pp" alone bit for bit on CPU, else up to rounding.
        Several replicas are joined by plus signs, as in "pp2,tp2 + 2*(tp1)", and may differ. Each
        has its own copy of the backbone and trains the samples that suit it: replicas with much
        memory train the long samples. The first replica has the optimizer states. "auto" takes all
        devices, in the layout of one or several replicas that is predicted to train fastest. None
        is one device.
      schedule: order of the passes in a pipeline; it needs a mesh with "pp". "auto" is 1F1B on
        groups of tasks, which the planner chooses so that one group trains while another one is
        updated. "1f1b" and "gpipe" pack all tasks together; "gpipe" runs all forward passes of a
        round before the backward passes, and keeps the values of all its microbatches.
        "interleaved" puts two parts of the backbone on each stage. "lorapp" (mLoRA) and "template"
        (MuxTune) give every task microbatches of its own: with "lorapp", other tasks pass a task
        that waits for its update; "template" keeps more microbatches in flight. Results do not
        depend on the schedule.
      tokens_per_microbatch: N, the most tokens of a microbatch; memory grows with N.
      row_len: tokens of a row, a power of two of at least 64 and at least the longest sample.
        Attention stays within a row. None chooses the row length that is predicted to train
        fastest.
      chunk_len: tokens of a chunk, a power of two of at least 64 (128 for the Hopper kernels). None
        chooses the chunk length that is predicted to train fastest. If `row_len` or `chunk_len` is
        None, microbatches may also get fewer tokens than N. If both are given, microbatches have N
        tokens, rounded up to whole rows and chunks. In both cases, microbatches get fewer tokens
        when tasks have ended and the others do not fill them.
      max_sequences: most samples of a row. None chooses the number that is predicted to train
        fastest. It can be given only together with `row_len` and `chunk_len`; then the shape of
        microbatches does not depend on the tasks, until some of them have ended.
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
      reserved_slots: least number of tasks for which arrays are allocated, even if fewer train. On
        CPU, a task gets the same bits whatever other tasks train beside it, if arrays and
        microbatches have the same sizes. The other `reserved_` options and `max_sequences` have the
        same purpose.
      reserved_rank: least adapter rank for which arrays are allocated.
      reserved_targets: linears for which arrays are allocated, even if no task adapts them, chosen
        like `LoRA.target_modules`; None allocates only those that tasks adapt.
      reserved_dropout: True compiles the training step with dropout, even if no task has any.
      reserved_adapters: specifications of adapters other than plain LoRA, such as
        `Bottleneck(size=64)`, `DoRA(16)`, or a `LoRA` with a pattern or the initialisation "pissa".
        Every slot has room for adapters of these kinds, up to these sizes and at these places of
        the backbone.
      checkpoint_every: number of rounds between two checkpoints.
      keep_checkpoints: number of checkpoints that are kept; older ones are deleted.
      max_bad_steps: number of consecutive non-finite updates after which a task fails. The training
        of the other tasks continues.
      tasks_at_once: largest number of tasks that train at the same time; the others wait until one
        has ended. None lets all tasks train together; tasks of a `Sweep` wait if they do not fit
        into memory.
      log_every: where there is no terminal, number of a task's steps from one printed line to the
        next. None prints about ten lines for each task.
      sample_tokens: most tokens of the completions of a task's `sample_prompt`.
      trackers: programs that show the metrics: "tensorboard" (files in the run directory), "wandb"
        (Weights & Biases) and "mlflow". The latter two need their packages, and read the variables
        of the environment that these define, such as WANDB_MODE and MLFLOW_TRACKING_URI. If a
        tracker fails, training goes on without it. Empty for none.

    Raises:
      PlanningError: a value is outside its range.
    """

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    backbone_format: Literal[*BACKBONE_FORMATS] | None = None
    backbone_cache: Text | None = None
    mesh: Text | None = None
    schedule: Literal[*SCHEDULES] = AUTO_SCHEDULE
    tokens_per_microbatch: Count = 8192
    row_len: Count | None = None
    chunk_len: Count | None = None
    max_sequences: Count | None = None
    remat: Literal["auto", *REMAT_POLICIES] = "auto"
    memory_gib: Positive | None = None
    attention: _Attention | None = None
    grouped_lora: _GroupedLora | None = None
    reserved_slots: Count = 1
    reserved_rank: Count = 1
    reserved_targets: Names | None = None
    reserved_dropout: bool = False
    reserved_adapters: SkipValidation[tuple[Any, ...]] = ()
    checkpoint_every: Count = 50
    keep_checkpoints: Count = 3
    max_bad_steps: Count = 10
    tasks_at_once: Count | None = None
    log_every: Count | None = None
    sample_tokens: Count = 64
    trackers: Names = ("tensorboard",)

    _error = PlanningError

    def __post_init__(self):
        self._check_reserved_adapters()
        if self.max_sequences and not (self.row_len and self.chunk_len):
            raise PlanningError("max_sequences needs row_len and chunk_len beside it")
        if self.backbone_cache and not self.backbone_format:
            raise PlanningError("backbone_cache needs a backbone_format beside it")
        self._check_trackers()
        # Refuse a mesh that cannot be read here, before anything is loaded.
        if self.mesh and self.mesh != AUTO_MESH:
            Deployment.parse(self.mesh)

    def _check_reserved_adapters(self) -> None:
        reserved = self.reserved_adapters
        if not isinstance(reserved, list | tuple):
            raise PlanningError(
                f"reserved_adapters should be a list, such as [@IA3()], found {reserved!r}"
            )
        object.__setattr__(self, "reserved_adapters", tuple(reserved))
        others = [each for each in SPECIFICATIONS.values() if each is not LoRA]
        for specification in reserved:
            if not isinstance(specification, tuple(SPECIFICATIONS.values())):
                raise PlanningError(
                    f"reserved_adapters: {specification!r} is no specification of an adapter; "
                    f"there are {', '.join(f'@{each.__name__}()' for each in others)}"
                )
            if kind_of(specification).name == LOW_RANK_KIND:
                raise PlanningError(
                    "reserved_adapters: a plain LoRA needs no entry; for its size there are "
                    "reserved_rank and reserved_targets"
                )

    def _check_trackers(self) -> None:
        chosen = (self.trackers,) if isinstance(self.trackers, str) else self.trackers
        object.__setattr__(self, "trackers", tuple(dict.fromkeys(chosen)))
        for name in self.trackers:
            if name not in TRACKERS:
                hint = did_you_mean(name, TRACKERS) or f"there are {', '.join(TRACKERS)}"
                raise PlanningError(f"trackers: {name!r} is unknown; {hint}")

    @property
    def deployment(self) -> Deployment:
        """The devices that `mesh` names; `mesh` must not be "auto". Raises PlanningError if `mesh`
        cannot be read, or `schedule` does not suit it."""
        devices = Deployment.parse(self.mesh) if self.mesh else Deployment((ONE_DEVICE,))
        return devices.following(self.schedule)

    def reserved(self, config: BackboneConfig) -> PoolSpec:
        """The smallest pool for which arrays are allocated, from the `reserved_` options. Raises
        PlanningError if `reserved_targets` matches no linear of the backbone, or an adapter of
        `reserved_adapters` has no place in it."""
        targets: Iterable[str] = ()
        if self.reserved_targets is not None:
            try:
                targets = resolve_targets(self.reserved_targets, config)
            except ValueError as e:
                message = str(e).replace("target_modules", "reserved_targets")
                raise PlanningError(message) from None
        sizes = self.reserved_slots, self.reserved_rank, tuple(sorted(targets))
        pool = PoolSpec(*sizes, self.reserved_dropout)
        needed = []
        for specification in self.reserved_adapters:
            try:
                targets = kind_of(specification).targets(specification, config)
                size = size_of_adapter(specification, config)
                needed.append(pool_of_adapter(specification, targets, size))
            except ValueError as e:
                kind = type(specification).__name__
                raise PlanningError(f"reserved_adapters: {kind}: {e}") from None
        # These adapters need no further slots.
        return merge_pool_specs([pool, *needed])._replace(slots=pool.slots)

    def shape_request(self, least_chunk_len: int) -> ShapeRequest:
        """The limits within which the shape of microbatches is chosen. `least_chunk_len` is the
        number of tokens of the shortest chunk that the device's kernels support."""
        given = self.row_len, self.chunk_len
        sequences = self.max_sequences
        return ShapeRequest(
            self.tokens_per_microbatch, *given, least_chunk_len, max_sequences=sequences
        )

    @property
    def memory(self) -> int | None:
        """`memory_gib` in bytes; None if `memory_gib` is None."""
        return None if self.memory_gib is None else int(self.memory_gib * 2**30)


def check_names(tasks: Sequence[Task]) -> None:
    """Raises TaskError if two tasks have the same name."""
    names = [task.name for task in tasks]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise TaskError(f"task {repeated[0]!r}: {names.count(repeated[0])} tasks have this name")
