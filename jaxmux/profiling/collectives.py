"""The measured programs of collectives among the devices of this host."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmux.planner.costs.device_profile import CollectivePoint

from .timed_programs import Program

# Collectives in one call; each uses the result of the previous one.
_REPEATS = 8
_AXES = ("outer", "inner")


def collective_program(point: CollectivePoint) -> Program:
    """Returns the program of a collective over groups of `point.devices` devices, all groups at
    once. The payload consists of bfloat16 values."""
    devices = np.array(jax.devices())
    other = len(devices) // point.devices
    sizes = (point.devices, other) if point.axis == "outer" else (other, point.devices)
    mesh = Mesh(devices.reshape(sizes), _AXES)
    everywhere = PartitionSpec(_AXES)
    one = _collective(point)

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(_REPEATS):
            x = one(x)
        return x

    def run(x, inputs, constants):
        return jax.shard_map(chain, mesh=mesh, in_specs=everywhere, out_specs=everywhere)(x), ()

    elements = max(1, point.payload_bytes // jnp.dtype(jnp.bfloat16).itemsize)
    sharding = NamedSharding(mesh, everywhere)
    x = jnp.ones(len(devices) * elements, jnp.bfloat16, device=sharding)
    return Program(jax.jit(run, donate_argnums=0), x, (), (), _REPEATS, point)


def _collective(point: CollectivePoint) -> Callable[[jax.Array], jax.Array]:
    """Returns a function from a device's payload to a result of the same size."""
    axis, devices = point.axis, point.devices

    def psum(x):
        total = jax.lax.psum(x, axis) * (1 / devices)
        return jax.lax.pcast(total.astype(x.dtype), axis, to="varying")

    def all_gather(x):
        gathered = jax.lax.all_gather(x, axis)
        return gathered[(jax.lax.axis_index(axis) + 1) % devices]

    def ppermute(x):
        return jax.lax.ppermute(x, axis, [(i, (i + 1) % devices) for i in range(devices)])

    return {"psum": psum, "all_gather": all_gather, "ppermute": ppermute}[point.collective]
