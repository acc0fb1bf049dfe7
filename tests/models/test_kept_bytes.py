"""The bytes kept for the backward pass are those of the values that the remat policy names."""

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from jaxmux.data import Microbatch
from jaxmux.models import Backbone, BackboneConfig, ForwardOptions, SlotTable, kept_bytes
from jaxmux.peft import empty_pool

WIDTH, WIDE, LAYERS = 32, 96, 2
CONFIG = BackboneConfig("LlamaForCausalLM", 128, WIDTH, WIDE, LAYERS, 4, 2, 8)
MODULES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj")
TOKENS, RANK = 512, 4


@pytest.fixture(scope="module")
def inputs():
    shape = (4, 128)
    integers = jax.ShapeDtypeStruct(shape, jnp.int32)
    microbatch = Microbatch(
        integers,
        integers,
        jax.ShapeDtypeStruct(shape, jnp.float32),
        integers,
        integers,
        jax.ShapeDtypeStruct(shape, jnp.uint32),
        jax.ShapeDtypeStruct((8,), jnp.int32),
    )
    weights = Backbone.random(CONFIG).weights
    slots = SlotTable(*(jnp.zeros(2, dtype) for dtype in (jnp.float32, jnp.float32, jnp.uint32)))
    return CONFIG, weights, {"lora": empty_pool(CONFIG, MODULES, 2, RANK)}, microbatch, slots


def kept(inputs, policy: str, unroll: bool) -> int:
    config, *arrays = inputs
    options = ForwardOptions("xla", remat=policy, unroll=unroll, max_sequences=2)
    return kept_bytes(config, options, *arrays)


@pytest.mark.long
@pytest.mark.parametrize(
    "unroll", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["scan", "unrolled"]
)
def test_kept_bytes_are_those_of_the_named_values(inputs, unroll):
    stream, wide, low = 4 * TOKENS * WIDTH, 4 * TOKENS * WIDE, 4 * TOKENS * RANK
    # "full" keeps the layer's input. "lean" adds the stream between attention and MLP, the output
    # of attention, q, k and v (k and v have half of q's width), and one rank-r intermediate per
    # module. "dots" adds gate and up, and "norms" the two norms.
    assert kept(inputs, "full", unroll) == stream
    assert kept(inputs, "lean", unroll) == 5 * stream + len(MODULES) * low
    assert kept(inputs, "dots", unroll) == 5 * stream + 2 * wide + len(MODULES) * low
    assert kept(inputs, "norms", unroll) == 7 * stream + 2 * wide + len(MODULES) * low
    assert kept(inputs, "none", unroll) > kept(inputs, "norms", unroll)


@pytest.mark.long
@pytest.mark.parametrize(
    "policy", ["dots", *(pytest.param(name, marks=pytest.mark.slow) for name in ("norms", "lean"))]
)
def test_cudnn_keeps_its_output_once(inputs, policy, monkeypatch):
    # Nothing runs, so no cuDNN is needed.
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda _: None)
    config, weights, *others = inputs
    half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), weights)
    plain, cudnn = (
        kept_bytes(config, ForwardOptions(attention, remat=policy, max_sequences=1), half, *others)
        for attention in ("xla", "cudnn")
    )
    # Besides the values of the policy, cuDNN keeps a float32 statistic per token and head.
    assert cudnn == plain + 4 * TOKENS * config.num_heads
