"""The adapters and accumulators of the replicas besides the first one.

The first replica has the train state: adapters, accumulators and optimizer states of all slots.
Each other replica has a copy of the adapters, and accumulators of its own. Before an update, the
gradients of the slots that are due move to the first replica; after it, the new adapters come back.
So the copies always have the bits of the first replica's adapters.

Replicas may divide the layers among other parts, and the arrays among other meshes. An array
travels in pieces, one for each pair of parts that have layers in common. A piece has the same value
on all devices of a mesh: other transfers between meshes would wait for the host.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool

from jaxmux.peft import Layout, LeafSpec
from jaxmux.sharding import StageMesh

from .stored_state import StoredState
from .train_state import TrainState


class _Common(NamedTuple):
    """Layers that a part of one replica and a part of another one have in common.

    Attributes:
      part: index of the part.
      first: index of the first of these layers in the part.
      other_part: index of the other replica's part.
      other_first: index of the first of these layers in the other part.
      layers: number of these layers.
    """

    part: int
    first: int
    other_part: int
    other_first: int
    layers: int


class ReplicaState:
    """What a replica besides the first one keeps of the train state.

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
        self._version = first.version

    def refresh(self) -> None:
        """Brings the copy up to date after slots of the train state have been changed."""
        if self._version == self._first.version:
            return
        self._version = self._first.version
        self.own.make_room(self._first.layout.tree._replace(moments=()))
        self.receive_adapters()

    def send_gradients(self, due: Bool[np.ndarray, " T"]) -> None:
        """Adds gradients and losses to those of the first replica, and empties their places here.

        Args:
          due: the slots whose gradients are moved.
        """
        own, first = self.own, self._first
        pieces: dict[int, Any] = {}
        for i, home in enumerate(own.homes):
            cuts = [c for c in _common_layers(own, first) if c.part == i]
            layouts = own.layouts[i], own.summed[i]
            own.states[i], found = _taken(home, *layouts, tuple(cuts), own.states[i], due)
            for cut, piece in zip(cuts, found, strict=True):
                arrived = first.homes[cut.other_part].put(piece, P())
                pieces.setdefault(cut.other_part, []).append((cut, arrived))
        for j, arrived in pieces.items():
            cuts, found = zip(*arrived, strict=True)
            home, layout = first.homes[j], first.layouts[j]
            first.states[j] = _added(home, layout, cuts, first.states[j], found)

    def receive_adapters(self) -> None:
        """Replaces the adapters by those of the first replica."""
        own, first = self.own, self._first
        pieces: dict[int, Any] = {}
        for j, home in enumerate(first.homes):
            cuts = tuple(c for c in _common_layers(own, first) if c.other_part == j)
            adapters = first.states[j].adapters
            for cut, piece in zip(cuts, _cut(home, first.layouts[j], cuts, adapters), strict=True):
                arrived = own.homes[cut.part].put(piece, P())
                pieces.setdefault(cut.part, []).append(arrived)
        for i, arrived in pieces.items():
            adapters = _joined(own.homes[i], own.layouts[i], arrived)
            own.states[i] = own.states[i]._replace(adapters=adapters)


def _common_layers(own: StoredState, first: StoredState) -> Iterator[_Common]:
    """The layers that each part has in common with each part of the first replica, in order."""
    for i, part in enumerate(own.parts):
        for j, other in enumerate(first.parts):
            begin = max(part.slice.start, other.slice.start)
            if (layers := min(part.slice.stop, other.slice.stop) - begin) > 0:
                yield _Common(i, begin - part.first_layer, j, begin - other.first_layer, layers)


@partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=4)
def _taken(
    home: StageMesh,
    layout: Layout,
    summed: Layout,
    cuts: tuple[_Common, ...],
    state: TrainState,
    due: Bool[Array, " T"],
) -> tuple[TrainState, list[Any]]:
    """The state without the gradients and losses of the due slots, and these in pieces."""
    specs = layout.tree.accumulators, layout.tree.loss
    held = state.accumulators, state.loss

    def total(spec: LeafSpec, copies: Array) -> Array:
        return _of_slots(spec, due, copies, 0).sum(axis=0)

    def rest(spec: LeafSpec, copies: Array) -> Array:
        return _of_slots(spec, due, 0, copies)

    totals = jax.tree.map(total, specs, held)
    accumulators, loss = jax.tree.map(rest, specs, held)
    state = _like(home, layout, state._replace(accumulators=accumulators, loss=loss))
    own = summed.tree.accumulators, summed.tree.loss
    return state, [_everywhere(home, _layers(own, totals, c.first, c.layers)) for c in cuts]


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def _added(
    home: StageMesh,
    layout: Layout,
    cuts: tuple[_Common, ...],
    state: TrainState,
    pieces: Sequence[Any],
) -> TrainState:
    """The state with pieces added to the first copy of accumulators and losses."""
    specs = layout.tree.accumulators, layout.tree.loss

    def add(cut: _Common, spec: LeafSpec, copies: Array, piece: Array) -> Array:
        if "layer" in spec.axes:
            axis = spec.axes.index("layer") - 1
            after = copies.shape[axis + 1] - cut.other_first - cut.layers
            padding = [(0, 0)] * piece.ndim
            padding[axis] = (cut.other_first, after)
            piece = jnp.pad(piece, padding)
        is_first = jnp.arange(len(copies)).reshape(-1, *[1] * piece.ndim) == 0
        return copies + jnp.where(is_first, piece, 0)

    held = state.accumulators, state.loss
    for cut, piece in zip(cuts, pieces, strict=True):
        held = jax.tree.map(partial(add, cut), specs, held, piece)
    accumulators, loss = held
    return _like(home, layout, state._replace(accumulators=accumulators, loss=loss))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _cut(home: StageMesh, layout: Layout, cuts: tuple[_Common, ...], adapters: Any) -> list[Any]:
    """Pieces of the adapters."""
    specs = layout.tree.adapters
    return [
        _everywhere(home, _layers(specs, adapters, cut.other_first, cut.layers)) for cut in cuts
    ]


@partial(jax.jit, static_argnums=(0, 1))
def _joined(home: StageMesh, layout: Layout, pieces: Sequence[Any]) -> Any:
    """The adapters of a part from its pieces, in the order of the layers."""
    specs = layout.tree.adapters

    def join(spec: LeafSpec, *own: Array) -> Array:
        return jnp.concatenate(own, spec.axes.index("layer")) if "layer" in spec.axes else own[0]

    adapters = jax.tree.map(join, specs, *pieces)
    return jax.lax.with_sharding_constraint(adapters, home.shardings(home.leaf_specs(specs)))


def _layers(specs: Any, values: Any, first: int, layers: int) -> Any:
    """Some layers of the arrays that have a layer axis, and the others whole."""

    def own(spec: LeafSpec, value: Array) -> Array:
        if "layer" not in spec.axes:
            return value
        return jax.lax.slice_in_dim(value, first, first + layers, axis=spec.axes.index("layer"))

    return jax.tree.map(own, specs, values)


def _of_slots(spec: LeafSpec, chosen: Array, new: Array | int, old: Array | int) -> Array:
    """`new` in the chosen slots, `old` in the others."""
    shape = [1] * len(spec.axes)
    shape[spec.slot_axis] = -1
    return jnp.where(chosen.reshape(shape), new, old)


def _everywhere(home: StageMesh, tree: Any) -> Any:
    """The same values on all devices of a mesh."""
    return jax.lax.with_sharding_constraint(tree, home.shardings(jax.tree.map(lambda _: P(), tree)))


def _like(home: StageMesh, layout: Layout, state: TrainState) -> TrainState:
    """The state, divided as its description says."""
    shardings = home.shardings(home.leaf_specs(layout.tree))
    return jax.lax.with_sharding_constraint(state, shardings)
