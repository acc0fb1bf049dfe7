"""The train state where the engine keeps it: in parts by layers, each on its devices."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxmux.peft import KINDS, Layout, LeafSpec
from jaxmux.peft.leaves import named_leaves
from jaxmux.sharding import Part, StageMesh, shapes_of
from jaxmux.sharding.stage_mesh import run_on

from .train_state import (
    READ_FIELDS,
    SlotKind,
    SlotState,
    TrainState,
    clear_slot,
    empty_state,
    grown,
    moved,
    read_slot,
    slot_kinds,
    slot_specs,
    with_empty_accumulators,
    write_leaf,
    write_slot,
    written_specs,
)


class StoredState:
    """The train state of all slots, divided into parts by layers.

    A part holds its layers of every array that has a layer axis. Arrays with the axis "first" lie
    in the first part, those with the axis "last" in the last one (`LeafSpec.of_layers`); every part
    has all other arrays whole. Losses count only in the last part, which computes them. On a mesh,
    accumulators and losses have an axis "copy": what the devices have computed, until an update
    sums it.

    Attributes:
      parts: the layers of each part.
      homes: the mesh of each part; None for the default device.
      states: the state of each part, on its devices; empty until `make_room` is called.
      layouts: the descriptions of `states`, each a `TrainState` of `LeafSpec`.
      summed: the same without the axis "copy".
      layout: the description of the whole state; None until `make_room` is called.
      changes: by slot, the number of the last change of this slot, except by training. Changes are
        numbered from 1.
    """

    def __init__(self, parts: Sequence[Part], homes: Sequence[StageMesh | None]):
        """Creates a state without arrays.

        Args:
          parts: the layers of each part, together all layers of the backbone.
          homes: the mesh of each part; None for the default device.
        """
        self.parts = list(parts)
        self.homes = list(homes)
        self.states: list[TrainState] = []
        self.layouts: list[Layout] = []
        self.summed: list[Layout] = []
        self.layout: Layout | None = None
        self.changes: dict[int, int] = {}

    def make_room(self, specs: TrainState) -> None:
        """Creates the state, or enlarges it.

        Args:
          specs: the description of the whole state.
        """
        layout = Layout(specs)
        if layout == self.layout:
            return
        self.summed, layouts = self._described(specs)
        if not self.states:
            self.states = [_empty(own, home) for own, home in zip(layouts, self.homes, strict=True)]
        for i, own in enumerate(layouts):
            if self.layout is not None:
                leaves, self.states[i] = named_leaves(self.states[i]), None
                larger = grown(leaves, own.tree, self.homes[i])
                self.states[i] = _placed(larger, own, self.homes[i])
        self.layout, self.layouts = layout, layouts

    def resize(self, specs: TrainState, sources: Int[np.ndarray, " T"]) -> None:
        """Gives the state another number of slots.

        The devices hold only one array twice at any time. If one of them has too little memory, the
        state is what it was before.

        Args:
          specs: the description of the whole new state, which differs in the number of slots only.
          sources: for every new slot, the number of the old slot that it continues; the old number
            of slots for an empty one.

        Raises:
          jax.errors.JaxRuntimeError: a device has too little memory.
        """
        if Layout(specs) == self.layout:
            return
        capacity = self.layout.tree.loss.shape[0]
        kept = sources < capacity
        back = np.full(capacity, len(sources), np.int32)
        back[sources[kept]] = np.flatnonzero(kept)
        summed, layouts = self._described(specs)
        try:
            for i, layout in enumerate(layouts):
                self._move(i, layout, sources)
        except jax.errors.JaxRuntimeError:
            for i, layout in enumerate(self.layouts):
                self._move(i, layout, back)
            raise
        self.layout, self.summed, self.layouts = Layout(specs), summed, layouts
        self.changes = {}

    def without_arrays(self) -> "StoredState":
        """A copy of this state on meshes with shapes in place of its arrays, for
        `sharding.only_compiling`."""
        other = copy.copy(self)
        other.states, other.changes = [shapes_of(state) for state in self.states], {}
        return other

    def warm_up(self, optimizers: Sequence[str], slot: int) -> None:
        """Reads, writes and clears a slot once, so that nothing is compiled when tasks come and go.

        Args:
          optimizers: the optimizer kinds that tasks may have.
          slot: number of an empty slot.
        """
        adapters: dict[str, Any] = {}
        for kind in slot_kinds(self.layout.tree, optimizers):
            specs = slot_specs(self.layout.tree, kind)
            for fields in READ_FIELDS:
                self.copy_to_host(kind, slot, specs, fields)
            empty = jax.tree.map(lambda spec: np.full(spec.shape, spec.padding, spec.dtype), specs)
            self.write(kind, slot, specs, empty)
            adapters[kind.adapter] = specs.adapter
        for name, own in adapters.items():
            sizes = {path: written_specs(spec) for path, spec in named_leaves(own).items()}
            for i in range(max(map(len, sizes.values()))):
                each = {path: specs[i] for path, specs in sizes.items() if i < len(specs)}
                leaves = {path: np.full(x.shape, x.padding, x.dtype) for path, x in each.items()}
                self.write_adapter(name, slot, leaves)
        self.clear(slot)

    def write_adapter(self, kind: str, slot: int, leaves: Mapping[str, np.ndarray]) -> None:
        """Replaces arrays of the adapter of one slot in place.

        Every array has a program of its own, so that what the slot has already need not be sent.

        Args:
          kind: the adapter kind.
          slot: number of the slot.
          leaves: by path, NumPy arrays of all layers, of sizes from `written_specs`. Arrays that
            are left out, and higher ranks, stay as they are.
        """
        self._note_change(slot)
        own = KINDS[kind]
        whole = named_leaves(own.from_pools(self.layout.tree.adapters))
        for i, (layout, home) in enumerate(zip(self.layouts, self.homes, strict=True)):
            state, part = self.states[i], self.parts[i]
            arrays = own.from_pools(state.adapters)
            described = own.from_pools(layout.tree.adapters)
            named, specs = named_leaves(arrays), named_leaves(described)
            shardings = {} if home is None else named_leaves(home.leaf_specs(described))
            for name, value in leaves.items():
                layers = _layers_of(whole[name].of_slot(), value, part)
                leaf = run_on(home, write_leaf, named[name], specs[name], slot, layers)
                named[name] = leaf if home is None else home.put(leaf, shardings[name])
            written = jax.tree.unflatten(jax.tree.structure(arrays), named.values())
            self.states[i] = state._replace(adapters=state.adapters | own.in_pools(written))

    def write(self, kind: SlotKind, slot: int, specs: SlotState, value: SlotState) -> None:
        """Replaces one slot in place.

        Args:
          kind: adapter kind and optimizer kind of the slot's task.
          slot: number of the slot.
          specs: the description of the slot.
          value: NumPy arrays of all layers, at the pool's rank and modules.
        """

        def own(i: int) -> SlotState:
            layers = _layers_of(specs, value, self.parts[i])
            stored = slot_specs(self.layouts[i].tree, kind)
            return jax.tree.map(_first_copy, stored, layers)

        self._change(write_slot, slot, kind, own=own)

    def clear(self, slot: int) -> None:
        """Empties one slot in place."""
        self._change(clear_slot, slot)

    def marker(self) -> jax.Array:
        """A small array that is ready when the microbatches that have been dispatched have ended on
        the devices of the last part."""
        return run_on(self.homes[-1], copied, self.states[-1].loss)

    def empty_accumulators(self) -> None:
        """Replaces accumulators and losses by zeros, also if they were donated to a program that
        failed."""

        def zeros(array: jax.Array) -> jax.Array:
            return jnp.zeros(array.shape, array.dtype, device=array.sharding)

        for i, (state, home) in enumerate(zip(self.states, self.homes, strict=True)):
            if home is None:
                # Arrays that are bound to a device would have the programs compiled again.
                self.states[i] = with_empty_accumulators(state)
                continue
            sums = jax.tree.map(zeros, (state.accumulators, state.loss))
            self.states[i] = state._replace(accumulators=sums[0], loss=sums[1])

    def copy_to_host(
        self, kind: SlotKind, slot: int, specs: SlotState, fields: tuple[str, ...]
    ) -> Callable[[], dict[str, Any]]:
        """Begins to copy one slot to the host, as it is after everything that has been dispatched.

        Args:
          kind: adapter kind and optimizer kind of the slot's task.
          slot: number of the slot.
          specs: the description of the slot.
          fields: the fields of `SlotState` to copy.

        Returns:
          A function that waits for the copy and returns, by field, the slot's NumPy arrays.
        """
        found = []
        for state, layout, home in zip(self.states, self.layouts, self.homes, strict=True):
            own = run_on(home, read_slot, state, layout, kind, fields, slot)
            found.append(own if home is None else jax.tree.map(home.read, own))
        for array in jax.tree.leaves(found):
            if isinstance(array, jax.Array):
                array.copy_to_host_async()

        def joined(spec: LeafSpec, *leaves: jax.Array | np.ndarray) -> np.ndarray:
            return spec.joined([np.asarray(leaf) for leaf in leaves], np.concatenate)

        def wait() -> dict[str, Any]:
            described = {field: getattr(specs, field) for field in fields}
            arrays = jax.tree.map(joined, described, *found)
            if "loss" in fields:
                arrays["loss"] = np.asarray(found[-1]["loss"])
            return arrays

        return wait

    def _described(self, specs: TrainState) -> tuple[list[Layout], list[Layout]]:
        """`summed` and `layouts` of a state."""
        summed = [Layout(_of_part(specs, part)) for part in self.parts]
        pairs = zip(summed, self.homes, strict=True)
        return summed, [Layout(with_copies(own.tree, home)) for own, home in pairs]

    def _move(self, i: int, layout: Layout, sources: Int[np.ndarray, " T"]) -> None:
        """Gives the arrays of a part another number of slots, those that have it not yet."""
        leaves, structure = named_leaves(self.states[i]), jax.tree.structure(self.states[i])
        self.states[i] = None
        try:
            for name, spec in named_leaves(layout.tree).items():
                if leaves[name].shape != spec.shape:
                    larger = run_on(self.homes[i], moved, leaves[name], spec, sources)
                    leaves[name] = jax.block_until_ready(larger)
        finally:
            state = jax.tree.unflatten(structure, leaves.values())
            self.states[i] = _placed(state, layout, self.homes[i])

    def _note_change(self, slot: int) -> None:
        self.changes[slot] = max(self.changes.values(), default=0) + 1

    def _change(
        self,
        write: Callable[..., TrainState],
        slot: int,
        *kind: Any,
        own: Callable[[int], Any] | None = None,
    ) -> None:
        """Calls `write(state, layout, *kind, slot, own(i))` for every part i."""
        self._note_change(slot)
        for i, (layout, home) in enumerate(zip(self.layouts, self.homes, strict=True)):
            value = () if own is None else (own(i),)
            state = run_on(home, write, self.states[i], layout, *kind, slot, *value)
            self.states[i] = _placed(state, layout, home)


def _of_part(specs: TrainState, part: Part) -> TrainState:
    given = part.first_layer, part.layers, part.is_last
    return jax.tree.map(lambda spec: spec.of_layers(*given), specs)


def _layers_of(specs: Any, values: Any, part: Part) -> Any:
    def own(spec: LeafSpec, value: np.ndarray) -> np.ndarray:
        return spec.cut(value, part.first_layer, part.layers, part.is_last)

    return jax.tree.map(own, specs, values)


def with_copies(specs: TrainState, home: StageMesh | None) -> TrainState:
    """The description of a part's state on its devices.

    Args:
      specs: the description of the part's state.
      home: the mesh of the part; None for the default device.
    """
    if home is None:
        return specs
    accumulators, loss = home.with_copies((specs.accumulators, specs.loss))
    return specs._replace(accumulators=accumulators, loss=loss)


def _empty(layout: Layout, home: StageMesh | None) -> TrainState:
    return empty_state(layout) if home is None else home.run(_empty_on(layout, home))


@cache
def _empty_on(layout: Layout, home: StageMesh) -> Any:
    """The program that makes an empty state on the devices of a stage."""
    return jax.jit(lambda: empty_state(layout), out_shardings=_shardings(layout, home))


def _shardings(layout: Layout, home: StageMesh) -> TrainState:
    return home.shardings(home.leaf_specs(layout.tree))


def _placed(state: TrainState, layout: Layout, home: StageMesh | None) -> TrainState:
    return state if home is None else home.put(state, home.leaf_specs(layout.tree))


def _first_copy(spec: LeafSpec, value: np.ndarray) -> np.ndarray:
    """The value in the first copy, and zeros in the others."""
    if "copy" not in spec.axes:
        return value
    copies = np.zeros(spec.shape, spec.dtype)
    copies[0] = value
    return copies


@jax.jit
def copied(array: jax.Array) -> jax.Array:
    """A copy, which stays when the array is donated."""
    return jnp.copy(array)
