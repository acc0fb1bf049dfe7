"""Compiles the programs of a training run in a thread, beside what comes before training."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import jax
import jax.numpy as jnp

from jaxmux.models import Backbone, BackboneConfig
from jaxmux.models.modules import abstract_weights
from jaxmux.peft import Layout

from .compile import TrainingStep
from .engine_options import EngineOptions
from .pool_sizes import pool_of
from .prepared_task import PreparedTask
from .programs_of_shapes import ProgramsOfShapes


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
        """Returns when held-out samples can be evaluated."""
        wait([*self._evaluation, *self._training] if self._on_gpu else self._evaluation)
        self._compile_training()

    def training_step(self, layout: Layout, dropout: bool) -> TrainingStep | None:
        """The compiled training step.

        Returns when all programs are compiled.

        Args:
          layout: the description of the train state.
          dropout: whether any task has dropout.

        Returns:
          The training step; None if it is compiled for another layout or could not be compiled.
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
