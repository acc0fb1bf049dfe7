"""Sizes of backbones for tests of the cost models."""

from jaxmux.planner.costs.device_profile import BackboneSize, PackedBytes


def llama_8b() -> BackboneSize:
    """Those of Llama-3.1-8B in bfloat16."""
    d, kv, f = 4096, 1024, 14336
    linears = {
        "q_proj": (d, d),
        "k_proj": (d, kv),
        "v_proj": (d, kv),
        "o_proj": (d, d),
        "gate_proj": (d, f),
        "up_proj": (d, f),
        "down_proj": (f, d),
    }
    weights = 2 * sum(k * n for k, n in linears.values())
    outside, packed = 4 * 128256 * d, PackedBytes.of(32, 8, 128, itemsize=2)
    return BackboneSize("Llama", 32, d, 128256, linears, weights, outside, 2, {}, 2**29, packed)
