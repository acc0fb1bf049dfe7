"""Memory of the first device, as JAX reports it."""

import jax


def device_memory() -> int | None:
    """Bytes of the first local device's memory that JAX may use; None where JAX does not report it,
    for example on CPU."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def device_peak() -> int | None:
    """Most bytes of the first local device's memory that were in use at the same time since the
    process began; None where JAX does not report it, for example on CPU."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
