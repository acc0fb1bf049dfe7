"""Random sequences of commands, faults and crashes lose no task and no token."""

import os

import pytest

from .server_simulation import Simulation
from .simulated_tasks import calm_outcomes

SEED = os.environ.get("JAXMUX_SIMULATION_SEED", "1")
OPERATIONS = int(os.environ.get("JAXMUX_SIMULATION_OPERATIONS", 2000))
# Operations between two times at which everything comes to its end.
EPISODE = 250


@pytest.fixture(scope="module")
def calm(backbone, data, adapter_bytes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("calm") / "server"
    return calm_outcomes(backbone, data, folder, adapter_bytes)


@pytest.fixture
def simulate(backbone, data, calm, adapter_bytes, tmp_path):
    """Runs a simulation; a failure shows what is needed to repeat it."""

    def run(seed, operations, **options):
        with pytest.MonkeyPatch.context() as monkeypatch:
            folder = tmp_path / str(seed).replace("/", "-")
            folder.mkdir()
            arguments = backbone, data, calm, adapter_bytes, folder, monkeypatch
            simulation = Simulation(seed, *arguments, **options)
            try:
                simulation.run(operations)
            except BaseException:
                print(f"seed {seed!r}, operation {simulation.operations}; the last operations:")
                print("\n".join(simulation.history), f"\nsaid: {simulation.said[-5:]}")
                raise
            finally:
                simulation.close()

    return run


@pytest.mark.parametrize("episode", range(-(-OPERATIONS // EPISODE)))
def test_random_operations_lose_nothing(episode, simulate):
    simulate(f"{SEED}/{episode}", EPISODE)
