"""The time of fused adapters: its formula, and the fit of its coefficients."""

import numpy as np
import pytest
from true_costs import TRUE_ADAPTERS

from jaxmux.planner.costs.time_model import AdapterLoad, AdapterTimes, fit_adapter_times


def utilisation(times: AdapterTimes, load: AdapterLoad) -> float:
    """u_a of the largest task: the fraction of the device that its adapters keep busy alone."""
    alone = load._replace(tokens=(max(load.tokens),))
    taken = times.seconds(alone)
    return 1 - times.floor / taken if taken else 1.0


@pytest.mark.parametrize("seed", range(5))
def test_adapter_fit_recovers_its_coefficients(seed):
    rng = np.random.default_rng(seed)
    true = AdapterTimes(*rng.uniform(0.5, 2, 8) * np.array(TRUE_ADAPTERS))
    loads = [
        AdapterLoad(
            tuple(rng.integers(64, 8192, rng.integers(1, 6))),
            int(rng.integers(6, 32)),
            int(rng.integers(4, 128)),
            int(2 ** rng.integers(6, 10)),
            bool(rng.integers(2)),
        )
        for _ in range(60)
    ]
    seconds = [true.seconds(load) for load in loads]
    found = fit_adapter_times(loads, seconds, [1.0] * len(loads))
    np.testing.assert_allclose(found, true, rtol=1e-4)


def test_fused_adapters_are_bound_by_their_sum_or_by_the_longest():
    times = AdapterTimes(10.0, 0, 1.0, 0, 0, 0, 0, 0)
    load = AdapterLoad((1, 5), 2, 8, 64, False)
    assert times.seconds(load) == 15  # Bound by the longest alone, because of its floor.
    assert times.seconds(load._replace(tokens=(100, 50))) == 150
    assert utilisation(times, load._replace(tokens=(10,))) == 0.5
    assert times.seconds(load._replace(tokens=())) == 0
