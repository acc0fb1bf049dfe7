"""Moves arrays between meshes, also between meshes of several processes.

Every process runs the same program on the host. If an array is on devices of other processes, this
process knows only its shape and dtype: a `jax.ShapeDtypeStruct` stands for the array, and
`StageMesh.run` dispatches nothing. So all processes make the same decisions, and each one works
with its own devices.
"""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

# The axes of a mesh of senders and receivers. Different shards send different parts of an array;
# the members of a shard have the same part.
_SHARD, _MEMBER = "shard", "member"
_EVERY = P((_SHARD, _MEMBER))


def is_local(mesh: Mesh) -> bool:
    return jax.process_index() in _processes(mesh)


def put(tree: Any, shardings: Any) -> Any:
    """Copies arrays to devices. They are the same arrays of the host in every process, or arrays
    that lie on these devices already, divided in another way. `shardings` is a tree like `tree`, or
    one sharding for all arrays."""
    if isinstance(shardings, Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(_put, tree, shardings)


def _put(value: Any, sharding: Sharding) -> Any:
    if jax.process_index() not in {device.process_index for device in sharding.device_set}:
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    lies_there = isinstance(value, jax.Array) and not value.is_fully_addressable
    if lies_there or sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    value = np.asarray(value)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def move(tree: Any, source: Mesh, target: Mesh, spec: P) -> Any:
    """Copies arrays from one mesh to another one that shares no device with it, or to itself.

    Between processes, the devices of both meshes run a program together that exchanges the arrays.
    Its dispatch does not wait; a device that sends waits for the receiver.

    `spec` divides all arrays on both meshes: P() if every device has the whole array; otherwise the
    first axis is divided among all mesh axes but the last one, whose product is the same in both
    meshes.
    """
    processes = _processes(source) | _processes(target)
    sharding = NamedSharding(target, spec)
    if jax.process_index() not in processes:
        return jax.tree.map(partial(_shape, sharding=sharding), tree)
    if source == target or processes == {jax.process_index()}:
        return jax.device_put(tree, sharding)
    return _exchange(tree, source, target, spec)


def share(tree: Any, mesh: Mesh) -> Any:
    """Lets every process read arrays of a mesh: returns the whole arrays, of which each of several
    processes has a copy on one of its devices. If this process has no device of the mesh, `tree`
    has shapes and dtypes."""
    shapes = jax.tree.map(_shape, tree)
    whole = _replicate(NamedSharding(mesh, P()))
    tree = whole(tree) if is_local(mesh) else whole.eval_shape(shapes)
    others = {d.process_index: d for d in reversed(jax.devices())}
    others = [d for process, d in sorted(others.items()) if process not in _processes(mesh)]
    if others:
        readers = Mesh(np.array(others), (_MEMBER,))
        moved = move(tree, mesh, readers, P())
        tree = tree if is_local(mesh) else moved
    return jax.tree.map(lambda x, shape: x.addressable_data(0).reshape(shape.shape), tree, shapes)


def _processes(mesh: Mesh) -> set[int]:
    return {device.process_index for device in mesh.devices.flat}


def _shape(x: Any, sharding: NamedSharding | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


@cache
def _replicate(whole: NamedSharding) -> Any:
    # Scalars get an axis, because `_exchange` concatenates arrays along their first axis.
    return jax.jit(partial(jax.tree.map, jnp.atleast_1d), out_shardings=whole)


def _exchange(tree: Any, source: Mesh, target: Mesh, spec: P) -> Any:
    """`move` in a process that has devices of at least one of the meshes."""
    shards = 1 if spec == P() else source.devices.size // source.devices.shape[-1]
    devices = [mesh.devices.reshape(shards, -1) for mesh in (source, target)]
    both = Mesh(np.concatenate(devices, axis=1), (_SHARD, _MEMBER))
    before, after = NamedSharding(source, spec), NamedSharding(target, spec)

    def stacked(x: Any) -> jax.Array:
        # The pieces of all devices, concatenated along the first axis; receivers have zeros.
        first, *rest = before.shard_shape(x.shape)
        shards = {s.device: s.data for s in getattr(x, "addressable_shards", ())}
        pieces = [
            shards[device]
            if device in shards
            else jnp.zeros((first, *rest), x.dtype, device=device)
            for device in both.local_devices
        ]
        shape = (both.size * first, *rest)
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(both, _EVERY), pieces)

    def arrived(x: Any, exchanged: jax.Array) -> Any:
        if not is_local(target):
            return _shape(x, after)
        shards = {s.device: s.data for s in exchanged.addressable_shards}
        pieces = [shards[device] for device in target.local_devices]
        return jax.make_array_from_single_device_arrays(x.shape, after, pieces)

    exchanged = _send(both, devices[0].shape[1], jax.tree.map(stacked, tree))
    return jax.tree.map(arrived, tree, exchanged)


@partial(jax.jit, static_argnums=(0, 1))
def _send(both: Mesh, senders: int, tree: Any) -> Any:
    """Copies the arrays of the senders to the receivers. In each shard of the mesh `both`, the
    first `senders` members are the senders, which all have the same arrays."""
    pairs = [(i, senders + i) for i in range(senders)]

    def on_device(x: Array) -> Array:
        if both.shape[_MEMBER] == 2 * senders:
            return jax.lax.ppermute(x, _MEMBER, pairs)
        return _of_first(x)

    return jax.shard_map(
        partial(jax.tree.map, on_device),
        mesh=both,
        in_specs=_EVERY,
        out_specs=_EVERY,
        check_vma=False,
    )(tree)


def _of_first(x: Array) -> Array:
    """The array of the first member, with the same bits, on every member."""
    if x.dtype == jnp.bool_:
        return _of_first(x.astype(jnp.uint8)) > 0
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    # Not every communication library sums integers of 8 or 16 bits.
    wide = jnp.where(jax.lax.axis_index(_MEMBER) == 0, bits.astype(jnp.uint32), 0)
    wide = jax.lax.psum(wide, _MEMBER)
    return jax.lax.bitcast_convert_type(wide.astype(bits.dtype), x.dtype)
