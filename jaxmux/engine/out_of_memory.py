"""What executors do if a device runs out of memory."""

import logging
from collections.abc import Callable
from typing import Any

import jax

from jaxmux.errors import OutOfDeviceMemory, ran_out_of_memory

_log = logging.getLogger("jaxmux")


def fits(call: Callable[..., Any], *arguments: Any) -> bool:
    """Whether a call returns without running out of a device's memory.

    Args:
      call: the function; other errors of JAX are raised.
      *arguments: its arguments.
    """
    try:
        call(*arguments)
    except jax.errors.JaxRuntimeError as e:
        if not ran_out_of_memory(e):
            raise
        _log.info("%s", str(e).splitlines()[0])
        return False
    return True


def microbatch_too_large(tokens: int) -> OutOfDeviceMemory:
    """The exception for a microbatch that does not fit, however much is computed again.

    Args:
      tokens: tokens of the microbatch.
    """
    return OutOfDeviceMemory(
        f"a microbatch of {tokens} tokens does not fit into the device's memory, even if all "
        f"values are computed again; try tokens_per_microbatch={tokens // 2}, or fewer or smaller "
        "tasks"
    )
