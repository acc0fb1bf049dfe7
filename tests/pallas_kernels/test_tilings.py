"""The multiprocessors that kernels occupy."""

import jax
import pytest

from jaxmux.pallas_kernels.collectives import TP
from jaxmux.pallas_kernels.grouped_lora.tilings import multiprocessors


@pytest.mark.parametrize(
    ("axes", "left"),
    [({"x": 1}, 0), ({"dp": 4, "fsdp": 2, TP: 2}, 0), ({"dp": 2, "fsdp": 1, TP: 4}, 16)],
    ids=str,
)
def test_kernels_leave_room_for_the_sums_of_many_devices(axes, left, h200):
    device = h200.abstract_device
    mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert multiprocessors() == device.num_cores - left
