"""The order in which a persistent kernel takes its tiles."""

import jax.numpy as jnp
import pytest

from jaxmux.pallas_kernels.grouped_lora.tiles_sm90 import owned_first


@pytest.mark.parametrize(
    ("chunk_slot", "tiles_per_chunk", "expected"),
    [
        ([2, 0, 1], 1, [0, 1, 2]),
        ([-1, 0, -1, 3], 1, [1, 3, 0, 2]),
        ([-1, 5], 2, [2, 3, 0, 1]),
        ([-1, -1], 1, [0, 1]),
    ],
)
def test_tiles_with_an_owner_come_first_and_keep_their_order(chunk_slot, tiles_per_chunk, expected):
    order = owned_first(jnp.asarray(chunk_slot, jnp.int32), len(chunk_slot) * tiles_per_chunk)
    assert order.tile.tolist() == expected
    assert order.slot.tolist() == [chunk_slot[tile // tiles_per_chunk] for tile in expected]
