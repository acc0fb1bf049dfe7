"""A server whose tasks move between one device and pipelines while it crashes and starts again."""

import pytest

from ..server_simulation import Simulation
from ..simulated_tasks import calm_outcomes


@pytest.fixture(scope="module")
def calm(backbone, data, adapter_bytes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("calm") / "server"
    return calm_outcomes(backbone, data, folder, adapter_bytes)


@pytest.mark.parametrize("seed", [1, 14])
def test_random_operations_on_several_meshes_lose_nothing(
    seed, backbone, data, calm, adapter_bytes, tmp_path, monkeypatch
):
    arguments = backbone, data, calm, adapter_bytes, tmp_path, monkeypatch
    simulation = Simulation(seed, *arguments, meshes=("", "pp2"))
    try:
        simulation.run(60)
    except BaseException:
        print(f"operation {simulation.operations}", *simulation.history, sep="\n")
        raise
    finally:
        simulation.close()
