"""The train state where the engine keeps it: in parts by layers, each on its device."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxmux.peft import Layout, LeafSpec
from jaxmux.peft.leaves import named_leaves
from jaxmux.sharding import Part

from .train_state import (
    SlotKind,
    SlotState,
    TrainState,
    clear_slot,
    empty_state,
    grown,
    read_slot,
    write_adapter,
    write_slot,
)


class StoredState:
    """The train state of all slots, divided into parts by layers.

    A part holds its layers of every array that has a layer axis, and all other arrays whole. Losses
    count only in the last part, which computes them.

    Attributes:
      parts: the layers of each part.
      states: the state of each part, on its device; empty until `make_room` is called.
      layouts: the descriptions of `states`, each a `TrainState` of `LeafSpec`.
      layout: the description of the whole state; None until `make_room` is called.
    """

    def __init__(self, parts: Sequence[Part], devices: Sequence[jax.Device | None]):
        """Creates a state without arrays.

        Args:
          parts: the layers of each part, together all layers of the backbone.
          devices: the device of each part; None for the default device.
        """
        self.parts = list(parts)
        self.states: list[TrainState] = []
        self.layouts: list[Layout] = []
        self.layout: Layout | None = None
        self._devices = list(devices)

    def make_room(self, specs: TrainState) -> None:
        """Creates the state, or enlarges it.

        Args:
          specs: the description of the whole state.
        """
        layout = Layout(specs)
        if layout == self.layout:
            return
        layouts = [Layout(_of_part(specs, part)) for part in self.parts]
        if not self.states:
            self.states = [
                _placed(empty_state(own.tree), device)
                for own, device in zip(layouts, self._devices, strict=True)
            ]
        for i, own in enumerate(layouts):
            if self.layout is not None:
                leaves, self.states[i] = named_leaves(self.states[i]), None
                self.states[i] = _placed(grown(leaves, own.tree), self._devices[i])
        self.layout, self.layouts = layout, layouts

    def write_adapter(self, kind: str, slot: int, adapter: Any) -> None:
        """Replaces the adapter of one slot in place.

        Args:
          kind: the adapter kind.
          slot: number of the slot.
          adapter: NumPy arrays of all layers at the pool's rank and modules, without the slot axis.
        """
        specs = jax.tree.map(LeafSpec.of_slot, self.layout.tree.adapters[kind])
        self._change(write_adapter, kind, slot, values=(specs, adapter))

    def write(self, kind: SlotKind, slot: int, specs: SlotState, value: SlotState) -> None:
        """Replaces one slot in place.

        Args:
          kind: adapter kind and optimizer kind of the slot's task.
          slot: number of the slot.
          specs: the description of the slot.
          value: NumPy arrays of all layers, at the pool's rank and modules.
        """
        self._change(write_slot, kind, slot, values=(specs, value))

    def clear(self, slot: int) -> None:
        """Empties one slot in place."""
        self._change(clear_slot, slot)

    def read(self, kind: SlotKind, slot: int, specs: SlotState) -> SlotState:
        """The arrays of one slot, as NumPy arrays.

        Args:
          kind: adapter kind and optimizer kind of the slot's task.
          slot: number of the slot.
          specs: the description of the slot.
        """
        found = [
            read_slot(state, layout, kind, slot)
            for state, layout in zip(self.states, self.layouts, strict=True)
        ]

        def joined(spec: LeafSpec, *leaves: jax.Array) -> np.ndarray | jax.Array:
            if len(leaves) == 1 or "layer" not in spec.axes:
                return leaves[0]
            return np.concatenate([np.asarray(leaf) for leaf in leaves], spec.axes.index("layer"))

        return jax.tree.map(joined, specs, *found)._replace(loss=found[-1].loss)

    def _change(self, write: Callable[..., TrainState], *arguments: Any, values=None) -> None:
        """Calls `write(state, layout, *arguments, value)` for every part, in which `value` has the
        part's layers. `values` is a pair of the values' description and the values."""
        for i, part in enumerate(self.parts):
            own = () if values is None else (_layers_of(*values, part),)
            self.states[i] = write(self.states[i], self.layouts[i], *arguments, *own)


def _of_part(specs: TrainState, part: Part) -> TrainState:
    def own(spec: LeafSpec) -> LeafSpec:
        pairs = zip(spec.axes, spec.shape, strict=True)
        shape = tuple(part.layers if axis == "layer" else size for axis, size in pairs)
        return dataclasses.replace(spec, shape=shape)

    return jax.tree.map(own, specs)


def _layers_of(specs: Any, values: Any, part: Part) -> Any:
    def own(spec: LeafSpec, value: np.ndarray) -> np.ndarray:
        if "layer" not in spec.axes:
            return value
        return value[(slice(None),) * spec.axes.index("layer") + (part.slice,)]

    return jax.tree.map(own, specs, values)


def _placed(state: TrainState, device: jax.Device | None) -> TrainState:
    return state if device is None else jax.device_put(state, device)
