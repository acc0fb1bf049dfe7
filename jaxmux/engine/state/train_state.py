"""The train state: stacked adapters, gradient accumulators and optimizer states of all slots.

The functions here depend on no adapter kind: a description, a `TrainState` of `LeafSpec`, has the
shape, dtype and axes of every array. `specs` and `layout` are descriptions of the whole state.
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmux.models import BackboneConfig
from jaxmux.models.adapter_ops import LOW_RANK_KIND
from jaxmux.objectives.token_losses import SUMS
from jaxmux.optimizers import OPTIMIZERS, optimizer_class
from jaxmux.peft import KINDS, Layout, LeafSpec
from jaxmux.peft.leaves import named_leaves, trained
from jaxmux.planner.costs.pool_spec import KindSize
from jaxmux.sharding import StageMesh


class TrainState(NamedTuple):
    """The arrays that training changes, for all slots, on the device. The same structure with
    `LeafSpec` in place of the arrays describes a state.

    Attributes:
      adapters: by adapter kind, the pool of its arrays, float32.
      accumulators: gradients of the current global batches, of the shapes of the trained arrays;
        None in place of arrays that are not trained.
      sums: `TOKEN_SUMS` over the task's current global batch, float32. The first is the loss: the
        value of the task's objective, or the loss whose gradient is that of the objective.
      moments: trees like `accumulators`. Their number is that of the optimizer kind with the most
        moments; a slot whose kind has fewer uses the first of them.
      count: updates so far, for optimizer kinds that count, int32.
    """

    adapters: Any
    accumulators: Any
    sums: Float[Array, "T sums"]
    moments: tuple[Any, ...]
    count: Int[Array, " T"]


class SlotState(NamedTuple):
    """The arrays of one slot, without the slot axis: those of its adapter kind, the gradients and
    the sums over the current global batch, and the optax state of its optimizer
    kind."""

    adapter: Any
    accumulators: Any
    sums: Float[Array, " sums"]
    optimizer: Any


class SlotKind(NamedTuple):
    """The kinds of a slot's task: a key of `peft.KINDS`, and a key of `optimizers.OPTIMIZERS`."""

    adapter: str
    optimizer: str


def state_specs(adapters: Mapping[str, Any], slots: int, optimizer: str) -> TrainState:
    """Describes a state. `adapters` has, by adapter kind, the description of its pool; `optimizer`
    is the kind with the most moments among those that the state must hold."""
    accumulators = jax.tree.map(LeafSpec.zero_padded, trained(adapters, adapters))
    return TrainState(
        dict(adapters),
        accumulators,
        LeafSpec((slots, SUMS), ("slot", "sum")),
        (accumulators,) * OPTIMIZERS[optimizer].moments,
        LeafSpec((slots,), ("slot",), dtype="int32"),
    )


def pool_specs(
    config: BackboneConfig,
    modules: Sequence[str],
    slots: int,
    rank: int,
    optimizer: str,
    others: Sequence[KindSize] = (),
) -> TrainState:
    """Describes a state with room for LoRA adapters of the given modules and rank, and for adapters
    of other kinds. `optimizer` is as for `state_specs`."""
    adapters = {LOW_RANK_KIND: KINDS[LOW_RANK_KIND].leaves(config, modules, slots, rank)}
    for size in others:
        points = [point.point for point in size.points]
        adapters[size.kind] = KINDS[size.kind].leaves(config, points, slots, size.rank)
    return state_specs(adapters, slots, optimizer)


@partial(jax.jit, static_argnums=0)
def empty_state(layout: Layout) -> TrainState:
    return jax.tree.map(LeafSpec.empty, layout.tree)


def grown(leaves: dict[str, Array], specs: TrainState, home: StageMesh) -> TrainState:
    """A larger state with the values of a smaller one and empty new slots and ranks. It is made
    array by array, so that the device holds only one array twice at any time. `leaves` are the
    smaller state's arrays by path; each is removed from this dict when it is used."""
    shardings = named_leaves(home.shardings(home.leaf_specs(specs)))

    def grow(name: str, spec: LeafSpec) -> Array:
        leaf = leaves.pop(name, None)
        if leaf is None:
            return home.run(jax.jit(spec.empty, out_shardings=shardings[name]))
        return leaf if leaf.shape == spec.shape else home.run(_pad, leaf, spec)

    new = [grow(name, spec) for name, spec in named_leaves(specs).items()]
    return jax.tree.unflatten(jax.tree.structure(specs), new)


@partial(jax.jit, static_argnums=1)
def moved(leaf: Array, spec: LeafSpec, sources: Int[Array, " T"]) -> Array:
    """An array with another number of slots. `sources` has, for every new slot, the number of the
    old slot whose values it gets; the old number of slots stands for an empty slot."""
    return jnp.take(leaf, sources, spec.slot_axis, mode="fill", fill_value=spec.padding)


def optax_state(kind: str, moments: Sequence[Any], count: Any) -> Any:
    """An optax state of an optimizer kind with these moments and this count. The state takes as
    many of the moments as the kind has, and the count if the kind counts updates."""
    is_count, structure = _optax_entries(kind)
    unused = iter(moments)
    return structure.unflatten([count if counts else next(unused) for counts in is_count])


def optax_parts(kind: str, optimizer: Any) -> tuple[list[Any], Any | None]:
    """The moments of an optax state, and its count or None: the inverse of `optax_state`."""
    is_count, structure = _optax_entries(kind)
    moments, count = [], None
    for counts, entry in zip(is_count, structure.flatten_up_to(optimizer), strict=True):
        if counts:
            count = entry
        else:
            moments.append(entry)
    return moments, count


