"""The compiled programs of one device, and their preparation: the options of the forward pass, and
the remat policy of every layer, chosen by the memory that is free for kept values.

The training step of an engine on one GPU is kept in JAX's cache folder, under a name that is
computed without tracing. JAX's own cache saves a later process only the compilation by XLA; this
one also saves the seconds in which Python traces and lowers the step.
"""

import functools
import logging
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import xxhash
from jax.experimental import serialize_executable
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

import jaxmux
from jaxmux import data, pallas_kernels
from jaxmux.data.batches import Microbatch
from jaxmux.errors import first_line, microbatch_too_large
from jaxmux.models import (
    NAMED_POLICIES,
    Backbone,
    BackboneConfig,
    ForwardOptions,
    SlotTable,
    Weights,
    attention,
    block_bytes,
    device_memory,
    hidden_states,
    keep_small_arrays_together,
    kept_bytes,
    microbatch_log_probs,
    microbatch_losses,
    pick_implementation,
)
from jaxmux.models.forward import dropout_of
from jaxmux.models.head_adapters import bytes_at_head, head_adapters
from jaxmux.models.remat_policies import leaner, per_layer
from jaxmux.pallas_kernels.compilation import compiled
from jaxmux.pallas_kernels.slot_sum import add_to_slots
from jaxmux.peft import Layout, ops_of
from jaxmux.planner import PlanningError
from jaxmux.planner.costs.device_profile import PackedBytes
from jaxmux.planner.costs.memory_model import (
    USABLE,
    exchanged_bytes,
    fill_layers,
    keeps_attention,
    working_bytes,
)
from jaxmux.sharding import OneDevice, compiles_only

from ..engine_options import EngineOptions
from ..rounds.rounds import empty_microbatch, slot_table
from ..state.stored_state import StoredState
from ..state.train_state import TrainState


def step_room(weights: Any, adapters: Any, memory: int) -> int:
    """Bytes that a microbatch's forward and backward pass may use, besides weights and train state,
    if everything on the device may take `memory` bytes. `adapters` are the float32 master weights
    of all slots."""
    weight_bytes, master_bytes = bytes_of(weights), bytes_of(adapters)
    # Four arrays each: masters, accumulators and two moments. Two is the most that an optimizer
    # has, so that the policies do not depend on the optimizers in use.
    return int(USABLE * memory) - weight_bytes - 4 * master_bytes


def bytes_of(tree: Any) -> int:
    """Bytes of all arrays of a tree, which may be `jax.ShapeDtypeStruct`s."""
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(tree))


def choose_remat(
    backbone: Backbone,
    options: ForwardOptions,
    adapters: Any,
    microbatch: Microbatch,
    slots: SlotTable,
    room: int,
    in_flight: int = 1,
) -> tuple[str, ...]:
    """The remat policy of every layer: the least recomputation that fits into `room` bytes for the
    forward and backward pass of a microbatch (`step_room`), if the values of `in_flight`
    microbatches are kept at the same time.

    Logs the choice, and a warning if even the most recomputation does not fit. Only shapes and
    dtypes of the arrays are read, and `options.remat` is not read.
    """
    config, weights = backbone.config, backbone.weights
    # Plain XLA is traced fastest, and all implementations keep nearly the same values: softmax
    # totals and padded ranks make a difference of less than 1%. Only cuDNN's attention keeps more,
    # in rows of several sequences.
    plain = options._replace(attention="xla", grouped_lora="xla", unroll=False)
    chunks = len(microbatch.chunk_slot)
    chunk_len = microbatch.tokens.size // chunks
    at_head = bytes_at_head(adapters, chunks)
    room -= in_flight * at_head
    loss_bytes = block_bytes(config.vocab_size, chunk_len if at_head else 1)
    packed_kept, packed_needed = _packed_attention(backbone, options, microbatch)
    sizes: dict[str, float] = {}
    for policy in NAMED_POLICIES:
        sizes[policy] = packed_kept * keeps_attention(policy) + kept_bytes(
            config, plain._replace(remat=policy), weights, adapters, microbatch, slots
        )
        working = working_bytes(sizes, loss_bytes, packed_needed)
        if in_flight * config.num_layers * sizes[policy] <= room - working:
            # All layers fit under this policy, and tracing further policies takes seconds.
            break
    policies = fill_layers(sizes, config.num_layers, (room - working) / in_flight)
    needed = working + in_flight * sum(sizes[policy] for policy in policies)
    _log.info(
        "kept for the backward pass: %s; about %.1f of %.1f GiB",
        ", ".join(
            f"{policy!r} in {len(list(group))} layers" for policy, group in groupby(policies)
        ),
        needed / 2**30,
        room / 2**30,
    )
    if needed > room:
        _log.warning(
            "a microbatch needs about %.1f GiB besides weights and train state, there are %.1f "
            "GiB; use smaller microbatches (tokens_per_microbatch)",
            needed / 2**30,
            room / 2**30,
        )
    return policies


