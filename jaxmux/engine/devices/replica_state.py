"""The adapters and accumulators of the replicas besides the first one.

The first replica has the train state: adapters, accumulators and optimizer states of all slots.
Each other replica has a copy of the adapters, and accumulators of its own. Before an update, the
gradients of the slots that are due move to the first replica; after it, what the update has changed
of the adapters comes back. So the copies always have the bits of the first replica's adapters.

Replicas may divide the layers among other parts, and the arrays among other meshes. An array
travels in pieces, one for each pair of parts that have layers in common. A piece has the same value
on all devices of a mesh: other transfers between meshes would wait for the host.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from jaxmux.peft import Layout, LeafSpec
from jaxmux.sharding import StageMesh

from ..state.renewal import changed_by_updates
from ..state.stored_state import StoredState
from ..state.train_state import TrainState

# With at most this many slots, arrays always travel for all slots.
_FEW = 4


class _Common(NamedTuple):
    """Consecutive layers that a part of a replica has in common with a part of the first replica.

    Attributes:
      part: index of the replica's own part.
      begin: where these layers begin in this part.
      first_part: index of the first replica's part.
      first_begin: where these layers begin in that part.
      layers: number of these layers.
      to_end: whether the last of them is the last one of the replica's own part.
      first_to_end: whether it is the last one of the first replica's part.
    """

    part: int
    begin: int
    first_part: int
    first_begin: int
    layers: int
    to_end: bool
    first_to_end: bool


class _Piece(NamedTuple):
    """Arrays that travel to a part of another replica.

    Attributes:
      home: the mesh on which they lie, with the same values on all its devices.
      part: index of the part to which they travel.
      arrays: the tree of arrays.
    """

    home: StageMesh
    part: int
    arrays: Any


class ReplicaState:
    """What a replica besides the first one keeps of the train state.

    Arrays travel for some slots at a time. Their numbers are given as int32 [K], filled up with T,
    the number of slots, which stands for no slot; so few programs serve all numbers of slots.

    Attributes:
      own: adapters, accumulators and losses of this replica; it has no optimizer states.
    """

    def __init__(self, own: StoredState, first: StoredState):
        """Creates a state without arrays.

        Args:
          own: the state of this replica, without arrays.
          first: the train state, which the first replica has.
        """
        self.own, self._first = own, first
        self._change = 0
        self._common = tuple(_common_layers(own, first))

    def refresh(self) -> None:
        """Brings the copy up to date after slots of the train state have been changed.

        The accumulators of these slots become empty: what still counts of them is in the train
        state, and the gradients of a task that has left are not to reach the next task in its slot.
        """
        own, first = self.own, self._first
        before = self._change if own.states else -1
        own.make_room(first.layout.tree._replace(moments=()))
        capacity = first.layout.tree.loss.shape[0]
        changed = [slot for slot in range(capacity) if first.changes.get(slot, 0) > before]
        self._change = max(first.changes.values(), default=0)
        if changed:
            self._renew(filled_up(changed, capacity))

    def warm_up(self) -> None:
        """Runs every program without a slot, because nothing may be compiled or loaded while
        stages exchange arrays."""
        capacity = self._first.layout.tree.loss.shape[0]
        for size in {len(filled_up(range(n), capacity)) for n in (1, capacity)}:
            none = np.full(size, capacity, np.int32)
            self._renew(none)
            self.send_gradients(none)
            self.receive_adapters(none)

    def _renew(self, slots: Int[np.ndarray, " K"]) -> None:
        """Empties the accumulators of slots, and replaces their adapters."""
        own = self.own
        own.states = [
            home.run(_emptied, home, layout, state, slots)
            for home, layout, state in zip(own.homes, own.layouts, own.states, strict=True)
        ]
        self._receive(slots, whole=True)

    def send_gradients(self, slots: Int[np.ndarray, " K"]) -> None:
        """Adds gradients and losses to those of the first replica, and empties their places here.

        Args:
          slots: numbers of the slots.
        """
        own, first = self.own, self._first
        pieces: list[_Piece] = []
        for i, home in enumerate(own.homes):
            cuts = tuple(c for c in self._common if c.part == i)
            arguments = home, own.layouts[i], own.summed[i], cuts, own.states[i], slots
            own.states[i], found = home.run(_taken, *arguments)
            pieces += (_Piece(home, c.first_part, x) for c, x in zip(cuts, found, strict=True))
        for j, arrived in _arrived(pieces, first.homes).items():
            home, layout = first.homes[j], first.layouts[j]
            first.states[j] = home.run(_added, home, layout, first.states[j], arrived, slots)

    def receive_adapters(self, slots: Int[np.ndarray, " K"]) -> None:
        """Replaces what an update has changed of adapters by that of the first replica.

        Args:
          slots: numbers of the slots.
        """
        self._receive(slots, whole=False)

    def _receive(self, slots: Int[np.ndarray, " K"], whole: bool) -> None:
        own, first = self.own, self._first
        specs = first.layout.tree.adapters
        # Without constants both are one program.
        whole |= changed_by_updates(specs, specs) == specs
        pieces: list[_Piece] = []
        for j, home in enumerate(first.homes):
            cuts = tuple(c for c in self._common if c.first_part == j)
            arguments = home, first.layouts[j], cuts, whole, first.states[j].adapters, slots
            found = home.run(_cut, *arguments)
            pieces += (_Piece(home, c.part, x) for c, x in zip(cuts, found, strict=True))
        for i, arrived in _arrived(pieces, own.homes).items():
            home, layout = own.homes[i], own.layouts[i]
            own.states[i] = home.run(_joined, home, layout, own.states[i], arrived, slots)


def filled_up(slots: Sequence[int], capacity: int) -> Int[np.ndarray, " K"]:
    """The numbers of slots for `ReplicaState`. K is the half of `capacity` for few slots, as in a
    round of two groups, and else `capacity`: other sizes would take time to compile.

    Args:
      slots: numbers of slots, at least one.
      capacity: number of slots T.
    """
    half = -(-capacity // 2)
    few = capacity > _FEW and len(slots) <= half
    numbers = np.full(half if few else capacity, capacity, np.int32)
    numbers[: len(slots)] = slots
    return numbers


def _common_layers(own: StoredState, first: StoredState) -> Iterator[_Common]:
    """The layers that each part has in common with each part of the first replica, in order."""
    for i, part in enumerate(own.parts):
        for j, other in enumerate(first.parts):
            begin = max(part.slice.start, other.slice.start)
            end = min(part.slice.stop, other.slice.stop)
            if (layers := end - begin) > 0:
                begins = i, begin - part.first_layer, j, begin - other.first_layer
                yield _Common(*begins, layers, end == part.slice.stop, end == other.slice.stop)


def _arrived(pieces: Iterable[_Piece], homes: Sequence[StageMesh]) -> dict[int, list[Any]]:
    """By part, the arrays that are sent to it, on its mesh.

    Args:
      pieces: what is sent.
      homes: the mesh of each part.
    """
    arrived: dict[int, list[Any]] = {}
    for piece in pieces:
        moved = piece.home.move(piece.arrays, homes[piece.part], P())
        arrived.setdefault(piece.part, []).append(moved)
    return arrived


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _emptied(
    home: StageMesh, layout: Layout, state: TrainState, slots: Int[Array, " K"]
) -> TrainState:
    """The state without the gradients and losses of the slots."""

    return _like(home, layout, _without_gradients(layout, state, slots))


@partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=4)
def _taken(
    home: StageMesh,
    layout: Layout,
    summed: Layout,
    cuts: tuple[_Common, ...],
    state: TrainState,
    slots: Int[Array, " K"],
) -> tuple[TrainState, list[Any]]:
    """The state without the gradients and losses of the slots; and these, summed over the copies,
    in pieces."""
    specs = layout.tree.accumulators, layout.tree.loss
    held = state.accumulators, state.loss

    def total(spec: LeafSpec, copies: Array) -> Array:
        return _of_slots(spec, copies, slots).sum(axis=0)

    totals = jax.tree.map(total, specs, held)
    state = _like(home, layout, _without_gradients(layout, state, slots))
    own = summed.tree.accumulators, summed.tree.loss
    pieces = (_layers(own, totals, c.begin, c.layers, c.to_end) for c in cuts)
    return state, [_everywhere(home, piece) for piece in pieces]


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _added(
    home: StageMesh,
    layout: Layout,
    state: TrainState,
    pieces: Sequence[Any],
    slots: Int[Array, " K"],
) -> TrainState:
    """The state with pieces, in the order of the layers, added to the first copy of accumulators
    and losses."""
    specs = layout.tree.accumulators, layout.tree.loss

    def add(spec: LeafSpec, copies: Array, *own: Array) -> Array:
        # The pieces have no axis of copies, which is the first one here.
        of_pieces = dataclasses.replace(spec, shape=spec.shape[1:], axes=spec.axes[1:])
        joined = spec.divides_layers
        piece = of_pieces.joined(own, jnp.concatenate) if joined else sum(own)
        # The axis of copies is divided among devices. An indexed update of its first place would
        # move all copies to one device.
        is_first = jnp.arange(len(copies)).reshape(-1, *[1] * piece.ndim) == 0
        new = _of_slots(spec, copies, slots) + jnp.where(is_first, piece, 0)
        return copies.at[_at(spec, slots)].set(new, mode="drop")

    held = state.accumulators, state.loss
    accumulators, loss = jax.tree.map(add, specs, held, *pieces)
    return _like(home, layout, state._replace(accumulators=accumulators, loss=loss))


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _cut(
    home: StageMesh,
    layout: Layout,
    cuts: tuple[_Common, ...],
    whole: bool,
    adapters: Any,
    slots: Int[Array, " K"],
) -> list[Any]:
    """The adapters of the slots, or what updates change of them, in pieces."""
    specs = layout.tree.adapters
    if not whole:
        specs, adapters = (changed_by_updates(specs, tree) for tree in (specs, adapters))
    own = jax.tree.map(lambda spec, x: _of_slots(spec, x, slots), specs, adapters)
    pieces = (_layers(specs, own, c.first_begin, c.layers, c.first_to_end) for c in cuts)
    return [_everywhere(home, piece) for piece in pieces]


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _joined(
    home: StageMesh,
    layout: Layout,
    state: TrainState,
    pieces: Sequence[Any],
    slots: Int[Array, " K"],
) -> TrainState:
    """The state with the adapters of the slots from their pieces, in the order of the layers. What
    the pieces lack stays."""

    def join(spec: LeafSpec, old: Array, *own: Array | None) -> Array:
        if own[0] is None:
            return old
        new = spec.joined(own, jnp.concatenate)
        return old.at[_at(spec, slots)].set(new, mode="drop")

    adapters = jax.tree.map(join, layout.tree.adapters, state.adapters, *pieces)
    return _like(home, layout, state._replace(adapters=adapters))


def _without_gradients(layout: Layout, state: TrainState, slots: Int[Array, " K"]) -> TrainState:
    """The state in which the accumulators and losses of the slots are empty."""

    def rest(spec: LeafSpec, copies: Array) -> Array:
        return copies.at[_at(spec, slots)].set(0, mode="drop")

    specs = layout.tree.accumulators, layout.tree.loss
    accumulators, loss = jax.tree.map(rest, specs, (state.accumulators, state.loss))
    return state._replace(accumulators=accumulators, loss=loss)


def _layers(specs: Any, values: Any, first: int, layers: int, to_end: bool) -> Any:
    """What some layers have of the arrays."""
    return jax.tree.map(lambda spec, value: spec.cut(value, first, layers, to_end), specs, values)


def _of_slots(spec: LeafSpec, values: Array, slots: Int[Array, " K"]) -> Array:
    """The values of the slots; zeros for the number that stands for no slot."""
    return values.take(slots, spec.slot_axis, mode="fill", fill_value=0)


def _at(spec: LeafSpec, slots: Int[Array, " K"]) -> tuple[slice | Array, ...]:
    """The index of the slots in an array."""
    return (*(slice(None),) * spec.slot_axis, slots)


def _everywhere(home: StageMesh, tree: Any) -> Any:
    """The same values on all devices of a mesh."""
    return jax.lax.with_sharding_constraint(tree, home.shardings(jax.tree.map(lambda _: P(), tree)))


def _like(home: StageMesh, layout: Layout, state: TrainState) -> TrainState:
    """The state, divided as its description says."""
    shardings = home.shardings(home.leaf_specs(layout.tree))
    return jax.lax.with_sharding_constraint(state, shardings)
