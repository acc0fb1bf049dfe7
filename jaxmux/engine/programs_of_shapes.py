"""Programs that are compiled for arguments with shapes and dtypes, but without values."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmux.models import Backbone
from jaxmux.optimizers import optimizer_class
from jaxmux.pallas_kernels.compilation import compiled
from jaxmux.peft import Layout, LeafSpec
from jaxmux.peft.leaves import named_leaves
from jaxmux.planner.costs.pool_spec import PoolSpec

from .compile import TrainingStep, compile_accumulate, forward_options
from .due_updates import no_stats
from .engine_options import EngineOptions
from .paired_ranks import slots_with_pairs
from .pool_sizes import pool_of
from .programs import evaluate
from .renewal import compile_renewal
from .rounds import empty_microbatch, slot_table
from .stored_state import copied
from .train_state import (
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
from .updates import has_foreign_gradients, update_kind, without_foreign


class ProgramsOfShapes:
    """Compiles the programs of one device for a pool and a shape class.

    JAX keeps compiled programs by the shapes and dtypes of their arguments, so an engine finds them
    although they are compiled without any array.

    Attributes:
      pool: sizes of the pool.
      layout: the description of the train state.
      kinds: the optimizer kinds of the tasks.
    """

    def __init__(
        self, backbone: Backbone, options: EngineOptions, pool: PoolSpec, kinds: Sequence[str]
    ):
        """Compiles nothing yet.

        Args:
          backbone: the frozen backbone; of its weights, only shapes and dtypes are read.
          options: the options of the engine, with the shape class.
          pool: sizes of the pool.
          kinds: the optimizer kinds of the tasks.
        """
        self.pool, specs = pool_of(backbone.config, [], pool, keep_moments=True)
        self.layout, self.kinds = Layout(specs), list(kinds)
        self._backbone, self._options = backbone, options
        self._state: TrainState = _arrays(specs)
        self._microbatch = empty_microbatch(options.shape)
        self._table = slot_table({}, None, self.pool.slots)

    def compile_evaluate(self) -> None:
        """Compiles the measurement of held-out losses."""
        backbone, state = self._backbone, self._state
        forward = forward_options(backbone, self._options, state.adapters)
        losses = jax.ShapeDtypeStruct((self.pool.slots,), jnp.float32)
        arguments = backbone.weights, state.adapters, losses, self._microbatch, self._table
        compiled(evaluate.lower(backbone.config, forward, *arguments))

    def compile_accumulate(self) -> TrainingStep:
        """Compiles the training step."""
        return compile_accumulate(
            self._backbone,
            self._options,
            self.pool.dropout,
            self._state,
            self._microbatch,
            self._table,
        )

    def compile_update(self, kind: str) -> None:
        """Compiles the update of the tasks with one kind of optimizer."""
        leaves, slots = len(named_leaves(self.layout.tree.accumulators)), self.pool.slots
        rates = np.zeros((leaves, self._backbone.config.num_layers, slots), np.float32)
        none, paired = np.zeros(slots, np.float32), slots_with_pairs(self.layout, {})
        if has_foreign_gradients(self.layout):
            own = none > 0, rates > 0, paired
            without_foreign.lower(self.layout, self._state, *own).compile()
        hyper = dict.fromkeys(optimizer_class(kind)().hyperparameters(), none)
        arguments = self._state, no_stats(slots), none > 0, rates, hyper, paired
        update_kind.lower(kind, self.layout, *arguments).compile()

    def compile_slots(self, before: Layout) -> None:
        """Compiles what reads, writes and clears a slot, and what continues a state of another
        size.

        Args:
          before: the description of that state.
        """
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
    """Shapes and dtypes of the arrays of a tree of `LeafSpec`."""
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), specs)
