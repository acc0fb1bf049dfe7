"""Programs that are compiled before their arrays exist: those of a training run, in a thread beside
the work before training, and those for another size of a running engine."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmux.models import Backbone, BackboneConfig
from jaxmux.models.modules import abstract_weights
from jaxmux.optimizers import optimizer_class
from jaxmux.pallas_kernels.compilation import compiled
from jaxmux.peft import Layout, LeafSpec
from jaxmux.peft.leaves import named_leaves
from jaxmux.planner.costs.pool_spec import PoolSpec

from ..engine_options import EngineOptions, EngineSize
from ..rounds.rounds import empty_microbatch, slot_table
from ..state.renewal import compile_renewal, slots_with_pairs
from ..state.slots import pool_of
from ..state.stored_state import copied
from ..state.train_state import (
    READ_FIELDS,
    TrainState,
    clear_slot,
    moved,
    read_slot,
    slot_kinds,
    slot_view,
    write_leaf,
    written_specs,
)
from ..state.updates import (
    has_foreign_gradients,
    no_stats,
    update_kind,
    without_foreign,
)
from ..tasks.prepared_task import PreparedTask
from .programs import TrainingStep, compile_accumulate, evaluate, forward_options


class ProgramsOfShapes:
    """Compiles the programs of one device for a pool, a shape class and the optimizer kinds of
    tasks.

    JAX keeps compiled programs by the shapes and dtypes of their arguments, so an engine finds them
    although they are compiled without any array.
    """

    def __init__(
        self, backbone: Backbone, options: EngineOptions, pool: PoolSpec, kinds: Sequence[str]
    ):
        """Compiles nothing yet. Only shapes and dtypes of the backbone's weights are read."""
        self.pool, specs = pool_of(backbone.config, [], pool, keep_moments=True)
        self.layout, self.kinds = Layout(specs), list(kinds)
        self._backbone, self._options = backbone, options
        self._state: TrainState = _arrays(specs)
        self._microbatch = empty_microbatch(options.shape)
        self._table = slot_table({}, None, self.pool.slots)

    def compile_evaluate(self) -> None:
        backbone, state = self._backbone, self._state
        forward = forward_options(backbone, self._options, state.adapters)
        losses = jax.ShapeDtypeStruct((self.pool.slots,), jnp.float32)
        compiled(
            evaluate.lower(
                backbone.config,
                forward,
                backbone.weights,
                state.adapters,
                losses,
                self._microbatch,
                self._table,
            )
        )

    def compile_accumulate(self) -> TrainingStep:
        return compile_accumulate(
            self._backbone,
            self._options,
            self.pool.dropout,
            self._state,
            self._microbatch,
            self._table,
        )

    def compile_update(self, kind: str) -> None:
        leaves, slots = len(named_leaves(self.layout.tree.accumulators)), self.pool.slots
        rates = np.zeros((leaves, self._backbone.config.num_layers, slots), np.float32)
        none, paired = np.zeros(slots, np.float32), slots_with_pairs(self.layout, {})
        if has_foreign_gradients(self.layout):
            without_foreign.lower(self.layout, self._state, none > 0, rates > 0, paired).compile()
        hyper = dict.fromkeys(optimizer_class(kind)().hyperparameters(), none)
        update_kind.lower(
            kind, self.layout, self._state, no_stats(slots), none > 0, rates, hyper, paired
        ).compile()

    def compile_slots(self, before: Layout) -> None:
        """Compiles the programs that read, write and clear a slot, and those that move a state with
        the description `before` to this size."""
        state, layout = self._state, self.layout
        clear_slot.lower(state, layout, 0).compile()
        copied.lower(state.loss).compile()
        written: dict[LeafSpec, None] = {}
        for kind in slot_kinds(layout.tree, self.kinds):
            for fields in READ_FIELDS:
                read_slot.lower(state, layout, kind, fields, 0, True).compile()
            written |= dict.fromkeys(jax.tree.leaves(slot_view(layout.tree, kind)))
        for spec in written:
            for value in map(_arrays, written_specs(spec.of_slot())):
                write_leaf.lower(_arrays(spec), spec, 0, value).compile()
        compile_renewal(layout, self._backbone.weights["layers"], state.adapters)
        sources = np.zeros(self.pool.slots, np.int32)
        for name, spec in named_leaves(layout.tree).items():
            moved.lower(_arrays(named_leaves(before.tree)[name]), spec, sources).compile()


def _arrays(specs: Any) -> Any:
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs)


