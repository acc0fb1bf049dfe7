"""Compiles the programs of a training run in a thread, beside what comes before training."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import jax
import jax.numpy as jnp
import numpy as np

from jaxmux.models import Backbone, BackboneConfig, ForwardOptions
from jaxmux.models.modules import abstract_weights
from jaxmux.optimizers import optimizer_class
from jaxmux.pallas_kernels.compilation import compiled
from jaxmux.peft import Layout
from jaxmux.peft.leaves import named_leaves

from .compile import compile_accumulate, forward_options
from .engine_options import EngineOptions
from .prepared_task import PreparedTask
from .programs import evaluate
from .rounds import empty_microbatch, slot_table
from .slots import pool_of
from .train_state import TrainState
from .updates import no_stats, update_kind


class ProgramsAhead:
    """The programs that an engine will need for given tasks, compiled in a thread.

    JAX keeps compiled programs by the shapes and dtypes of their arguments, so the engine finds
    them although they are compiled without any array. Errors are not reported here: the engine
    meets them again.

    The programs are compiled one after another. On a GPU nothing should run beside them, because
    XLA chooses among implementations of a product by timing them. On a CPU loading is short, and
    what traces programs would only slow it down; there the training programs are compiled while
    held-out samples are evaluated.
    """

    def __init__(
        self,
        config: BackboneConfig,
        dtype: jnp.dtype,
        options: EngineOptions,
        tasks: Sequence[PreparedTask],
    ):
        """Starts the thread.

        Args:
          config: configuration of the backbone.
          dtype: dtype of the backbone's weights.
          options: the options of the engine.
          tasks: the tasks that the engine will train.
        """
        self._on_gpu = jax.default_backend() == "gpu"
        self._thread = ThreadPoolExecutor(1)
        backbone = Backbone(config, abstract_weights(config, dtype), "")
        self._programs = _Programs(backbone, options, tasks)
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
        """Returns when held-out samples can be evaluated."""
        wait([*self._evaluation, *self._training] if self._on_gpu else self._evaluation)
        self._compile_training()

    def forward_options(self, layout: Layout, dropout: bool) -> ForwardOptions | None:
        """The options of the forward pass for which the training step is compiled.

        Returns when all programs are compiled.

        Args:
          layout: the description of the train state.
          dropout: whether any task has dropout.

        Returns:
          The options; None if the training step is compiled for another layout or could not be
          compiled.
        """
        self._compile_training()
        wait([*self._evaluation, *self._training])
        compiled_for = self._programs.layout, self._programs.pool.dropout
        if (layout, dropout) != compiled_for or self._training[0].exception():
            return None
        return self._training[0].result()

    def close(self) -> None:
        """Compiles no further program."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class _Programs:
    """Compiles programs for arguments that have shapes and dtypes but no values."""

    def __init__(self, backbone: Backbone, options: EngineOptions, tasks: Sequence[PreparedTask]):
        self.backbone, self.options = backbone, options
        self.kinds = list(dict.fromkeys(task.task.optimizer.kind for task in tasks))
        self.pool, specs = pool_of(backbone.config, [task.pool for task in tasks], options.reserved)
        self.layout = Layout(specs)
        self.state: TrainState = jax.tree.map(
            lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs
        )
        self.microbatch = empty_microbatch(options.shape)
        self.table = slot_table({}, None, self.pool.slots)

    def compile_evaluate(self) -> None:
        backbone, state = self.backbone, self.state
        forward = forward_options(backbone, self.options)
        losses = jax.ShapeDtypeStruct((self.pool.slots,), jnp.float32)
        arguments = backbone.weights, state.adapters, losses, self.microbatch, self.table
        compiled(evaluate.lower(backbone.config, forward, *arguments))

    def compile_accumulate(self) -> ForwardOptions:
        return compile_accumulate(
            self.backbone,
            self.options,
            self.pool.dropout,
            self.state,
            self.microbatch,
            self.table,
        )

    def compile_update(self, kind: str) -> None:
        leaves, slots = len(named_leaves(self.layout.tree.accumulators)), self.pool.slots
        rates = np.zeros((leaves, self.backbone.config.num_layers, slots), np.float32)
        none = np.zeros(slots, np.float32)
        hyper = dict.fromkeys(optimizer_class(kind)().hyperparameters(), none)
        arguments = self.state, no_stats(slots), none > 0, rates, hyper
        update_kind.lower(kind, self.layout, *arguments).compile()