def replace_moments(
    state: TrainState, moments: Sequence[Any], count: Int[Array, " T"] | None
) -> TrainState:
    """The state with its first moments replaced, for example by those of `optax_parts`. Without
    `count`, the counts stay."""
    return state._replace(
        moments=(*moments, *state.moments[len(moments) :]),
        count=state.count if count is None else count,
    )


def slot_view(state: TrainState, kind: SlotKind) -> SlotState:
    """The arrays, or their descriptions, that slots of one kind use, still with the slot axis."""
    from_pools = KINDS[kind.adapter].from_pools
    optimizer = optax_state(kind.optimizer, list(map(from_pools, state.moments)), state.count)
    return SlotState(
        from_pools(state.adapters), from_pools(state.accumulators), state.sums, optimizer
    )


def with_slot_view(state: TrainState, kind: SlotKind, view: SlotState) -> TrainState:
    slot_moments, count = optax_parts(kind.optimizer, view.optimizer)
    pools = KINDS[kind.adapter].in_pools
    moments = [old | pools(new) for old, new in zip(state.moments, slot_moments, strict=False)]
    state = state._replace(
        adapters=state.adapters | pools(view.adapter),
        accumulators=state.accumulators | pools(view.accumulators),
        sums=view.sums,
    )
    return replace_moments(state, moments, count)


def slot_kinds(specs: TrainState, optimizers: Sequence[str]) -> list[SlotKind]:
    kinds = [name for name, tree in specs.adapters.items() if tree]
    return [SlotKind(name, optimizer) for name in kinds for optimizer in optimizers]


# Fields of `SlotState` that are read together: those of an adapter, of a snapshot, and all.
READ_FIELDS = (("adapter",), ("adapter", "optimizer"), SlotState._fields)


def slot_specs(specs: TrainState, kind: SlotKind) -> SlotState:
    """Describes one slot of a kind: a `SlotState` of `LeafSpec` without the slot axis."""
    return jax.tree.map(LeafSpec.of_slot, slot_view(specs, kind))


@partial(jax.jit, static_argnums=(1, 2, 3, 5))
def read_slot(
    state: TrainState,
    layout: Layout,
    kind: SlotKind,
    fields: tuple[str, ...],
    slot: Int[Array, ""] | int,
    to_host: bool = False,
) -> dict[str, Any]:
    """The arrays of one slot by field of `SlotState`. An array with an axis of copies is summed
    over them. With `to_host`, the program itself writes the result to pinned memory of the host: a
    copy that is started outside of a program blocks the thread that starts it, or the next call of
    the driver, until the devices are ready."""

    def take(spec: LeafSpec, leaf: Array) -> Array:
        value = jax.lax.dynamic_index_in_dim(leaf, slot, spec.slot_axis, keepdims=False)
        return value.sum(axis=0) if "copy" in spec.axes else value

    specs, view = slot_view(layout.tree, kind), slot_view(state, kind)
    values = {
        field: jax.tree.map(take, getattr(specs, field), getattr(view, field)) for field in fields
    }
    return jax.device_put(values, jax.memory.Space.Host) if to_host else values


@partial(jax.jit, static_argnums=1, donate_argnums=0)
def clear_slot(state: TrainState, layout: Layout, slot: Int[Array, ""] | int) -> TrainState:
    """Empties one slot in place; every other slot keeps its bits. `state` is donated."""

    def clear(spec: LeafSpec, leaf: Array) -> Array:
        empty = spec.of_slot().empty()
        return jax.lax.dynamic_update_index_in_dim(leaf, empty, slot, spec.slot_axis)

    return jax.tree.map(clear, layout.tree, state)


def written_specs(spec: LeafSpec) -> list[LeafSpec]:
    """The sizes at which an array, described without the slot axis, is written to an empty slot:
    the ranks 8, 16, 32 and so on that are below the slot's, and the full rank. They are few,
    because each size has a program of its own."""
    if "rank" not in spec.axes:
        return [spec]
    rank = spec.shape[spec.axes.index("rank")]
    lower = [8 << i for i in range(rank.bit_length()) if 8 << i < rank]
    return [*map(spec.of_rank, lower), spec]


@partial(jax.jit, static_argnums=1, donate_argnums=0)
def write_leaf(leaf: Array, spec: LeafSpec, slot: Int[Array, ""] | int, value: Array) -> Array:
    """Replaces one slot of one array in place; `leaf` is donated. `value` has no slot axis. If its
    rank is lower than the slot's, the other ranks keep their values."""
    begins = [slot if axis == "slot" else 0 for axis in spec.axes]
    return jax.lax.dynamic_update_slice(leaf, jnp.expand_dims(value, spec.slot_axis), begins)


@partial(jax.jit, static_argnums=1)
def _pad(leaf: Array, spec: LeafSpec) -> Array:
    missing = [(0, full - size) for full, size in zip(spec.shape, leaf.shape, strict=True)]
    return jnp.pad(leaf, missing, constant_values=np.asarray(spec.padding, spec.dtype))


@cache
def _optax_entries(kind: str) -> tuple[list[bool], jax.tree_util.PyTreeDef]:
    """For each entry of the kind's optax state, whether it is a count and not a moment; and the
    state's structure, in which each entry is a leaf."""
    optimizer = optimizer_class(kind)
    transform = optimizer.transform(optimizer().hyperparameters())
    entries, structure = jax.tree.flatten(jax.eval_shape(transform.init, np.float32(0)))
    return [np.issubdtype(entry.dtype, np.integer) for entry in entries], structure
