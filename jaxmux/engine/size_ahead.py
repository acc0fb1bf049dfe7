"""Compiles the programs of another size of an engine in a thread, beside training."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmux.models import Backbone
from jaxmux.peft import Layout
from jaxmux.planner.costs.pool_spec import PoolSpec

from .compile import TrainingStep
from .engine_options import EngineOptions, EngineSize
from .programs_of_shapes import ProgramsOfShapes


class SizeAhead:
    """The programs of an engine for another size, compiled in a thread beside training. Errors are
    not reported here: the engine meets them again.

    Attributes:
      sizes: the size of the engine when the thread was started, and the other size.
    """

    def __init__(self, sizes: tuple[EngineSize, EngineSize], compile_all: Callable[[], Any]):
        """Starts the thread.

        Args:
          sizes: the present size of the engine, and the other size.
          compile_all: function that compiles the programs.
        """
        self.sizes = sizes
        threads = ThreadPoolExecutor(1)
        self._compiled: Future = threads.submit(compile_all)
        threads.shutdown(wait=False)

    @property
    def ready(self) -> bool:
        """Whether all programs are compiled, or could not be."""
        return self._compiled.done()


class _Compiled(NamedTuple):
    """The training step, and a program that only takes the memory which it needs."""

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
        """Starts the thread.

        Args:
          sizes: the present size of the engine, and the other size.
          backbone: the frozen backbone.
          options: the options of an engine of the other size.
          pool: the pool of an engine of the other size.
          kinds: the optimizer kinds that tasks may have.
          before: the description of the present state.
        """
        self._programs = ProgramsOfShapes(backbone, options, pool, kinds)
        super().__init__(sizes, partial(self._compile, before))

    def training_step(self, layout: Layout, dropout: bool) -> TrainingStep | None:
        """The compiled training step, like that of `ProgramsAhead`."""
        return self._compiled.result().step if self._serve(layout, dropout) else None

    def wait_for_evaluation(self) -> None:
        """Returns when held-out samples can be evaluated, as `ProgramsAhead` does."""
        self._compiled.exception()

    def try_memory(self, layout: Layout, dropout: bool) -> bool:
        """Takes as much memory as the training step needs, and frees it again.

        Args:
          layout: the description of the train state.
          dropout: whether any task has dropout.

        Returns:
          False if the training step is compiled for another state or could not be compiled.

        Raises:
          jax.errors.JaxRuntimeError: the device has less memory.
        """
        if not self._serve(layout, dropout):
            return False
        jax.block_until_ready(self._compiled.result().scratch())
        return True

    def _serve(self, layout: Layout, dropout: bool) -> bool:
        """Whether the training step is compiled for this state; waits for it."""
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
