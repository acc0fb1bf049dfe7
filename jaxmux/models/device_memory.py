"""Memory of the local devices, as JAX reports it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Bytes of the hole for small arrays, and of the array that keeps it apart from the free memory. The
# array is large, because a small one would be allocated elsewhere.
_HOLE, _GUARD = 256 * 2**20, 32 * 2**20
# Bytes of holes that loading a backbone and creating the state leave between arrays. The working
# memory of a step is one array and cannot use them. Measured for a backbone of 8B parameters.
_FRAGMENTED = 736 * 2**20


def device_memory() -> int | None:
    """Bytes of the first local device's memory that the arrays of training may use; None where JAX
    does not report it, for example on CPU.

    It is what JAX may use, less what `memory_for_training` leaves out.
    """
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return limit and memory_for_training(limit)


def memory_for_training(limit: int) -> int:
    """Bytes that the arrays of training may use: without those that `keep_small_arrays_together`
    sets apart and those that are lost between arrays.

    Args:
      limit: bytes of a device's memory that JAX may use.
    """
    return limit - _HOLE - _GUARD - _FRAGMENTED


def free_memory() -> int | None:
    """Bytes of the first local device's memory that JAX may use and that hold no array; None where
    JAX does not report it, for example on CPU."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None


def device_peak() -> int | None:
    """Most bytes of a local device's memory that were in use at the same time since the process
    began, on the device with most; None where JAX does not report it, for example on CPU."""
    stats = (device.memory_stats() or {} for device in jax.local_devices())
    return max((s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s), default=None)


class DeviceBytes(NamedTuple):
    """Memory of a device.

    Attributes:
      in_use: bytes in use.
      peak: most bytes that were in use at the same time since the process began.
    """

    in_use: int
    peak: int


def devices_bytes() -> list[DeviceBytes]:
    """The memory of the local devices that report it, which those of a CPU do not. It does not
    wait for the devices."""
    stats = (device.memory_stats() or {} for device in jax.local_devices())
    return [
        DeviceBytes(own["bytes_in_use"], own["peak_bytes_in_use"])
        for own in stats
        if "peak_bytes_in_use" in own
    ]


def keep_small_arrays_together() -> jax.Array | None:
    """Leaves a hole in the GPU's memory for the small arrays of later rounds.

    The inputs of a round are allocated while the round before it runs. Without a hole of their own
    they lie behind that round's working memory and divide the free memory into two parts, so that
    a later round finds no part that is large enough. JAX's allocator prefers the smallest hole.

    Returns:
      The array behind the hole, which must be kept; None on other devices.
    """
    if jax.default_backend() != "gpu":
        return None
    hole, guard = (jax.block_until_ready(jnp.zeros(size, jnp.uint8)) for size in (_HOLE, _GUARD))
    hole.delete()
    return guard
