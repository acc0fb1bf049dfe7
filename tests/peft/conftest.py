"""A small backbone shape for the adapter tests."""

import pytest

from jaxmux.models import BackboneConfig


@pytest.fixture(scope="session")
def config() -> BackboneConfig:
    """Every linear of a layer has a shape of its own, except k and v."""
    return BackboneConfig(
        architecture="LlamaForCausalLM",
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=5,
    )
