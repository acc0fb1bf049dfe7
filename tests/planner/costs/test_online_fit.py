"""The online fit finds the coefficients of a fit to all observations at once."""

import numpy as np
import pytest
from scipy.optimize import nnls

from jaxmux.planner.costs.memory_model import OnlineFit

BETA = np.array([3e7, 9e3, 2.5])


def random_features(rng: np.random.Generator, count: int) -> np.ndarray:
    """1, B · L and B · L² of `count` microbatches of B rows of L tokens."""
    tokens = rng.integers(1, 64, count) * 512
    return np.stack([np.ones(count), tokens, tokens * 2.0 ** rng.integers(6, 14, count)], axis=1)


@pytest.mark.parametrize("seed", range(10))
def test_online_fit_is_the_batch_fit(seed):
    rng = np.random.default_rng(seed)
    x = random_features(rng, 12)
    # With negative signs, some fitted coefficients are zero.
    y = x @ (BETA * rng.choice([-1, 1, 1], 3)) + rng.normal(0, 1e8, 12)
    fit = OnlineFit.of_features(3)
    for i, (row, value) in enumerate(zip(x, y, strict=True), start=1):
        fit = fit.observe(row, value)
        if i >= 6:
            size = np.linalg.norm(x[:i], axis=0)
            batch = nnls(x[:i] / size, y[:i])[0] / size
            np.testing.assert_allclose(
                fit.coefficients(), batch, rtol=1e-5, atol=1e-9 * batch.max()
            )
    assert fit.observations == 12 and (fit.coefficients() >= 0).all()


def test_online_fit_recovers_its_model_and_weighs_observations():
    rng = np.random.default_rng(0)
    fit = OnlineFit.of_features(3)
    for row in random_features(rng, 8):
        fit = fit.observe(row, BETA @ row)
    np.testing.assert_allclose(fit.coefficients(), BETA, rtol=1e-6)
    one = np.ones(1)
    mean = OnlineFit.of_features(1).observe(one, 1.0, weight=3.0).observe(one, 5.0)
    assert mean.coefficients() @ one == pytest.approx(2)


def test_features_that_cannot_be_told_apart_are_of_the_lowest_order():
    fit = OnlineFit.of_features(3)
    for tokens in (512, 1024, 4096):
        fit = fit.observe(np.array([1.0, tokens, tokens * 512]), 100.0 * tokens)
    constant, linear, square = fit.coefficients()
    assert linear == pytest.approx(100, rel=0.02) and square < 0.02 * 100 / 512
    assert OnlineFit.of_features(3).coefficients() @ np.ones(3) == 0
