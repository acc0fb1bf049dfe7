"""Arrays that programs move between meshes, as between processes, keep their bits."""

import jax
import ml_dtypes  # noqa: F401  (numpy learns of bfloat16)
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmux.sharding import transfers
from jaxmux.sharding.stage_mesh import AXES, DATA


def mesh(first: int, *sizes: int) -> Mesh:
    devices = jax.devices()[first : first + int(np.prod(sizes))]
    return Mesh(np.array(devices).reshape(sizes), AXES)


def values(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Values of all kinds, also both zeros, infinity and NaN."""
    found = np.random.default_rng(0).normal(scale=100, size=shape)
    if dtype == "bool":
        return found > 0
    if dtype != "int32":
        found.flat[:4] = [0.0, -0.0, np.inf, np.nan]
    return found.astype(dtype)


@pytest.mark.parametrize("spec", [P(DATA), P()])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
@pytest.mark.parametrize(
    ("source", "target"),
    [((1, 2, 2), (2, 1, 2)), ((1, 2, 1), (2, 1, 3)), ((2, 1, 2), (1, 2, 1))],
)
def test_arrays_arrive_with_their_bits(source, target, dtype, spec):
    before, after = mesh(0, *source), mesh(int(np.prod(source)), *target)
    sent = {"x": values(dtype, (2, 3, 5)), "y": values(dtype, (4,))}
    placed = jax.device_put(sent, NamedSharding(before, spec))
    found = transfers._exchange(placed, before, after, spec)
    for name, value in sent.items():
        assert found[name].sharding == NamedSharding(after, spec)
        assert np.asarray(found[name]).tobytes() == value.tobytes()