def _packed_attention(
    backbone: Backbone, options: ForwardOptions, microbatch: Microbatch
) -> tuple[float, float]:
    """Bytes that cuDNN's attention of one layer takes in rows of several sequences: kept for the
    backward pass, and needed while it runs. Both are 0 for other implementations."""
    if options.attention != "cudnn":
        return 0.0, 0.0
    config, itemsize = backbone.config, backbone.compute_dtype.itemsize
    packed = PackedBytes.of(config.num_heads, config.num_kv_heads, config.head_dim, itemsize)
    tokens, sequences = microbatch.tokens.size, options.max_sequences
    return packed.kept_by(tokens, sequences), packed.needed_by(tokens, sequences)


# Operations that XLA puts into CUDA graphs: its defaults, and loops, so that the host need not wait
# for each iteration.
_GRAPHS = "CONDITIONAL,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,FUSION,WHILE"
_XLA_OPTIONS = {
    "xla_gpu_enable_command_buffer": _GRAPHS,
    # Without its own Triton products, XLA compiles an 8B model's step in 18 s instead of 26 s, and
    # the step is as fast.
    "xla_gpu_enable_triton_gemm": False,
}


@partial(
    jax.jit,
    static_argnums=(0, 1),
    donate_argnums=(4, 5),
    compiler_options=_XLA_OPTIONS,
)
def accumulate(
    config: BackboneConfig,
    options: ForwardOptions,
    weights: Weights,
    adapters: Any,
    accumulators: Any,
    sums: Float[Array, "T sums"],
    microbatch: Microbatch,
    slots: SlotTable,
) -> tuple[Any, Float[Array, "T sums"]]:
    """Runs the forward and backward pass of one microbatch, and returns the accumulators and
    sums with its gradients, losses and metrics added; both are donated. `adapters`, `accumulators`
    and `sums` are as in `TrainState`, and `slots` has the numbers of every slot."""

    def forward(accumulators):
        of_head = partial(microbatch_losses, rules=slots.rules)
        return _forward(
            of_head, config, options, weights, adapters, accumulators, microbatch, slots
        )

    (of_chunks, _), backward = jax.vjp(forward, accumulators)
    # The cotangent of every chunk is 1, so a NaN in one task's loss does not reach the others. The
    # accumulators are passed in as their own cotangents, and the next accumulators come out: see
    # `grouped_lora_linear`.
    (new_accumulators,) = backward((jnp.ones_like(of_chunks), accumulators))
    return new_accumulators, add_to_slots(sums, of_chunks, microbatch.chunk_slot)


def accumulate_arguments(
    backbone: Backbone,
    options: ForwardOptions,
    state: TrainState,
    microbatch: Microbatch,
    slots: SlotTable,
) -> tuple[Any, ...]:
    return (
        backbone.config,
        options,
        backbone.weights,
        state.adapters,
        state.accumulators,
        state.sums,
        microbatch,
        slots,
    )


@partial(jax.jit, static_argnums=(0, 1))
def log_probs(
    config: BackboneConfig,
    options: ForwardOptions,
    weights: Weights,
    adapters: Any,
    microbatch: Microbatch,
    slots: SlotTable,
) -> Float[Array, "rows row_len 2"]:
    """Runs the forward pass of one microbatch without gradients, and returns the log-probability of
    the target at every position and log Σ p², as `microbatch_log_probs` does. Arguments are as for
    `accumulate`."""
    of_head = microbatch_log_probs
    return _forward(of_head, config, options, weights, adapters, None, microbatch, slots)[0]


