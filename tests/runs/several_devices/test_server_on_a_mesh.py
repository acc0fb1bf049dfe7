"""A server whose tasks move between one device and pipelines while it crashes and starts again."""

import pytest

from jaxmux.server.server import ServerOptions, tuning_server
from jaxmux.server.task import ENDED

from ..server_simulation import WEIGHTS, Simulation
from ..simulated_server import POOLS
from ..simulated_tasks import OPTIONS, calm_outcomes

# Slots and largest rank.
ONE_POOL = ((3, 4),)
MESHES = ("", "pp2", "tp2", "dp2", "pp2,tp2")


def test_tasks_move_between_one_device_and_a_pipeline_and_keep_their_bits(
    backbone, data, make_task, adapter_bytes, tmp_path
):
    """Batches of "large" take several rounds, and servers end in the middle of one."""
    tasks = [
        make_task("large", data=data["long"], batch_size=9, steps=3),
        make_task("short", steps=5),
    ]

    def adapters(folder, *servers):
        """Each server has a mesh and ends after a step of "short"; the last one ends later."""
        for mesh, last in servers:
            options = ServerOptions(mesh=mesh, **OPTIONS)
            with tuning_server(backbone, folder, options, say=lambda line: None) as server:
                for task in () if server.statuses() else tasks:
                    server.register(task)
                server.step()
                while server.status("short").step < last:
                    server.step()
                if last < 5:
                    assert server.status("short").step == last
                    continue
                while any(status.state not in ENDED for status in server.statuses()):
                    server.step()
        return adapter_bytes(folder / "adapters")

    moved = adapters(tmp_path / "moved", (None, 1), ("pp2", 3), (None, 5))
    assert moved == adapters(tmp_path / "calm", (None, 5))


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
