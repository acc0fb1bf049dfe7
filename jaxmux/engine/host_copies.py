"""Arrays on their way from the devices to the host.

The devices keep a copy of what is being copied until it has arrived, because training goes on with
the original. The memory model knows nothing of these copies, so they must fit into the memory that
it leaves.
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
from jaxmux.models import device_memory
from jaxmux.planner.costs.layer_policies import USABLE

from .out_of_memory import fits

# The memory of the host through which arrays pass, because devices write to it by themselves. The
# thread that begins to copy to memory of NumPy waits until the devices have ended.
PASSAGE = "pinned_host"


class HostCopy:
    """A tree of arrays that is being copied to the host.

    Attributes:
      bytes: the most bytes that a device holds of the copy; 0 once it has arrived.
    """

    def __init__(self, arrays: Any):
        """Begins to copy. The devices need not have computed the arrays yet.

        Args:
          arrays: a tree of arrays on devices or on the host.
        """
        self.bytes, self._lock = _most_bytes(arrays), threading.Lock()
        # Functions that wait for the arrays; then the arrays.
        self._tree, self._waited = jax.tree.map(_begin, arrays), False

    def wait(self) -> Any:
        """Waits for the copy, in any thread, and returns the tree of NumPy arrays. The devices no
        longer have the copy then."""
        with self._lock:
            if not self._waited:
                self._tree = jax.tree.map(lambda wait: wait(), self._tree)
                self._waited, self.bytes = True, 0
            return self._tree


class HostCopies:
    """Copies of which the devices hold only so many bytes at a time: another one then waits for the
    oldest to arrive. A single copy may be larger."""

    def __init__(self, most: float | None = None):
        """Begins without copies.

        Args:
          most: bytes of one device; None for half of the memory that plans leave, and for any
            number if the devices' memory is unknown.
        """
        if most is None:
            most = (device_memory() or math.inf) * (1 - USABLE) / 2
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
        held = sum(copy.bytes for copy in self._on_devices())
        return held > 0 and held + self._bytes.get(key, 0) > self._most

    def begin(
        self, key: Hashable, read: Callable[[], Any], wait_for_devices: Callable[[], None]
    ) -> HostCopy:
        """Begins a copy, when there is room for it.

        Args:
          key: what it copies; copies with equal keys are about equally large.
          read: function that returns the arrays, which nobody else uses.
          wait_for_devices: function that returns when the devices have ended what has been
            dispatched, which needs memory, too.

        Raises:
          OutOfDeviceMemory: a device has too little memory even without other copies.
        """
        while self.waits(key):
            # Another thread may have waited for the last one by now.
            for copy in self._on_devices()[:1]:
                copy.wait()
        found: list[Any] = []
        if not fits(lambda: found.append(read())):
            for copy in self._on_devices():
                copy.wait()
            wait_for_devices()
            if not fits(lambda: found.append(read())):
                raise OutOfDeviceMemory(
                    "a device has too little memory to copy a task to the host; try fewer or "
                    "smaller tasks"
                )
        copy = HostCopy(*found)
        self._bytes[key] = copy.bytes
        self._begun = [weakref.ref(own) for own in (*self._on_devices(), copy)]
        return copy

    def _on_devices(self) -> list[HostCopy]:
        """The copies that have not arrived, the oldest first."""
        return [copy for own in self._begun if (copy := own()) and copy.bytes]


def _begin(array: np.ndarray | jax.Array) -> Callable[[], np.ndarray]:
    """Begins to copy an array. The result waits for it; it holds no memory of the devices once they
    have written to that of the host."""
    if not isinstance(array, jax.Array):
        return lambda: array
    parts = [
        (shard.index, jax.device_put(shard.data, shard.data.sharding.with_memory_kind(PASSAGE)))
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]
    shape, dtype = array.shape, array.dtype

    def wait() -> np.ndarray:
        # The memory for passing is small and is needed again.
        value = np.empty(shape, dtype)
        for index, part in parts:
            value[index] = part
        return value

    return wait


def _most_bytes(arrays: Any) -> int:
    """The most bytes of a tree that one device holds."""
    held: Counter[jax.Device] = Counter()
    for array in jax.tree.leaves(arrays):
        if isinstance(array, jax.Array):
            values = math.prod(array.sharding.shard_shape(array.shape))
            for device in array.sharding.addressable_devices:
                held[device] += values * array.dtype.itemsize
    return max(held.values(), default=0)
