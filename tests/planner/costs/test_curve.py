"""Curves through measurements rise where they should and continue in a line."""

import numpy as np
import pytest

from jaxmux.planner.costs.time_model import Curve


@pytest.mark.parametrize("seed", range(10))
def test_rising_curve_is_monotone_everywhere(seed):
    rng = np.random.default_rng(seed)
    x = np.sort(rng.choice(1000, 6, replace=False)) + 1
    curve = Curve.through(zip(x, x * rng.uniform(0.3, 2, 6), strict=True))
    values = [curve(at) for at in np.linspace(0, 2000, 500)]
    assert np.diff(values).min() >= -1e-9 and min(values) >= 0


def test_curve_goes_through_rising_points_and_continues_in_a_line():
    curve = Curve.through([(4, 10), (1, 1), (2, 4)])
    assert [curve(x) for x in (1, 2, 3, 4)] == [1, 4, 7, 10]
    assert curve(6) == 16
    assert curve(0.5) == 0  # Extrapolation is never negative.
    assert Curve.through([(4, 2)])(8) == 4
    assert Curve.through([(1, 2), (1, 4)])(1) == 3


def test_falling_values_are_averaged_unless_they_are_allowed():
    points = [(1, 1), (2, 5), (3, 3), (4, 6)]
    assert Curve.through(points)(2) == Curve.through(points)(3) == 4
    assert Curve.through(points, rising=False)(2) == 5
