"""The work that adapter kinds state, beside what XLA counts in the compiled op."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmux.models import BackboneConfig
from jaxmux.peft import IA3, Bottleneck, DiffPruning, LNTuning, LoRA, kind_of, size_of_adapter

LAYERS, CHUNKS, TOKENS = 3, 2, 64
CONFIG = BackboneConfig(
    architecture="LlamaForCausalLM",
    vocab_size=64,
    hidden_size=128,
    intermediate_size=256,
    num_layers=LAYERS,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rope_theta=10000.0,
)


def chunks(*shape: int) -> jax.Array:
    return jnp.ones((CHUNKS, TOKENS, *shape))


def counted(spec, method: str, point: str, *streams: jax.Array, **numbers) -> float:
    """FLOPs of a token in one layer, by XLA."""
    kind = kind_of(spec)
    specs = kind.leaves(CONFIG, [point], CHUNKS, kind.rank(spec))[point.split("/")[0]]
    own = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), specs)
    op = getattr(kind.op, method)
    lowered = jax.jit(lambda own, *streams: op(own, *streams, **numbers)).lower(own, *streams)
    return lowered.compile().cost_analysis()["flops"] / (CHUNKS * TOKENS)


def stated(spec, point: str) -> float:
    (found,) = (p for p in size_of_adapter(spec, CONFIG).points if p.point == point)
    return (found.flops_per_rank * kind_of(spec).rank(spec) + found.flops) / LAYERS


@pytest.mark.parametrize("size", [32, 64])
def test_a_bottleneck_has_two_products(size):
    spec = Bottleneck(size=size)
    stream = chunks(128)
    found = counted(spec, "block_output", "mlp", stream, stream)
    # Its activations are counted besides: six functions of the middle.
    assert stated(spec, "mlp") == pytest.approx(4 * 128 * size, rel=0.03)
    assert stated(spec, "mlp") == pytest.approx(found, rel=0.25) and found >= 4 * 128 * size


def test_diff_pruning_multiplies_the_features_of_its_mask():
    spec = DiffPruning(columns=48)
    found = counted(
        spec, "linear_output", "self_attn.v_proj", chunks(128), chunks(64), first_column=0
    )
    assert stated(spec, "self_attn.v_proj") == 2 * 48 * 64 == pytest.approx(found, rel=0.1)


def test_factors_take_one_multiplication_a_feature():
    found = counted(IA3(), "linear_input", "mlp.down_proj/input", chunks(256))
    assert stated(IA3(), "mlp.down_proj/input") == 256 == pytest.approx(found, rel=0.01)


def test_a_norm_takes_a_few_operations_a_value():
    stream = chunks(128)
    found = counted(LNTuning(), "norm_output", "input_layernorm", stream, stream, eps=1e-5)
    assert stated(LNTuning(), "input_layernorm") == 5 * 128 == pytest.approx(found, rel=0.25)
    # The norm behind the layers is computed once.
    assert stated(LNTuning(), "norm") == pytest.approx(5 * 128 / LAYERS)


def test_tables_are_adapted_once_and_not_in_every_layer():
    spec = LoRA(16, target_modules=("lm_head", "embed_tokens"))
    found = counted(spec, "logits", "lm_head", chunks(128), chunks(64), first_token=0)
    head, table = (stated(spec, point) * LAYERS for point in ("lm_head", "embed_tokens"))
    # The scale is multiplied besides.
    assert head == 2 * 16 * (128 + 64) == pytest.approx(found, rel=0.05)
    assert table == 2 * 16 * 128


@pytest.mark.parametrize("spec", [IA3(), LNTuning(), Bottleneck(), DiffPruning()])
def test_every_kind_moves_values_of_the_stream(spec):
    work = size_of_adapter(spec, CONFIG).work
    assert work.moved > 0 and np.isfinite(work.flops) and work.flops > 0
