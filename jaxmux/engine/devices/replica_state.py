"""The adapters and accumulators of the replicas other than the first one.

The first replica has the train state: adapters, accumulators and optimizer states of all slots.
Each other replica has a copy of the adapters, and its own accumulators. Before an update, the
gradients of the due slots move to the first replica; after it, the adapter arrays that the update
has changed come back. So the copies always have the bits of the first replica's adapters.

Replicas may divide the layers and the arrays differently. An array travels in pieces, one for each
pair of parts that have layers in common. A piece has the same value on all devices of a mesh,
because other transfers between meshes would wait for the host.
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
    They begin at index `begin` within the part, and at `first_begin` within the first replica's
    part. `to_end` and `first_to_end` tell whether they reach the end of the respective part."""

    part: int
    begin: int
    first_part: int
    first_begin: int
    layers: int
    to_end: bool
    first_to_end: bool


class _Piece(NamedTuple):
    """Arrays that travel to a part of another replica. All devices of `home` have the same
    values."""

    home: StageMesh
    part: int
    arrays: Any


class ReplicaState:
    """The copy of the train state that a replica other than the first one has. `own` has adapters,
    accumulators and losses, but no optimizer states.

    Arrays travel for some slots at a time. The methods' argument `slots` has the indices of these
    slots, int32 [K]. It is padded with T (the number of slots), which stands for no slot. At most
    two different K occur, so few programs are compiled.
    """

    def __init__(self, own: StoredState, first: StoredState):
        self.own, self._first = own, first
        self._change = 0
        self._common = tuple(_common_layers(own, first))

    def refresh(self) -> None:
        """Brings the copy up to date after slots of the train state have been changed.

        The accumulators of these slots become empty: valid gradients are in the train state, and
        the gradients of a task that has left must not reach the next task in its slot.
        """
        other, first = self.own, self._first
        before = self._change if other.states else -1
        other.make_room(first.layout.tree._replace(moments=()))
        capacity = first.layout.tree.count.shape[0]
        changed = [slot for slot in range(capacity) if first.changes.get(slot, 0) > before]
        self._change = max(first.changes.values(), default=0)
        if changed:
            self._renew(filled_up(changed, capacity))

    def warm_up(self) -> None:
        """Runs every program without a slot, because nothing may be compiled or loaded while stages
        exchange arrays."""
        capacity = self._first.layout.tree.count.shape[0]
        for size in {len(filled_up(range(n), capacity)) for n in (1, capacity)}:
            none = np.full(size, capacity, np.int32)
            self._renew(none)
            self.send_gradients(none)
            self.receive_adapters(none)

    def _renew(self, slots: Int[np.ndarray, " K"]) -> None:
        other = self.own
        other.states = [
            home.run(_emptied, home, layout, state, slots)
            for home, layout, state in zip(other.homes, other.layouts, other.states, strict=True)
        ]
        self._receive(slots, whole=True)

    def send_gradients(self, slots: Int[np.ndarray, " K"]) -> None:
        """Adds gradients and losses to those of the first replica, and empties them here."""
        other, first = self.own, self._first
        pieces: list[_Piece] = []
        for i, home in enumerate(other.homes):
            cuts = tuple(c for c in self._common if c.part == i)
            other.states[i], taken = home.run(
                _taken,
                home,
                other.layouts[i],
                other.summed[i],
                cuts,
                other.states[i],
                slots,
            )
            pieces += (_Piece(home, c.first_part, x) for c, x in zip(cuts, taken, strict=True))
        for j, arrived in _arrived(pieces, first.homes).items():
            home, layout = first.homes[j], first.layouts[j]
            first.states[j] = home.run(_added, home, layout, first.states[j], arrived, slots)

    def receive_adapters(self, slots: Int[np.ndarray, " K"]) -> None:
        """Replaces the adapter arrays that an update has changed by those of the first replica."""
        self._receive(slots, whole=False)

    def _receive(self, slots: Int[np.ndarray, " K"], whole: bool) -> None:
        other, first = self.own, self._first
        specs = first.layout.tree.adapters
        # If updates change all arrays, one program serves both values of `whole`.
        whole |= changed_by_updates(specs, specs) == specs
        pieces: list[_Piece] = []
        for j, home in enumerate(first.homes):
            cuts = tuple(c for c in self._common if c.first_part == j)
            adapters = first.states[j].adapters
            arrays = home.run(_cut, home, first.layouts[j], cuts, whole, adapters, slots)
            pieces += (_Piece(home, c.part, x) for c, x in zip(cuts, arrays, strict=True))
        for i, arrived in _arrived(pieces, other.homes).items():
            home, layout = other.homes[i], other.layouts[i]
            other.states[i] = home.run(_joined, home, layout, other.states[i], arrived, slots)


