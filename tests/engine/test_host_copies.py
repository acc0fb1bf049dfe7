"""Only so many bytes are on their way to the host at a time."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmux.engine.state.stored_state import HostCopies
from jaxmux.errors import OutOfDeviceMemory

# float32 [8].
BYTES = 32


def wait() -> None:
    """The devices have ended what has been dispatched."""


def array(value: float) -> dict[str, jax.Array]:
    return {"adapter": jnp.full(8, value)}


def test_arrays_of_the_host_pass_as_they_are():
    own = np.arange(3, dtype=np.float32)
    copy = HostCopies().begin("slot", lambda: {"adapter": own}, wait)
    assert copy.bytes == 0
    assert copy.wait()["adapter"] is own


def test_a_copy_shares_no_memory_with_the_devices():
    copy = HostCopies().begin("slot", lambda: array(1), wait)
    assert copy.wait()["adapter"].flags.owndata


def test_a_copy_waits_for_the_oldest():
    copies = HostCopies(most=2 * BYTES)
    first, second = (
        copies.begin("slot", lambda value=value: array(value), wait) for value in (1, 2)
    )
    assert first.bytes == second.bytes == BYTES
    assert copies.waits("slot")
    third = copies.begin("slot", lambda: array(3), wait)
    assert [copy.bytes for copy in (first, second, third)] == [0, BYTES, BYTES]
    for value, copy in enumerate((first, second, third), start=1):
        np.testing.assert_array_equal(copy.wait()["adapter"], np.full(8, value, np.float32))
    assert not copies.waits("slot")


def test_another_thread_may_wait_for_the_oldest_first(monkeypatch):
    copies = HostCopies(most=BYTES)
    first, waits = copies.begin("slot", lambda: array(1), wait), copies.waits

    def arrives_meanwhile(key: str) -> bool:
        result = waits(key)
        first.wait()
        return result

    monkeypatch.setattr(copies, "waits", arrives_meanwhile)
    copy = copies.begin("slot", lambda: array(2), wait)
    np.testing.assert_array_equal(copy.wait()["adapter"], np.full(8, 2, np.float32))


def test_a_copy_may_be_larger_than_all_may_be_together():
    copies = HostCopies(most=BYTES / 2)
    first = copies.begin("slot", lambda: array(1), wait)
    second = copies.begin("slot", lambda: array(2), wait)
    assert (first.bytes, second.bytes) == (0, BYTES)


def test_nobody_waits_for_a_copy_that_was_dropped():
    copies = HostCopies(most=BYTES)
    dropped = copies.begin("slot", lambda: array(1), wait)
    assert copies.waits("slot")
    del dropped
    gc.collect()
    assert not copies.waits("slot")


def test_small_copies_do_not_wait():
    copies = HostCopies()
    held = [copies.begin("slot", lambda: array(1), wait) for _ in range(20)]
    assert not copies.waits("slot")
    assert all(copy.bytes for copy in held)


def test_a_copy_that_does_not_fit_waits_for_the_devices():
    ended = []

    def read() -> dict[str, jax.Array]:
        if not ended:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return array(2)

    copy = HostCopies().begin("slot", read, lambda: ended.append("passes"))
    np.testing.assert_array_equal(copy.wait()["adapter"], np.full(8, 2, np.float32))


def test_a_copy_that_never_fits_says_so():
    def read() -> dict[str, jax.Array]:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with pytest.raises(OutOfDeviceMemory, match="to copy a task to the host; try fewer"):
        HostCopies().begin("slot", read, wait)


def test_other_errors_of_a_device_stay():
    def read() -> dict[str, jax.Array]:
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")

    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: broken"):
        HostCopies().begin("slot", read, wait)