class ProgramsAhead:
    """The programs that an engine will need for given tasks, compiled in a thread. The engine finds
    them as described for `ProgramsOfShapes`. Errors are not reported here, because the engine meets
    them again.

    The programs are compiled one after another. On a GPU nothing should run beside them, because
    XLA chooses among implementations of a product by timing them. On a CPU, loading the backbone is
    short, and tracing in another thread would slow it down; there the training programs are
    compiled while held-out samples are evaluated.
    """

    def __init__(
        self,
        config: BackboneConfig,
        dtype: jnp.dtype,
        options: EngineOptions,
        tasks: Sequence[PreparedTask],
    ):
        self._on_gpu = jax.default_backend() == "gpu"
        self._thread = ThreadPoolExecutor(1)
        backbone = Backbone(config, abstract_weights(config, dtype), "")
        pool, _ = pool_of(config, [task.pool for task in tasks], options.reserved)
        kinds = list(dict.fromkeys(task.task.optimizer.kind for task in tasks))
        self._programs = ProgramsOfShapes(backbone, options, pool, kinds)
        self._evaluation: list[Future] = []
        if any(task.eval_samples for task in tasks):
            self._evaluation.append(self._thread.submit(self._programs.compile_evaluate))
        self._training: list[Future] = []
        if self._on_gpu or not self._evaluation:
            self._compile_training()

    def _compile_training(self) -> None:
        """Begins to compile the programs of a round; the first result is that of
        `compile_accumulate`."""
        if not self._training:
            programs, submit = self._programs, self._thread.submit
            self._training.append(submit(programs.compile_accumulate))
            self._training += [submit(programs.compile_update, kind) for kind in programs.kinds]

    def wait_for_evaluation(self) -> None:
        wait([*self._evaluation, *self._training] if self._on_gpu else self._evaluation)
        self._compile_training()

    def training_step(self, layout: Layout, dropout: bool) -> TrainingStep | None:
        """Waits for all programs, and returns the training step; None if it is compiled for another
        layout or could not be compiled. `dropout` tells whether any task has dropout."""
        self._compile_training()
        wait([*self._evaluation, *self._training])
        compiled_for = self._programs.layout, self._programs.pool.dropout
        if (layout, dropout) != compiled_for or self._training[0].exception():
            return None
        return self._training[0].result()

    def close(self) -> None:
        """Cancels the compilation of programs that has not begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class SizeAhead:
    """The programs of an engine for another size, compiled in a thread beside training. Errors are
    not reported here, because the engine meets them again. `sizes` are the size of the engine when
    the thread was started, and the other size."""

    def __init__(self, sizes: tuple[EngineSize, EngineSize], compile_all: Callable[[], Any]):
        self.sizes = sizes
        threads = ThreadPoolExecutor(1)
        self._compiled: Future = threads.submit(compile_all)
        threads.shutdown(wait=False)

    @property
    def ready(self) -> bool:
        return self._compiled.done()


class _Compiled(NamedTuple):
    """The training step, and a program that only allocates the memory that the step needs."""

    step: TrainingStep
    scratch: jax.stages.Compiled


class DeviceSizeAhead(SizeAhead):
    """The programs of an engine on one device."""

    def __init__(
        self,
        sizes: tuple[EngineSize, EngineSize],
        backbone: Backbone,
        options: EngineOptions,
        pool: PoolSpec,
        kinds: Sequence[str],
        before: Layout,
    ):
        """Starts the thread. `sizes` are the present and the other size; `options` and `pool` are
        those of an engine of the other size, and `before` describes the present state."""
        self._programs = ProgramsOfShapes(backbone, options, pool, kinds)
        super().__init__(sizes, partial(self._compile, before))

    def training_step(self, layout: Layout, dropout: bool) -> TrainingStep | None:
        return self._compiled.result().step if self._serve(layout, dropout) else None

    def wait_for_evaluation(self) -> None:
        self._compiled.exception()

    def try_memory(self, layout: Layout, dropout: bool) -> bool:
        """Allocates as much memory as the training step needs, and frees it again. Returns False if
        no step is compiled for this state. Raises JaxRuntimeError if the device has less memory."""
        if not self._serve(layout, dropout):
            return False
        jax.block_until_ready(self._compiled.result().scratch())
        return True

    def _serve(self, layout: Layout, dropout: bool) -> bool:
        compiled_for = self._programs.layout, self._programs.pool.dropout
        return (layout, dropout) == compiled_for and not self._compiled.exception()

    def _compile(self, before: Layout) -> _Compiled:
        programs = self._programs
        programs.compile_slots(before)
        programs.compile_evaluate()
        for kind in programs.kinds:
            programs.compile_update(kind)
        step = programs.compile_accumulate()
        scratch = jax.jit(lambda: jax.lax.empty((step.scratch_bytes,), jnp.uint8))
        return _Compiled(step, scratch.lower().compile())
