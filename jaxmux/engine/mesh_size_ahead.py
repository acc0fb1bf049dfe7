"""Compiles the programs of another size of an engine on several devices."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.sharding import PlacedBackbone, only_compiling

from .compiled_stages import StagePrograms
from .due_updates import no_updates
from .engine_options import EngineOptions, EngineSize
from .pool_sizes import pool_of
from .several_devices import SeveralDevices
from .size_ahead import SizeAhead
from .stored_state import StoredState


class MeshSizeAhead(SizeAhead):
    """The programs of an engine on several devices. Its thread does what the engine will do when
    its size changes, but only compiles: see `sharding.only_compiling`."""

    def __init__(
        self,
        sizes: tuple[EngineSize, EngineSize],
        backbones: Sequence[PlacedBackbone],
        options: EngineOptions,
        pool: PoolSpec,
        kinds: Sequence[str],
        stored: StoredState,
    ):
        """Starts the thread.

        Args:
          sizes: the present size of the engine, and the other size.
          backbones: for each replica, the frozen backbone.
          options: the options of an engine of the other size.
          pool: the pool of an engine of the other size.
          kinds: the optimizer kinds that tasks may have.
          stored: the present state.
        """
        given = backbones, options, pool, kinds, stored.without_arrays()
        super().__init__(sizes, partial(_compile, *given))

    @property
    def programs(self) -> list[StagePrograms] | None:
        """For each replica, the programs of its parts; waits for them. None if they could not be
        compiled."""
        return None if self._compiled.exception() else self._compiled.result()


def _compile(
    backbones: Sequence[PlacedBackbone],
    options: EngineOptions,
    pool: PoolSpec,
    kinds: Sequence[str],
    stored: StoredState,
) -> list[StagePrograms]:
    config = backbones[0].config
    _, specs = pool_of(config, [], pool, keep_moments=True)
    with only_compiling():
        (slots,) = stored.layout.tree.loss.shape
        stored.resize(specs, np.full(pool.slots, slots, np.int32))
        stored.warm_up(kinds, 0)
        executor = SeveralDevices(backbones, options, stored)
        executor.warm_up(no_updates(stored.layout, config.num_layers, kinds), pool.dropout)
    return executor.programs
