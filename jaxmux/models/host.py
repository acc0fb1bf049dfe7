"""Computes on the CPU of the host, whichever devices JAX uses by default."""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import jax


def on_host(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a function of arrays, computed on the CPU. If JAX was told not to use the CPU,
    it is computed on the default device, with one warning."""
    with jax.default_device(_host()):
        return function(*args)


@cache
def _host() -> jax.Device | None:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as e:
        logging.getLogger(__name__).warning(
            "values of the backbone from which adapters begin are computed on %s: JAX has no CPU "
            "(%s)",
            jax.local_devices()[0],
            e,
        )
        return None
