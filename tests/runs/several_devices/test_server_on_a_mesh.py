"""A server whose tasks move between one device and pipelines while it crashes and starts again."""

import pytest

from ..server_simulation import WEIGHTS, Simulation
from ..simulated_server import POOLS
from ..simulated_tasks import calm_outcomes

# Slots and largest rank.
ONE_POOL = ((3, 4),)
MESHES = ("", "pp2", "tp2", "dp2", "pp2,tp2")


@pytest.fixture(scope="module")
def calm(backbone, data, adapter_bytes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("calm") / "server"
    return calm_outcomes(backbone, data, folder, adapter_bytes)


@pytest.fixture
def simulate(backbone, data, calm, adapter_bytes, tmp_path, monkeypatch):
    """Runs a simulation, and returns the meshes on which servers were started; a failure shows what
    is needed to repeat it."""

    def run(seed, operations, weights=WEIGHTS, **options):
        arguments = backbone, data, calm, adapter_bytes, tmp_path, monkeypatch
        simulation = Simulation(seed, *arguments, **options)
        try:
            simulation.run(operations, weights)
        except BaseException:
            print(f"operation {simulation.operations}", *simulation.history, sep="\n")
            raise
        finally:
            simulation.close()
        return simulation.started

    return run


# Servers start more often than on one device, so that tasks move.
MOVES = WEIGHTS | {"crash": 6, "restart": 6}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "operations", "pools"), [(14, 20, ONE_POOL), (1, 60, POOLS), (14, 60, POOLS)]
)
def test_random_operations_on_pipelines_lose_nothing_and_change_no_bit(
    seed, operations, pools, simulate
):
    meshes = ("", "pp2")
    assert simulate(seed, operations, MOVES, meshes=meshes, pools=pools) == set(meshes)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "operations"), [(2, 60), (3, 600)])
def test_random_operations_on_all_kinds_of_meshes_lose_nothing(seed, operations, simulate):
    """Devices that share a microbatch add in another order, so adapters and held-out losses are
    those of a calm task on one device up to `TOLERANCE`. States, steps, tokens and the step with
    the best adapter are the same."""
    options = {"meshes": MESHES, "pools": ONE_POOL, "same_bits": False}
    assert simulate(seed, operations, MOVES, **options) == set(MESHES)
