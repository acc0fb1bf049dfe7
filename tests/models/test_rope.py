"""Rotary embeddings against complex arithmetic, and Llama 3.1's scaling against its description."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmux.models import BackboneConfig
from jaxmux.models.architectures import Llama3Rope
from jaxmux.models.layer import rotary_angles, rotate

# Llama 3.1's values, and a short context in which all three ranges of wavelengths occur for a small
# head.
SCALINGS = {
    "llama 3.1": (128, 500000.0, Llama3Rope(8.0, 1.0, 4.0, 8192)),
    "llama 3.2": (64, 500000.0, Llama3Rope(32.0, 1.0, 4.0, 8192)),
    "short": (16, 10000.0, Llama3Rope(4.0, 1.0, 2.0, 64)),
}


def config(head_dim: int, theta: float, scaling: Llama3Rope | None = None) -> BackboneConfig:
    return BackboneConfig(
        "LlamaForCausalLM", 10, 32, 32, 1, 2, 1, head_dim, rope_theta=theta, rope_scaling=scaling
    )


def llama3_frequency(frequency: float, scaling: Llama3Rope) -> float:
    """Frequencies of short wavelengths are kept, those of long ones are divided by the factor, and
    those in between are interpolated."""
    wavelength = 2 * math.pi / frequency
    context = scaling.original_max_position_embeddings
    if wavelength < context / scaling.high_freq_factor:
        return frequency
    if wavelength > context / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = (context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def assert_angles(c: BackboneConfig, frequencies: list[float]):
    positions = np.asarray([[0, 1, 2], [7, 100, 1000]])
    cos, sin = rotary_angles(c, jnp.asarray(positions))
    angles = positions[..., None] * np.asarray(frequencies)
    # The angle itself is float32: at position 1000 it resolves 6e-5.
    np.testing.assert_allclose(cos, np.cos(angles), atol=2e-4)
    np.testing.assert_allclose(sin, np.sin(angles), atol=2e-4)


@pytest.mark.parametrize(("head_dim", "theta"), [(8, 10000.0), (128, 500000.0)])
def test_frequencies_fall_geometrically(head_dim, theta):
    assert_angles(
        config(head_dim, theta), [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    )


@pytest.mark.parametrize(("head_dim", "theta", "scaling"), SCALINGS.values(), ids=SCALINGS)
def test_llama3_scaling_follows_the_wavelengths(head_dim, theta, scaling):
    plain = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    scaled = [llama3_frequency(f, scaling) for f in plain]
    ratios = np.asarray(scaled) / plain
    assert ratios.min() == pytest.approx(1 / scaling.factor) and ratios.max() == 1
    assert ((ratios > 1 / scaling.factor) & (ratios < 1)).any()
    assert_angles(config(head_dim, theta, scaling), scaled)


def test_rotation_is_complex_multiplication_of_the_two_halves():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 3, 8)).astype(np.float32)
    angles = rng.standard_normal((2, 5, 4)).astype(np.float32)
    found = np.asarray(rotate(jnp.asarray(x), jnp.cos(angles), jnp.sin(angles)))
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)[:, :, None]
    np.testing.assert_allclose(found, np.concatenate([turned.real, turned.imag], -1), atol=1e-5)


def test_scores_depend_on_the_distance_alone():
    c = config(16, 10000.0)
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 16)).astype(np.float32)

    def score(position_q, position_k):
        turned = [
            rotate(jnp.asarray(x), *rotary_angles(c, jnp.asarray([p])))
            for x, p in ((q, position_q), (k, position_k))
        ]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-2)
