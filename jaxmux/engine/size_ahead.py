"""Compiles the programs of another size of an engine in a thread, beside training."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from jaxmux.models import Backbone, ForwardOptions
from jaxmux.peft import Layout
from jaxmux.planner.costs.pool_spec import PoolSpec

from .engine_options import EngineOptions, EngineSize
from .programs_of_shapes import ProgramsOfShapes


class SizeAhead:
    """The programs of an engine on one device for another size, compiled in a thread beside
    training. Errors are not reported here: the engine meets them again.

    Attributes:
      sizes: the size of the engine when the thread was started, and the other size.
    """

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
        self.sizes = sizes
        self._programs = ProgramsOfShapes(backbone, options, pool, kinds)
        threads = ThreadPoolExecutor(1)
        self._forward: Future[ForwardOptions] = threads.submit(self._compile, before)
        threads.shutdown(wait=False)

    @property
    def ready(self) -> bool:
        """Whether all programs are compiled, or could not be."""
        return self._forward.done()

    def forward_options(self, layout: Layout, dropout: bool) -> ForwardOptions | None:
        """The options of the forward pass for which the training step is compiled, like those of
        `ProgramsAhead`."""
        compiled_for = self._programs.layout, self._programs.pool.dropout
        if (layout, dropout) != compiled_for or self._forward.exception():
            return None
        return self._forward.result()

    def wait_for_evaluation(self) -> None:
        """Returns when held-out samples can be evaluated, as `ProgramsAhead` does."""
        self._forward.exception()

    def _compile(self, before: Layout) -> ForwardOptions:
        programs = self._programs
        programs.compile_slots(before)
        programs.compile_evaluate()
        for kind in programs.kinds:
            programs.compile_update(kind)
        return programs.compile_accumulate()
