"""The train state on its devices, divided into parts by layers.

Copies to the host pass through pinned memory: the devices write arrays there, and threads copy them
to other memory. Pinned memory is scarce, so it holds a limited number of bytes at a time.
"""

import copy
import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Int

from jaxmux.errors import OutOfDeviceMemory, fits
from jaxmux.peft import Layout, LeafSpec
from jaxmux.peft.leaves import named_leaves
from jaxmux.sharding import Part, StageMesh, shapes_of

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
    slot_view,
    with_slot_view,
    write_leaf,
    written_specs,
)

# Maximum number of bytes of one device's arrays in flight to the host at the same time. On a
# backbone of 8B parameters, an adapter of rank 32 has 1 GB with its optimizer state.
_MOST = 2 * 2**30


class HostCopy:
    """A tree of arrays in flight to the host: arrays in pinned memory, which the devices need not
    have computed yet, and NumPy arrays. `bytes` is the most that comes from one device; 0 after
    arrival."""

    def __init__(self, arrays: Any):
        self._arrays, self._lock = arrays, threading.Lock()
        self.bytes = _most_bytes(arrays)

    def wait(self) -> Any:
        """Waits for the arrays, in any thread, and returns the tree of NumPy arrays. Their pinned
        memory is free then."""
        with self._lock:
            if self.bytes:
                self._arrays, self.bytes = jax.tree.map(_arrived, self._arrays), 0
            return self._arrays


class HostCopies:
    """Copies to the host, of which a limited number of bytes is in flight at a time. A copy beyond
    the limit waits until the oldest has arrived. A single copy may be larger than the limit."""

    def __init__(self, most: float = _MOST):
        self._most = most
        # Weak, because a copy that its owner has dropped need not arrive.
        self._begun: list[weakref.ref[HostCopy]] = []
        # By key, the bytes of a copy with this key.
        self._bytes: dict[Hashable, int] = {}

    def waits(self, key: Hashable) -> bool:
        held = sum(host_copy.bytes for host_copy in self._on_their_way())
        return held > 0 and held + self._bytes.get(key, 0) > self._most

    def begin(
        self, key: Hashable, read: Callable[[], Any], wait_for_devices: Callable[[], None]
    ) -> HostCopy:
        """Begins a copy when there is room for it. Copies with equal keys have about the same size.
        `read` has the devices write the arrays, which nobody else uses. `wait_for_devices` returns
        when the devices have finished all dispatched work, so that its memory is free.
        OutOfDeviceMemory is raised if a device has too little memory even then."""
        while self.waits(key):
            # The list may be empty, if another thread has waited for the last copy meanwhile.
            for host_copy in self._on_their_way()[:1]:
                host_copy.wait()
        arrays: list[Any] = []
        if not fits(lambda: arrays.append(read())):
            wait_for_devices()
            if not fits(lambda: arrays.append(read())):
                raise OutOfDeviceMemory(
                    "a device has too little memory to copy a task to the host; try fewer or "
                    "smaller tasks"
                )
        host_copy = HostCopy(*arrays)
        self._bytes[key] = host_copy.bytes
        self._begun = [weakref.ref(each) for each in (*self._on_their_way(), host_copy)]
        return host_copy

    def _on_their_way(self) -> list[HostCopy]:
        return [copy for begun in self._begun if (copy := begun()) and copy.bytes]


def _arrived(array: np.ndarray | jax.Array) -> np.ndarray:
    """The array in pageable memory, once it has arrived."""
    if not isinstance(array, jax.Array):
        return array
    value = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            value[shard.index] = shard.data
    return value


def _most_bytes(arrays: Any) -> int:
    held: Counter[jax.Device] = Counter()
    for array in jax.tree.leaves(arrays):
        if isinstance(array, jax.Array):
            values = math.prod(array.sharding.shard_shape(array.shape))
            for device in array.sharding.addressable_devices:
                held[device] += values * array.dtype.itemsize
    return max(held.values(), default=0)