def _forward(
    of_head, config, options, weights, adapters, accumulators, microbatch, slots
) -> tuple[Array, Any]:
    """What `of_head` returns, which is `microbatch_losses` or `microbatch_log_probs`, and the
    accumulators."""
    dropout = dropout_of(microbatch, slots, options)
    at_head, accumulators = head_adapters(
        options.adapter_ops, adapters, accumulators, microbatch.chunk_slot, dropout
    )
    hidden, accumulators, finite = hidden_states(
        config, weights, adapters, accumulators, microbatch, slots, options, at_head
    )
    return of_head(weights, hidden, finite, microbatch, at_head=at_head), accumulators


_log = logging.getLogger("jaxmux")
# Maximum number of training steps that are kept on disk; that of an 8B model takes 50 MB.
_MOST_STEPS = 16


def forward_options(
    backbone: Backbone, options: EngineOptions, adapters: Mapping[str, Any], dropout: bool = False
) -> ForwardOptions:
    """The options of the forward pass, except the remat policy, which keeps its default. `adapters`
    has the pools, or their descriptions, by adapter kind. Raises PlanningError if
    `options.attention` cannot serve this device, dtype or shape class."""
    unroll, shape = options.unroll, options.shape
    config, dtype, row_len = backbone.config, backbone.compute_dtype, shape.row_len
    if name := options.attention:
        if reason := attention.refusal(name, config, dtype, row_len):
            raise PlanningError(f"attention={name!r} {reason}")
    return ForwardOptions(
        attention=options.attention or pick_implementation(config, dtype, row_len),
        grouped_lora=options.grouped_lora,
        unroll=jax.default_backend() == "gpu" if unroll is None else unroll,
        dropout=dropout,
        max_sequences=shape.max_sequences,
        adapter_ops=ops_of(adapters),
    )


def refuse_implementations(
    backbone: Backbone, options: EngineOptions, dropout: bool, state: TrainState
) -> None:
    """Traces the training step. Raises PlanningError if an implementation that `options` names
    cannot serve it on this device, with these dtypes and sizes."""
    forward = forward_options(backbone, options, state.adapters, dropout)
    microbatch = empty_microbatch(options.shape)
    slots = slot_table({}, None, len(state.sums))
    try:
        accumulate.trace(*accumulate_arguments(backbone, forward, state, microbatch, slots))
    except ValueError as e:
        raise PlanningError(str(e)) from None


class TrainingStep(NamedTuple):
    """A compiled `accumulate`, with the options of its forward pass. If it was read from the cache
    (`is_read`), it has not been traced, and JAX does not find it by its function and arguments.
    `program` is None if the device belongs to another process."""

    forward: ForwardOptions
    program: jax.stages.Compiled | None
    is_read: bool = False

    @property
    def scratch_bytes(self) -> int:
        """Bytes of device memory that it needs while it runs, besides its arguments and results; 0
        if unknown."""
        stats = self.program and self.program.memory_analysis()
        return int(stats.temp_size_in_bytes) if stats else 0


def compile_accumulate(
    backbone: Backbone,
    options: EngineOptions,
    dropout: bool,
    state: TrainState,
    microbatch: Microbatch,
    slots: SlotTable,
    home: OneDevice,
    leaner_by: int = 0,
    exchanged: float = 0.0,
) -> TrainingStep:
    """Chooses the remat policy of every layer, and compiles `accumulate` for microbatches of this
    shape. Only shapes and dtypes of `state`, `microbatch` and `slots` are read. Each time that the
    device ran out of memory (`leaner_by`), layers recompute more. `exchanged` is the bytes that
    must be free for exchanges with other replicas. Raises OutOfDeviceMemory if recomputation was
    not enough."""
    forward = forward_options(backbone, options, state.adapters, dropout)
    remat, memory = options.remat, options.memory or device_memory()
    arguments = accumulate_arguments(backbone, forward, state, microbatch, slots)
    # A step that was compiled for one device cannot be loaded for another.
    is_first = home.device == jax.devices()[0]
    path = _step_path(arguments, remat, memory, leaner_by, exchanged) if is_first else None
    if path and (step := _read_step(path, arguments)):
        return step
    if remat == "auto" and memory is None:
        remat = "dots"
    elif remat == "auto":
        room = step_room(backbone.weights, state.adapters, memory) - int(exchanged)
        remat = choose_remat(backbone, forward, state.adapters, microbatch, slots, room)
    for _ in range(leaner_by):
        remat = leaner(per_layer(remat, backbone.config.num_layers))
        if remat is None:
            raise microbatch_too_large(options.shape.tokens)
    forward = forward._replace(remat=remat)
    arguments = accumulate_arguments(backbone, forward, state, microbatch, slots)
    is_local = home.is_local
    step = TrainingStep(forward, compiled(accumulate.lower(*arguments)) if is_local else None)
    if path and is_local:
        _keep_step(path, step)
    return step


