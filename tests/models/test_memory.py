"""What is kept for the backward pass, beside what the compiler reserves for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmux.data import Microbatch
from jaxmux.models import Backbone, BackboneConfig, ForwardOptions, SlotTable, choose_remat
from jaxmux.models.memory import fill, kept_bytes
from jaxmux.peft import empty_pool

WIDTH, WIDE, LAYERS = 32, 96, 4
CONFIG = BackboneConfig("LlamaForCausalLM", 128, WIDTH, WIDE, LAYERS, 4, 2, 8)
MODULES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
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
    return CONFIG, weights, empty_pool(CONFIG, MODULES, 2, RANK), microbatch, slots


def kept(inputs, policy: str, unroll: bool) -> int:
    config, *arrays = inputs
    options = ForwardOptions("xla", remat=policy, unroll=unroll, max_sequences=2)
    return kept_bytes(config, options, *arrays)


@pytest.mark.parametrize("unroll", [False, True], ids=["scan", "unrolled"])
def test_kept_bytes_are_those_of_the_named_values(inputs, unroll):
    stream, wide, low = 4 * TOKENS * WIDTH, 4 * TOKENS * WIDE, 4 * TOKENS * RANK
    # x; the stream in the middle; attention's output; gate and up; q, k and v of half q's width;
    # an intermediate for each module.
    assert kept(inputs, "full", unroll) == stream
    assert kept(inputs, "lean", unroll) == 3 * stream + wide + len(MODULES) * low
    assert kept(inputs, "dots", unroll) == 5 * stream + 2 * wide + len(MODULES) * low
    assert kept(inputs, "none", unroll) > kept(inputs, "dots", unroll)


def test_layers_get_the_first_policy_that_fits_and_fill_up_with_the_one_before():
    sizes = {"dots": 10, "lean": 6, "full": 1}
    assert fill(sizes, 4, 40) == ("dots",) * 4
    assert fill(sizes, 4, 39) == ("dots",) * 3 + ("lean",)
    assert fill(sizes, 4, 24) == ("lean",) * 4
    assert fill(sizes, 4, 23) == ("lean",) * 3 + ("full",)
    assert fill(sizes, 4, 3) == ("full",) * 4


@pytest.mark.parametrize("seed", range(20))
def test_the_filling_fits_and_one_more_would_not(seed):
    rng = np.random.default_rng(seed)
    sizes = dict(zip(("dots", "lean", "full"), sorted(rng.integers(1, 50, 3))[::-1], strict=True))
    layers = int(rng.integers(1, 30))
    room = int(rng.integers(sizes["full"] * layers, 60 * layers))
    policies = fill(sizes, layers, room)
    total = sum(sizes[policy] for policy in policies)
    assert len(policies) == layers and total <= room
    names = list(sizes)
    gains = [sizes[names[names.index(p) - 1]] - sizes[p] for p in policies if p != "dots"]
    assert not gains or total + gains[-1] > room or gains[-1] == 0


def test_less_memory_recomputes_more(inputs):
    config, *arrays = inputs
    options = ForwardOptions("xla", max_sequences=2)
    chosen = [choose_remat(config, options, *arrays, room) for room in (2**30, 4 * 2**20, 0)]
    assert chosen[0] == ("dots",) * LAYERS and chosen[2] == ("full",) * LAYERS
    assert chosen[1] not in (chosen[0], chosen[2])
