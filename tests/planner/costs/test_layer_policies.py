"""Layers and stages share the memory for kept values."""

import numpy as np
import pytest

from jaxmux.planner.costs.memory_model import fill_layers, fill_stages, split_stages


def test_layers_get_the_first_policy_that_fits_and_some_get_the_one_before_it():
    sizes = {"dots": 10, "lean": 6, "full": 1}
    assert fill_layers(sizes, 4, 40) == ("dots",) * 4
    assert fill_layers(sizes, 4, 39) == ("lean",) + ("dots",) * 3
    assert fill_layers(sizes, 4, 24) == ("lean",) * 4
    assert fill_layers(sizes, 4, 23) == ("full",) + ("lean",) * 3
    assert fill_layers(sizes, 4, 3) == ("full",) * 4


@pytest.mark.parametrize("seed", range(20))
def test_the_policies_fit_and_no_further_layer_can_recompute_less(seed):
    rng = np.random.default_rng(seed)
    sizes = dict(zip(("dots", "lean", "full"), sorted(rng.integers(1, 50, 3))[::-1], strict=True))
    layers = int(rng.integers(1, 30))
    room = int(rng.integers(sizes["full"] * layers, 60 * layers))
    policies = fill_layers(sizes, layers, room)
    total = sum(sizes[policy] for policy in policies)
    assert len(policies) == layers and total <= room
    names = list(sizes)
    gains = [sizes[names[names.index(p) - 1]] - sizes[p] for p in policies if p != "dots"]
    assert not gains or total + gains[0] > room or gains[0] == 0


def test_stages_are_filled_alike_and_a_shorter_stage_lacks_layers_that_recompute_most():
    sizes = {"dots": 10, "lean": 6, "full": 1}
    assert fill_stages(sizes, [3, 3, 2], 26) == (
        *("lean", "dots", "dots"),
        *("lean", "dots", "dots"),
        *("dots", "dots"),
    )
    assert fill_stages(sizes, [3, 2], 12) == ("full", "full", "lean", "full", "lean")
    assert fill_stages(sizes, [2, 2], 20) == ("dots",) * 4
    assert fill_stages(sizes, [4], 23) == fill_layers(sizes, 4, 23)
    assert split_stages("aaabbbcc", [3, 3, 2]) == [tuple("aaa"), tuple("bbb"), tuple("cc")]