def _step_path(arguments: tuple[Any, ...], *choices: Any) -> Path | None:
    """The file of a kept training step, which need not exist; None where the step is not kept. Its
    name is a digest of everything on which the compiled step depends: source code, packages,
    device, settings of JAX and XLA, static arguments, and shapes and dtypes of the others.
    `arguments` have no remat policy yet; `choices` are the other values on which that policy
    depends."""
    folder = _step_folder()
    if folder is None:
        return None
    config, forward, *arrays = arguments
    # The name of an op's kind suffices, because the source code is part of the digest.
    forward = forward._replace(adapter_ops=tuple(name for name, _ in forward.adapter_ops))
    leaves, tree = jax.tree.flatten(arrays)
    described = (
        _sources(),
        sorted(path.name for folder in sys.path for path in Path(folder).glob("*.dist-info")),
        [(device.device_kind, device.client.platform_version) for device in jax.devices()],
        sorted((key, str(value)) for key, value in jax.config.values.items()),
        sorted(
            (key, value) for key, value in os.environ.items() if key.startswith(("XLA_", "JAX_"))
        ),
        config,
        forward,
        choices,
        str(tree),
        [(leaf.shape, str(leaf.dtype), getattr(leaf, "weak_type", False)) for leaf in leaves],
    )
    text = repr(described)
    if " at 0x" in text:
        # The address differs in other processes, and a different object might get the same one.
        _log.warning("the compiled training step is not kept: an argument is described by address")
        return None
    return folder / xxhash.xxh3_128_hexdigest(text.encode())


