"""Programs that are compiled in a thread before an engine needs them: those of a training run,
while its backbone is loaded, and those for another size of a running engine."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmux.models import Backbone, BackboneConfig
from jaxmux.models.modules import abstract_weights
from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.sharding import PlacedBackbone, only_compiling

from ..engine_options import EngineOptions, EngineSize
from ..rounds.rounds import paired_slots, waiting_slots
from ..state.slots import pool_of
from ..state.stored_state import StoredState
from ..state.updates import no_updates
from ..tasks.prepared_task import PreparedTask
from .executor import Executor


class ProgramsAhead:
    """Compiles the programs of an executor in a thread. The thread does the same as an engine, but
    only compiles: see `sharding.only_compiling`. Errors are not reported here, because the engine
    meets them again.

    JAX keeps compiled programs by the shapes, dtypes and shardings of their arrays, so an engine
    finds them although they are compiled without any array.
    """

    def __init__(
        self,
        backbones: Sequence[PlacedBackbone],
        options: EngineOptions,
        stored: StoredState,
        sizes: tuple[EngineSize, EngineSize] | None = None,
    ):
        """Compiles nothing yet. `stored` has shapes in place of arrays. `sizes` are the present
        size of the engine, and the size for which programs are compiled."""
        self.sizes = sizes
        self._backbones, self._stored = backbones, stored
        self._executor = Executor(backbones, options, stored)
        self._thread = ThreadPoolExecutor(1)
        # Work in the order in which the thread does it. Programs of rounds are compiled after those
        # that measure held-out losses; `_start_rounds` begins to do so.
        self._evaluation: list[Future] = []
        self._rounds: list[Future] = []
        self._start_rounds: Callable[[], None] = lambda: None

    @classmethod
    def of_tasks(
        cls,
        config: BackboneConfig,
        dtype: jnp.dtype,
        options: EngineOptions,
        tasks: Sequence[PreparedTask],
    ) -> "ProgramsAhead":
        """The programs of an engine on one device for given tasks.

        The programs are compiled one after another. On a GPU nothing should run beside them,
        because XLA chooses among implementations of a product by timing them. On a CPU, loading the
        backbone is short, and tracing in another thread would slow it down; there the training
        programs are compiled while held-out samples are evaluated.
        """
        shapes = Backbone(config, abstract_weights(config, dtype), "")
        backbone = PlacedBackbone.on_one_device(shapes)
        pool, specs = pool_of(config, [task.pool for task in tasks], options.reserved)
        kinds = list(dict.fromkeys(task.task.optimizer.kind for task in tasks))
        stored = StoredState(backbone.parts, backbone.homes, alone=True)
        stored.describe(specs)
        ahead = cls([backbone], options, stored)
        executor, none_due = ahead._executor, no_updates(stored.layout, config.num_layers, kinds)

        def start_rounds() -> None:
            if not ahead._rounds:
                updates = partial(executor.warm_up_updates, none_due, pool.dropout)
                programs = partial(executor.compile, pool.dropout, run=False)
                ahead._rounds += [ahead._submit(programs), ahead._submit(updates)]

        ahead._start_rounds = start_rounds
        by_number = dict(enumerate(tasks))
        paired = paired_slots(by_number, executor.replicas, options.packing)
        if any(task.eval_samples for task in tasks) or waiting_slots(by_number, paired):
            ahead._evaluation.append(ahead._submit(executor.warm_up_evaluation))
        if jax.default_backend() == "gpu" or not ahead._evaluation:
            start_rounds()
        return ahead

    @classmethod
    def of_size(
        cls,
        sizes: tuple[EngineSize, EngineSize],
        backbones: Sequence[PlacedBackbone],
        options: EngineOptions,
        pool: PoolSpec,
        kinds: Sequence[str],
        stored: StoredState,
    ) -> "ProgramsAhead":
        """The programs for another size of an engine, and those that move the state. `sizes` are
        the present and the other size; `options` and `pool` are those of an engine of the other
        size, and `stored` is the present state."""
        ahead = cls(backbones, options, stored.without_arrays(), sizes)
        ahead._rounds.append(ahead._submit(partial(ahead._compile_size, pool, kinds)))
        ahead._thread.shutdown(wait=False)
        return ahead

    def _compile_size(self, pool: PoolSpec, kinds: Sequence[str]) -> None:
        config, stored, executor = self._backbones[0].config, self._stored, self._executor
        _, specs = pool_of(config, [], pool, keep_moments=True)
        (slots,) = stored.layout.tree.count.shape
        stored.resize(specs, np.full(pool.slots, slots, np.int32))
        stored.warm_up(kinds, 0)
        executor.warm_up(no_updates(stored.layout, config.num_layers, kinds), pool.dropout)
        executor.try_memory(pool.dropout)

    def _submit(self, compile_some: Callable[[], Any]) -> Future:
        def run() -> None:
            with only_compiling():
                compile_some()

        return self._thread.submit(run)

    @property
    def ready(self) -> bool:
        return all(done.done() for done in (*self._evaluation, *self._rounds))

    def wait_for_evaluation(self) -> None:
        """Waits for the programs that measure held-out losses; on a GPU for all of them."""
        on_gpu = jax.default_backend() == "gpu"
        wait([*self._evaluation, *self._rounds] if on_gpu else self._evaluation)
        self._start_rounds()

    def programs(self) -> list[Any]:
        """Waits for all programs. Returns those of each replica, for `Executor`; None in place of
        programs that could not be compiled."""
        self._start_rounds()
        wait([*self._evaluation, *self._rounds])
        failed = any(done.exception() for done in self._rounds)
        return [None if failed else programs for programs in self._executor.programs]

    def close(self) -> None:
        """Cancels the compilation of programs that has not begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)
