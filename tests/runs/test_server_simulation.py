"""Random sequences of commands, faults and crashes lose no task and no token."""

import os
import traceback

import pytest

from .server_simulation import Simulation
from .simulated_server import ELASTIC_POOLS, POOLS_OF_ALL_RANKS
from .simulated_tasks import MOST_STEPS, calm_outcomes

SEED = os.environ.get("JAXMUX_SIMULATION_SEED", "1")
OPERATIONS = os.environ.get("JAXMUX_SIMULATION_OPERATIONS")
# Operations between two times at which everything comes to its end.
EPISODE, SHORT = 200, 100
# What the servers of an episode may be.
VARIANTS = (
    {},
    {"elastic": True, "pools": ELASTIC_POOLS, "same_bits": False},
    {"pools": POOLS_OF_ALL_RANKS, "same_bits": False},
)


def episodes() -> list:
    """The numbers and lengths of the episodes. Unless the environment says how many operations
    there are, CI runs a short one of a plain server and one of an elastic server; the others are
    slow."""
    numbers = range(-(-int(OPERATIONS or 2000) // EPISODE))
    slow = [] if OPERATIONS else [i for i in numbers if i != 1]
    found = [
        pytest.param(i, EPISODE, id=str(i), marks=[pytest.mark.slow] if i in slow else [])
        for i in numbers
    ]
    return found if OPERATIONS else [pytest.param(0, SHORT, id="short"), *found]


@pytest.fixture(scope="module")
def calm(backbone, data, adapter_bytes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("calm") / "server"
    return calm_outcomes(backbone, data, folder, adapter_bytes)


@pytest.fixture
def simulate(backbone, data, calm, adapter_bytes, tmp_path):
    """Runs a simulation, and returns the sizes that its engines had; a failure shows what is needed
    to repeat it."""

    def run(seed, operations, **options):
        with pytest.MonkeyPatch.context() as monkeypatch:
            arguments = backbone, data, calm, adapter_bytes, tmp_path, monkeypatch
            simulation = Simulation(seed, *arguments, **options)
            try:
                simulation.run(operations)
            except BaseException:
                print(f"seed {seed!r}, operation {simulation.operations}; the last operations:")
                print("\n".join(simulation.history), f"\nsaid: {simulation.said[-5:]}")
                traceback.print_exc()
                raise
            finally:
                simulation.close()
        return simulation.sizes

    return run


def test_measured_tasks_are_best_before_their_end_and_stop_early(calm):
    """So that the simulation tells the best adapter from the last one."""
    best, patient = calm["best", 4], calm["patient", MOST_STEPS]
    assert (best.step, best.held_out[1]) == (4, 1)
    assert (patient.step, patient.held_out[1]) == (3, 1)
    assert best.adapter == calm["best", 1].adapter != patient.adapter
    assert best.adapter != calm["best", MOST_STEPS].adapter


@pytest.mark.parametrize(("episode", "operations"), episodes())
def test_random_operations_lose_nothing(episode, operations, simulate):
    variant = VARIANTS[episode % len(VARIANTS)]
    sizes = simulate(f"{SEED}/{episode}", operations, **variant)
    if "elastic" in variant:
        (places, _) = ELASTIC_POOLS[0]
        assert {1, places} <= {size.slots for size in sizes}
        assert {1, 2} == {size.rows for size in sizes}