@functools.cache
def _sources() -> str:
    digest = xxhash.xxh3_128()
    for folder in (Path(package.__file__).parent for package in (jaxmux, data, pallas_kernels)):
        for path in sorted((*folder.rglob("*.py"), *folder.rglob("*.json"))):
            digest.update(str(path.relative_to(folder)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _step_folder() -> Path | None:
    """The folder of kept training steps; None if none are kept. This is the case on a CPU, because
    programs of one machine may not run on another one with the same folder, and if JAX has no cache
    in a local folder."""
    cache = jax.config.jax_compilation_cache_dir
    if jax.default_backend() != "gpu" or not cache or "://" in cache:
        return None
    return Path(cache) / "training_steps"


def _read_step(path: Path, arguments: tuple[Any, ...]) -> TrainingStep | None:
    if not path.exists():
        return None
    # Loaded kernels need the runtime of Mosaic GPU. Lowering them would import it.
    import jax.experimental.mosaic.gpu  # noqa: F401

    _, forward, *arrays = arguments
    _, _, accumulators, sums, *_ = arrays
    try:
        remat, content = pickle.loads(path.read_bytes())
        program = serialize_executable.deserialize_and_load(
            content,
            in_tree=jax.tree.structure((tuple(arrays), {})),
            out_tree=jax.tree.structure((accumulators, sums)),
            execution_devices=jax.devices()[:1],
        )
        os.utime(path)
    except Exception as e:  # A damaged file may fail in any way, and compiling mends it.
        _log.warning("%s: %s; the training step is compiled again", path, first_line(e))
        return None
    return TrainingStep(forward._replace(remat=remat), program, is_read=True)


def _keep_step(path: Path, step: TrainingStep) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # The trees are those of the arguments and results of `accumulate`, and cannot be pickled.
        content, _, _ = serialize_executable.serialize(step.program)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(pickle.dumps((step.forward.remat, content)))
        partial.replace(path)
        kept = sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime)
        for file in kept[:-_MOST_STEPS]:
            file.unlink(missing_ok=True)
    except Exception as e:  # Training goes on without it, whatever JAX or the disk refuses.
        with suppress(OSError):
            partial.unlink()
        _log.warning("%s: the compiled training step is not kept: %s", path, first_line(e))


# Number of rounds after a compilation in which the host waits for the only device before each
# update.
_TRIAL_ROUNDS = 8


class StepPrograms(NamedTuple):
    """The training step of a `FusedReplica`. `made_for` is the layout of the train state, and
    whether any task has dropout."""

    made_for: tuple[Layout, bool]
    step: TrainingStep


class CompiledStep:
    """Compiles the training step of a replica of one part on one device, and dispatches it. If the
    device runs out of memory, it is compiled again with more recomputation.

    Attributes:
      programs: the compiled step; None before it is chosen.
      trial_rounds: number of rounds in which the memory for the step may still be too small.
    """

    def __init__(
        self, backbone: Backbone, options: EngineOptions, stored: StoredState, replicas: int
    ):
        self._backbone, self._options, self._stored = backbone, options, stored
        (self._home,) = stored.homes
        self._replicas = replicas
        self.programs: StepPrograms | None = None
        self.trial_rounds = 0
        # The layout of the state and the dropout for which the step is in use.
        self._used_for: tuple[Layout, bool] | None = None
        self._has_run = False
        # How often the device ran out of memory.
        self._leaner_by = 0
        self._guard: jax.Array | None = None

    @property
    def remat(self) -> str | tuple[str, ...] | None:
        if self._used_for is None or self._used_for[0] != self._stored.layout:
            return None
        return self.programs.step.forward.remat

    def take(self, programs: StepPrograms | None) -> None:
        """Takes the `programs` of another executor."""
        self.programs = programs

    def serves(self, dropout: bool) -> bool:
        wanted = self._stored.layout, dropout
        return self.programs is not None and self.programs.made_for == wanted

    def is_ready(self, dropout: bool, run: bool) -> bool:
        """Whether `compile` has nothing to do."""
        wanted = self._stored.layout, dropout
        return self._used_for == wanted and (self._has_run or not run)

    def compile(self, dropout: bool, run: bool) -> None:
        """Compiles the step, if that has not been done; with `run`, also runs it once, with an
        empty microbatch, which adds nothing to the state."""
        wanted = self._stored.layout, dropout
        if self._used_for != wanted:
            if self._guard is None and not compiles_only():
                with jax.default_device(self._home.device):
                    self._guard = keep_small_arrays_together()
            if not self.serves(dropout):
                self.programs = StepPrograms(wanted, self._compile(dropout))
            self._used_for, self._has_run, self.trial_rounds = wanted, False, _TRIAL_ROUNDS
        if run and not self._has_run and not compiles_only():
            self.accumulate(*self._empty_inputs())
            jax.block_until_ready(self._stored.states)
            self._has_run = True

    def _compile(self, dropout: bool) -> TrainingStep:
        (state,) = self._stored.states
        return compile_accumulate(
            self._backbone,
            self._options,
            dropout,
            state,
            *self._empty_inputs(),
            home=self._home,
            leaner_by=self._leaner_by,
            exchanged=exchanged_bytes(bytes_of(state.accumulators), self._replicas),
        )

    def _empty_inputs(self) -> tuple[Microbatch, SlotTable]:
        table = slot_table({}, None, self._stored.layout.tree.count.shape[0])
        microbatch = empty_microbatch(self._options.shape)
        return self._home.put(microbatch, P()), self._home.put(table, P())

    def accumulate(self, microbatch: Microbatch, slots: SlotTable) -> None:
        """Dispatches the forward and backward pass of a microbatch, whose gradients and losses are
        added to the state."""
        (state,), step = self._stored.states, self.programs.step
        arguments = accumulate_arguments(self._backbone, step.forward, state, microbatch, slots)
        if step.is_read:
            _, _, *arrays = arguments
            accumulators, sums = step.program(*arrays)
        else:
            accumulators, sums = self._home.run(accumulate, *arguments)
        self._stored.states = [state._replace(accumulators=accumulators, sums=sums)]

    def try_memory(self) -> None:
        """Allocates as much memory as the step needs, and frees it again. Raises JaxRuntimeError if
        the device has less memory."""
        program = _allocating(self.programs.step.scratch_bytes, self._home.shardings(P()))
        jax.block_until_ready(self._home.run(program))

    def recompute_more(self) -> None:
        """Prepares for another call of `compile` after the device ran out of memory. Accumulators
        may be lost."""
        self._leaner_by += 1
        self.programs = self._used_for = None

    def warm_moves(self) -> None:
        """Does nothing, because no arrays move between parts."""

    def release(self) -> None:
        """Does nothing, because the step keeps no memory from round to round."""


@functools.cache
def _allocating(size: int, sharding: jax.sharding.Sharding) -> Callable[[], jax.Array]:
    """A program that only allocates so many bytes."""
    return jax.jit(lambda: jax.lax.empty((size,), jnp.uint8), out_shardings=sharding)