class StoredState:
    """The train state of all slots, divided into parts by layers.

    A part holds its layers of every array that has a layer axis. Arrays with the axis "first" are
    in the first part, those with the axis "last" in the last one (`LeafSpec.of_layers`); every part
    has all other arrays whole. Losses count only in the last part, which computes them. On a mesh,
    accumulators and losses have an axis "copy" with the values of each device, until an update sums
    them.

    Attributes:
      homes: the mesh of each part.
      alone: whether the engine has no other device, so that no devices exchange arrays.
      states: the state of each part, on its devices; empty until `make_room` is called.
      layouts: the descriptions of `states`, each a `TrainState` of `LeafSpec`.
      summed: the same without the axis "copy".
      layout: the description of the whole state; None until `make_room` is called.
      changes: by slot, the number of the last change of this slot, except by training.
      measured: the log-probabilities that are computed with this state. An executor sets
        them, so that `wait` includes them.
    """

    def __init__(self, parts: Sequence[Part], homes: Sequence[StageMesh], alone: bool = False):
        self.parts, self.homes, self.alone = list(parts), list(homes), alone
        self.states: list[TrainState] = []
        self.layouts: list[Layout] = []
        self.summed: list[Layout] = []
        self.layout: Layout | None = None
        self.changes: dict[int, int] = {}
        self.measured: list[jax.Array] = []
        # The programs that have run for the layout.
        self._ran: set[Hashable] = set()
        self.copies = HostCopies()

    def make_room(self, specs: TrainState) -> None:
        layout = Layout(specs)
        if layout == self.layout:
            return
        self.summed, layouts = self._described(specs)
        if not self.states:
            pairs = zip(layouts, self.homes, strict=True)
            self.states = [home.run(_empty_on(of_part, home)) for of_part, home in pairs]
        for i, part_layout in enumerate(layouts):
            if self.layout is not None:
                leaves, self.states[i] = named_leaves(self.states[i]), None
                home = self.homes[i]
                larger = grown(leaves, part_layout.tree, home)
                self.states[i] = home.put(larger, home.leaf_specs(part_layout.tree))
        self.layout, self.layouts = layout, layouts
        self._ran = set()

    def resize(self, specs: TrainState, sources: Int[np.ndarray, " T"]) -> None:
        """Gives the state another number of slots. `sources` has, for every new slot, the number of
        the old slot that it continues; the old number of slots stands for an empty one.

        The devices hold only one array twice at any time. If one of them has too little memory, the
        state stays as it was, and JaxRuntimeError is raised.
        """
        if Layout(specs) == self.layout:
            return
        capacity = self.layout.tree.count.shape[0]
        kept = sources < capacity
        back = np.full(capacity, len(sources), np.int32)
        back[sources[kept]] = np.flatnonzero(kept)
        summed, layouts = self._described(specs)
        try:
            self._move(layouts, sources)
        except jax.errors.JaxRuntimeError:
            self._move(self.layouts, back)
            raise
        self.layout, self.summed, self.layouts = Layout(specs), summed, layouts
        self.changes, self._ran = {}, set()

    def describe(self, specs: TrainState) -> None:
        """Gives the empty state shapes in place of arrays, for `sharding.only_compiling`."""
        self.layout = Layout(specs)
        self.summed, self.layouts = self._described(specs)
        pairs = zip(self.layouts, self.homes, strict=True)
        self.states = [shapes_of(layout.tree, _shardings(layout, home)) for layout, home in pairs]

    def without_arrays(self) -> "StoredState":
        """A copy of this state with shapes in place of its arrays, for
        `sharding.only_compiling`."""
        other = copy.copy(self)
        other.states, other.changes = [shapes_of(state) for state in self.states], {}
        other.measured, other._ran, other.copies = [], set(), HostCopies()
        return other

    def warm_up(self, optimizers: Sequence[str], slot: int) -> None:
        """Copies an empty slot to the host, writes it and clears it once, so that nothing is
        compiled, loaded or allocated when tasks with these optimizer kinds come and go."""
        written = set()
        for kind in slot_kinds(self.layout.tree, optimizers):
            for fields in READ_FIELDS:
                read = partial(self._read, kind, slot, fields)
                self.copies.begin((kind, fields), read, self.wait).wait()
            specs = named_leaves(slot_specs(self.layout.tree, kind))
            described = [self._sharded_specs(i, kind) for i in range(len(self.parts))]
            for name, spec in specs.items():
                # Arrays with equal descriptions have the same program.
                alike = tuple(part_specs[name] for part_specs in described)
                for size in written_specs(spec) if alike not in written else ():
                    value = np.full(size.shape, size.padding, size.dtype)
                    self.write(kind, slot, {name: value})
                written.add(alike)
        self.clear(slot)

    def write(self, kind: SlotKind, slot: int, leaves: Mapping[str, np.ndarray]) -> None:
        """Replaces arrays of one slot in place. `leaves` has, by path in a `SlotState`, NumPy
        arrays of all layers, of sizes from `written_specs`. Arrays that are left out, and higher
        ranks, stay as they are. Every array has its own program, so that only arrays with new
        values need be sent."""
        self._note_change(slot)
        whole = named_leaves(slot_specs(self.layout.tree, kind))
        described = [self._sharded_specs(i, kind) for i in range(len(self.parts))]
        self._wait_before_first(
            {(*specs[x], leaves[x].shape) for specs in described for x in leaves}
        )
        for i, (part, home) in enumerate(zip(self.parts, self.homes, strict=True)):
            view = slot_view(self.states[i], kind)
            arrays = named_leaves(view)
            for name, value in leaves.items():
                spec, sharding = described[i][name]
                of_part = _first_copy(spec, _layers_of(whole[name], value, part))
                program = _placing(write_leaf, sharding)
                arrays[name] = home.run(program, arrays[name], spec, slot, of_part)
            view = jax.tree.unflatten(jax.tree.structure(view), arrays.values())
            self.states[i] = with_slot_view(self.states[i], kind, view)

    def clear(self, slot: int) -> None:
        self._note_change(slot)
        self._wait_before_first({clear_slot})
        for i, (layout, home) in enumerate(zip(self.layouts, self.homes, strict=True)):
            program = _clear_slot_on(layout, home)
            self.states[i] = home.run(program, self.states[i], layout, slot)

    def wait(self) -> None:
        jax.block_until_ready((self.states, self.measured))

    def marker(self) -> jax.Array:
        """A small array that is ready when the devices of the last part have finished all
        dispatched microbatches."""
        return self.homes[-1].run(copied, self.states[-1].sums)

    def empty_accumulators(self) -> None:
        """Replaces accumulators and losses by zeros, even if they were donated to a program that
        failed."""

        def zeros(array: jax.Array) -> jax.Array:
            return jnp.zeros(array.shape, array.dtype, device=array.sharding)

        for i, state in enumerate(self.states):
            accumulators, sums = jax.tree.map(zeros, (state.accumulators, state.sums))
            self.states[i] = state._replace(accumulators=accumulators, sums=sums)

    def copy_to_host(
        self, kind: SlotKind, slot: int, specs: SlotState, fields: tuple[str, ...]
    ) -> Callable[[], dict[str, Any]]:
        """Begins to copy fields of one slot to the host, with their values after everything that
        has been dispatched. Waits first if too many bytes are in flight already. The returned
        function waits for the copy and returns, by field, the slot's NumPy arrays."""
        read = partial(self._read, kind, slot, fields)
        copy = self.copies.begin((kind, fields), read, self.wait)

        def joined(spec: LeafSpec, *leaves: np.ndarray) -> np.ndarray:
            return spec.joined(leaves, np.concatenate)

        def wait() -> dict[str, Any]:
            of_parts = copy.wait()
            described = {field: getattr(specs, field) for field in fields}
            arrays = jax.tree.map(joined, described, *of_parts)
            if "sums" in fields:
                arrays["sums"] = np.asarray(of_parts[-1]["sums"])
            return arrays

        return wait

    def _read(self, kind: SlotKind, slot: int, fields: tuple[str, ...]) -> list[dict[str, Any]]:
        self._wait_before_first({(kind, fields)})
        # With several processes, devices exchange the arrays first, so they stay in device memory.
        to_host = jax.process_count() == 1
        of_parts = []
        for state, layout, home in zip(self.states, self.layouts, self.homes, strict=True):
            arrays = home.run(read_slot, state, layout, kind, fields, slot, to_host)
            of_parts.append(jax.tree.map(home.read, arrays))
        return of_parts

    def _wait_before_first(self, programs: Set[Hashable]) -> None:
        """Waits for the devices before a program runs for the first time, because none may be
        loaded while devices exchange arrays. `programs` are keys that identify programs of this
        state."""
        if not programs <= self._ran and not self.alone:
            self.wait()
        self._ran |= programs

    def _sharded_specs(self, i: int, kind: SlotKind) -> dict[str, tuple[LeafSpec, Sharding]]:
        """By path in a `SlotState`, the description and the sharding of a part's array."""
        specs, home = slot_view(self.layouts[i].tree, kind), self.homes[i]
        shardings = named_leaves(home.shardings(home.leaf_specs(specs)))
        return {name: (spec, shardings[name]) for name, spec in named_leaves(specs).items()}

    def _described(self, specs: TrainState) -> tuple[list[Layout], list[Layout]]:
        summed = [Layout(_of_part(specs, part)) for part in self.parts]
        pairs = zip(summed, self.homes, strict=True)
        return summed, [Layout(with_copies(part_layout.tree, home)) for part_layout, home in pairs]

    def _move(self, layouts: Sequence[Layout], sources: Int[np.ndarray, " T"]) -> None:
        """Gives the arrays of all parts another number of slots, except those that have it
        already."""
        leaves = [named_leaves(state) for state in self.states]
        specs = [named_leaves(layout.tree) for layout in layouts]
        pairs = zip(layouts, self.homes, strict=True)
        shardings = [named_leaves(_shardings(layout, home)) for layout, home in pairs]
        structures = [jax.tree.structure(state) for state in self.states]
        self.states = []

        def move(i: int, name: str) -> jax.Array:
            program = _placing(moved, shardings[i][name], donates=False)
            return self.homes[i].run(program, leaves[i][name], specs[i][name], sources)

        try:
            for name in specs[0]:
                new = {
                    i: move(i, name)
                    for i, arrays in enumerate(leaves)
                    if arrays[name].shape != specs[i][name].shape
                }
                for i, leaf in jax.block_until_ready(new).items():
                    leaves[i][name] = leaf
        finally:
            self.states = [
                jax.tree.unflatten(structure, arrays.values())
                for structure, arrays in zip(structures, leaves, strict=True)
            ]

    def _note_change(self, slot: int) -> None:
        self.changes[slot] = max(self.changes.values(), default=0) + 1


