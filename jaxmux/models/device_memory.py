"""Memory of the local devices, as JAX reports it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Bytes of the hole for small arrays, and of the array that separates the hole from the free memory.
# This array is large, because a small one would be allocated elsewhere.
_HOLE, _GUARD = 256 * 2**20, 32 * 2**20
# Bytes of holes between arrays after a backbone is loaded and the state is created. The working
# memory of a step is one array and cannot use them. Measured for a backbone of 8B parameters.
_FRAGMENTED = 736 * 2**20


def device_memory() -> int | None:
    """Bytes of the first local device's memory that the arrays of training may use (see
    `memory_for_training`); None if JAX does not report its memory, for example on CPU."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return limit and memory_for_training(limit)


def memory_for_training(limit: int) -> int:
    """Bytes that the arrays of training may use, if JAX may use `limit` bytes. The rest is reserved
    by `keep_small_arrays_together` or lost between arrays."""
    return limit - _HOLE - _GUARD - _FRAGMENTED


def free_memory() -> int | None:
    """Bytes of the first local device's memory that JAX may use and that hold no array; None if JAX
    does not report them, for example on CPU."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None


def device_peak() -> int | None:
    """Most bytes in use at the same time on one local device since the process began, for the
    device with the most; None if JAX does not report them, for example on CPU."""
    stats = (device.memory_stats() or {} for device in jax.local_devices())
    return max((s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s), default=None)


class DeviceBytes(NamedTuple):
    """Bytes of a device's memory that are in use, and the most bytes that were in use at the same
    time since the process began."""

    in_use: int
    peak: int


def devices_bytes() -> list[DeviceBytes]:
    """The memory of the local devices that report it, which CPUs do not. Does not wait for the
    devices."""
    stats = (device.memory_stats() or {} for device in jax.local_devices())
    return [
        DeviceBytes(of_device["bytes_in_use"], of_device["peak_bytes_in_use"])
        for of_device in stats
        if "peak_bytes_in_use" in of_device
    ]


def keep_small_arrays_together() -> jax.Array | None:
    """Leaves a hole in the GPU's memory for the small arrays of later rounds.

    The inputs of a round are allocated while the previous round runs. Without a hole for them, they
    would lie after the working memory of the previous round and divide the free memory into two
    parts, of which neither may be large enough for a later round. JAX's allocator prefers the
    smallest hole.

    Returns the array after the hole, which the caller must keep; None on other devices.
    """
    if jax.default_backend() != "gpu":
        return None
    hole, guard = (jax.block_until_ready(jnp.zeros(size, jnp.uint8)) for size in (_HOLE, _GUARD))
    hole.delete()
    return guard
