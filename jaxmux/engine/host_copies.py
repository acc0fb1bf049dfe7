"""Arrays on their way from the devices to the host.

The devices write them to pinned memory of the host, and threads copy them to other memory. Pinned
memory is scarce, so it holds only so many arrays at a time.
"""

import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from jaxmux.errors import OutOfDeviceMemory

from .out_of_memory import fits

# Most bytes of the arrays of one device that are on their way together. On a backbone of 8B
# parameters, an adapter of rank 32 has 1 GB with its optimizer state.
_MOST = 2 * 2**30


class HostCopy:
    """A tree of arrays on their way to the host.

    Attributes:
      bytes: the most bytes of the arrays that come from one device; 0 once they have arrived.
    """

    def __init__(self, arrays: Any):
        """Takes the arrays, which the devices need not have computed yet.

        Args:
          arrays: a tree of arrays in pinned memory, and of NumPy arrays.
        """
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
    """Copies, of which only so many bytes are on their way at a time: another one waits for the
    oldest to arrive. A single copy may be larger."""

    def __init__(self, most: float = _MOST):
        """Begins without copies.

        Args:
          most: bytes of the arrays of one device.
        """
        self._most = most
        # Nobody waits for a copy that has been dropped.
        self._begun: list[weakref.ref[HostCopy]] = []
        # By key, the bytes of such a copy.
        self._bytes: dict[Hashable, int] = {}

    def waits(self, key: Hashable) -> bool:
        """Whether a copy would wait for others.

        Args:
          key: what it copies, as for `begin`.
        """
        held = sum(copy.bytes for copy in self._on_their_way())
        return held > 0 and held + self._bytes.get(key, 0) > self._most

    def begin(
        self, key: Hashable, read: Callable[[], Any], wait_for_devices: Callable[[], None]
    ) -> HostCopy:
        """Begins a copy, when there is room for it.

        Args:
          key: what it copies; copies with equal keys are about equally large.
          read: function that lets the devices write the arrays, which nobody else uses.
          wait_for_devices: function that returns when the devices have ended what has been
            dispatched, which needs memory, too.

        Raises:
          OutOfDeviceMemory: a device has too little memory even if it does nothing else.
        """
        while self.waits(key):
            # Another thread may have waited for the last one by now.
            for copy in self._on_their_way()[:1]:
                copy.wait()
        found: list[Any] = []
        if not fits(lambda: found.append(read())):
            wait_for_devices()
            if not fits(lambda: found.append(read())):
                raise OutOfDeviceMemory(
                    "a device has too little memory to copy a task to the host; try fewer or "
                    "smaller tasks"
                )
        copy = HostCopy(*found)
        self._bytes[key] = copy.bytes
        self._begun = [weakref.ref(own) for own in (*self._on_their_way(), copy)]
        return copy

    def _on_their_way(self) -> list[HostCopy]:
        """The copies that have not arrived, the oldest first."""
        return [copy for own in self._begun if (copy := own()) and copy.bytes]


def _arrived(array: np.ndarray | jax.Array) -> np.ndarray:
    """An array in memory of its own, once it has arrived."""
    if not isinstance(array, jax.Array):
        return array
    value = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            value[shard.index] = shard.data
    return value


def _most_bytes(arrays: Any) -> int:
    """The most bytes of a tree that come from one device."""
    held: Counter[jax.Device] = Counter()
    for array in jax.tree.leaves(arrays):
        if isinstance(array, jax.Array):
            values = math.prod(array.sharding.shard_shape(array.shape))
            for device in array.sharding.addressable_devices:
                held[device] += values * array.dtype.itemsize
    return max(held.values(), default=0)