def _of_part(specs: TrainState, part: Part) -> TrainState:
    def of_part(spec: LeafSpec) -> LeafSpec:
        return spec.of_layers(part.first_layer, part.layers, part.is_last)

    return jax.tree.map(of_part, specs)


def _layers_of(specs: Any, values: Any, part: Part) -> Any:
    def of_part(spec: LeafSpec, value: np.ndarray) -> np.ndarray:
        return spec.cut(value, part.first_layer, part.layers, part.is_last)

    return jax.tree.map(of_part, specs, values)


def with_copies(specs: TrainState, home: StageMesh) -> TrainState:
    """The description of a part's state on the devices of its mesh, where accumulators and losses
    have an axis of copies."""
    accumulators, sums = home.with_copies((specs.accumulators, specs.sums))
    return specs._replace(accumulators=accumulators, sums=sums)


@cache
def _empty_on(layout: Layout, home: StageMesh) -> Any:
    return jax.jit(lambda: empty_state(layout), out_shardings=_shardings(layout, home))


def _shardings(layout: Layout, home: StageMesh) -> TrainState:
    return home.shardings(home.leaf_specs(layout.tree))


@cache
def _placing(
    program: Callable[..., Any], sharding: Sharding, donates: bool = True
) -> Callable[..., Any]:
    """A jitted program of one array and its description, with its result sharded over a mesh.
    `donates` tells whether the array is donated."""
    donated = (0,) if donates else ()
    return jax.jit(program, static_argnums=1, donate_argnums=donated, out_shardings=sharding)


@cache
def _clear_slot_on(layout: Layout, home: StageMesh) -> Callable[..., TrainState]:
    shardings = _shardings(layout, home)
    return jax.jit(clear_slot, static_argnums=1, donate_argnums=0, out_shardings=shardings)


def _first_copy(spec: LeafSpec, value: np.ndarray) -> np.ndarray:
    """The value with an axis of copies if the array has one: zeros in all copies but the first."""
    if "copy" not in spec.axes:
        return value
    copies = np.zeros((spec.shape[0], *value.shape), spec.dtype)
    copies[0] = value
    return copies


@jax.jit
def copied(array: jax.Array) -> jax.Array:
    """A copy, which stays valid when the array is donated."""
    return jnp.copy(array)