def filled_up(slots: Sequence[int], capacity: int) -> Int[np.ndarray, " K"]:
    """The numbers of slots for `ReplicaState`. K is the half of `capacity` for few slots, as in a
    round of two groups, and else `capacity`; more sizes would take time to compile."""
    half = -(-capacity // 2)
    few = capacity > _FEW and len(slots) <= half
    numbers = np.full(half if few else capacity, capacity, np.int32)
    numbers[: len(slots)] = slots
    return numbers


def _common_layers(replica: StoredState, first: StoredState) -> Iterator[_Common]:
    for i, part in enumerate(replica.parts):
        for j, other in enumerate(first.parts):
            begin = max(part.slice.start, other.slice.start)
            end = min(part.slice.stop, other.slice.stop)
            if (layers := end - begin) > 0:
                yield _Common(
                    part=i,
                    begin=begin - part.first_layer,
                    first_part=j,
                    first_begin=begin - other.first_layer,
                    layers=layers,
                    to_end=end == part.slice.stop,
                    first_to_end=end == other.slice.stop,
                )


def _arrived(pieces: Iterable[_Piece], homes: Sequence[StageMesh]) -> dict[int, list[Any]]:
    arrived: dict[int, list[Any]] = {}
    for piece in pieces:
        moved = piece.home.move(piece.arrays, homes[piece.part], P())
        arrived.setdefault(piece.part, []).append(moved)
    return arrived


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _emptied(
    home: StageMesh, layout: Layout, state: TrainState, slots: Int[Array, " K"]
) -> TrainState:
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
    specs = layout.tree.accumulators, layout.tree.sums
    held = state.accumulators, state.sums

    def total(spec: LeafSpec, copies: Array) -> Array:
        values = _of_slots(spec, copies, slots)
        return values.sum(axis=0) if "copy" in spec.axes else values

    totals = jax.tree.map(total, specs, held)
    state = _like(home, layout, _without_gradients(layout, state, slots))
    sum_specs = summed.tree.accumulators, summed.tree.sums
    pieces = (_layers(sum_specs, totals, c.begin, c.layers, c.to_end) for c in cuts)
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
    specs = layout.tree.accumulators, layout.tree.sums

    def add(spec: LeafSpec, copies: Array, *arrived: Array) -> Array:
        has_copies, of_pieces = "copy" in spec.axes, spec
        if has_copies:
            # The axis of copies is the first one here; the pieces have none.
            of_pieces = dataclasses.replace(spec, shape=spec.shape[1:], axes=spec.axes[1:])
        joined = spec.divides_layers
        piece = of_pieces.joined(arrived, jnp.concatenate) if joined else sum(arrived)
        if has_copies:
            # The axis of copies is divided among devices. An indexed update of its first place
            # would move all copies to one device.
            is_first = jnp.arange(len(copies)).reshape(-1, *[1] * piece.ndim) == 0
            piece = jnp.where(is_first, piece, 0)
        new = _of_slots(spec, copies, slots) + piece
        return copies.at[_at(spec, slots)].set(new, mode="drop")

    held = state.accumulators, state.sums
    accumulators, sums = jax.tree.map(add, specs, held, *pieces)
    return _like(home, layout, state._replace(accumulators=accumulators, sums=sums))


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _cut(
    home: StageMesh,
    layout: Layout,
    cuts: tuple[_Common, ...],
    whole: bool,
    adapters: Any,
    slots: Int[Array, " K"],
) -> list[Any]:
    """The adapters of the slots in pieces; without `whole`, only the arrays that updates change."""
    specs = layout.tree.adapters
    if not whole:
        specs, adapters = (changed_by_updates(specs, tree) for tree in (specs, adapters))
    of_slots = jax.tree.map(lambda spec, x: _of_slots(spec, x, slots), specs, adapters)
    pieces = (_layers(specs, of_slots, c.first_begin, c.layers, c.first_to_end) for c in cuts)
    return [_everywhere(home, piece) for piece in pieces]


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _joined(
    home: StageMesh,
    layout: Layout,
    state: TrainState,
    pieces: Sequence[Any],
    slots: Int[Array, " K"],
) -> TrainState:
    """The state after the adapters of `slots` are replaced by `pieces`, which are joined along the
    layers, in the layers' order. Arrays that are not in the pieces keep their values."""

    def join(spec: LeafSpec, old: Array, *arrived: Array | None) -> Array:
        if arrived[0] is None:
            return old
        new = spec.joined(arrived, jnp.concatenate)
        return old.at[_at(spec, slots)].set(new, mode="drop")

    adapters = jax.tree.map(join, layout.tree.adapters, state.adapters, *pieces)
    return _like(home, layout, state._replace(adapters=adapters))


def _without_gradients(layout: Layout, state: TrainState, slots: Int[Array, " K"]) -> TrainState:
    def rest(spec: LeafSpec, copies: Array) -> Array:
        return copies.at[_at(spec, slots)].set(0, mode="drop")

    specs = layout.tree.accumulators, layout.tree.sums
    accumulators, sums = jax.tree.map(rest, specs, (state.accumulators, state.sums))
    return state._replace(accumulators=accumulators, sums=sums)


def _layers(specs: Any, values: Any, first: int, layers: int, to_end: bool) -> Any:
    return jax.tree.map(lambda spec, value: spec.cut(value, first, layers, to_end), specs, values)


def _of_slots(spec: LeafSpec, values: Array, slots: Int[Array, " K"]) -> Array:
    """The values of the slots; zeros for the number that stands for no slot."""
    return values.take(slots, spec.slot_axis, mode="fill", fill_value=0)


def _at(spec: LeafSpec, slots: Int[Array, " K"]) -> tuple[slice | Array, ...]:
    return (*(slice(None),) * spec.slot_axis, slots)


def _everywhere(home: StageMesh, tree: Any) -> Any:
    return jax.lax.with_sharding_constraint(tree, home.shardings(jax.tree.map(lambda _: P(), tree)))


def _like(home: StageMesh, layout: Layout, state: TrainState) -> TrainState:
    shardings = home.shardings(home.leaf_specs(layout.tree))
    return jax.lax.with_sharding_constraint(state, shardings)
