"""The remat policy changes the memory of a step, not its result; neither do halves of a microbatch
that take turns in every layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmux.data import Microbatch
from jaxmux.models import (
    REMAT_POLICIES,
    Backbone,
    BackboneConfig,
    ForwardOptions,
    SlotTable,
    TokenLosses,
    chunk_losses,
    head_kernel,
    hidden_states,
)
from jaxmux.models import forward as forward_module
from jaxmux.peft import empty_pool

CONFIG = BackboneConfig("LlamaForCausalLM", 128, 32, 96, 2, 4, 2, 8)
ROWS, ROW_LEN, SLOTS, RANK = 4, 128, 2, 4
# One module of attention and one of the MLP; more would only take longer to compile.
MODULES = ("self_attn.q_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    shape = (ROWS, ROW_LEN)
    microbatch = Microbatch(
        tokens=rng.integers(128, size=shape).astype(np.int32),
        targets=rng.integers(128, size=shape).astype(np.int32),
        loss_weight=rng.random(shape).astype(np.float32),
        positions=np.tile(np.arange(64, dtype=np.int32), (ROWS, 2)),
        segment_ids=np.repeat(np.arange(2, dtype=np.int32), 64)[None].repeat(ROWS, 0),
        sample_id=np.zeros(shape, np.uint32),
        chunk_slot=np.asarray([0, 1, 0, -1, 1, 1, 0, 0], np.int32),
    )
    factors = jax.tree.map(
        lambda x: jnp.asarray(0.1 * rng.standard_normal(x.shape), jnp.float32),
        empty_pool(CONFIG, MODULES, SLOTS, RANK),
    )
    slots = SlotTable(jnp.ones(SLOTS), jnp.asarray([0.1, 0.0]), jnp.asarray([3, 4], jnp.uint32))
    return Backbone.random(CONFIG).weights, {"lora": factors}, microbatch, slots


# By case, the policy, whether all layers are compiled, and whether halves take turns.
MIXED = ("lean", "full")
CASES = {remat: (remat, False, False) for remat in REMAT_POLICIES}
CASES |= {"dots, unrolled": ("dots", True, False), "mixed": (MIXED, False, False)}
CASES |= {"mixed, in turns": (MIXED, False, True), "mixed, unrolled": (MIXED, True, True)}
# Trainings of tests/engine scan their layers.
IN_CI = ("mixed, unrolled",)


@pytest.fixture(scope="module")
def compiled(inputs):
    """A function of a case that returns the compiled gradient step."""

    def step(remat, unroll=False):
        options = ForwardOptions("xla", remat=remat, unroll=unroll, dropout=True, max_sequences=2)

        def gradients(weights, factors, microbatch, slots):
            def losses_of(sums):
                hidden, sums, _ = hidden_states(
                    CONFIG, weights, factors, sums, microbatch, slots, options
                )
                losses = chunk_losses(
                    hidden,
                    head_kernel(weights),
                    microbatch.targets.reshape(-1),
                    TokenLosses.cross_entropy(microbatch.loss_weight.reshape(-1)),
                    microbatch.chunk_slot,
                )
                return losses, sums

            zeros = jax.tree.map(jnp.zeros_like, factors)
            (losses, _), backward = jax.vjp(losses_of, zeros)
            return backward((jnp.ones_like(losses), zeros))[0], losses

        return jax.jit(gradients).lower(*inputs).compile()

    @functools.cache
    def compiled(case: str):
        remat, unroll, in_turns = CASES[case]
        with pytest.MonkeyPatch.context() as patch:
            if in_turns:
                patch.setattr(forward_module, "sums_run_beside_kernels", lambda devices: True)
            return step(remat, unroll)

    return compiled


@pytest.fixture(scope="module")
def expected(inputs, compiled):
    return compiled("none")(*inputs)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow)
        for name in CASES
        if name != "none"
    ],
)
def test_losses_and_gradients_do_not_depend_on_the_policy(name, inputs, compiled, expected):
    gradients, losses = compiled(name)(*inputs)
    np.testing.assert_allclose(losses, expected[1], rtol=1e-6)
    for gradient, wanted in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(expected[0]), strict=True
    ):
        assert np.any(wanted)
        error = np.linalg.norm(gradient - wanted) / np.linalg.norm(wanted)
        assert error < 1e-6


@pytest.mark.slow
def test_each_policy_keeps_less_than_the_one_before(compiled):
    none, norms, dots, lean, full = (
        compiled(remat).memory_analysis().temp_size_in_bytes for remat in REMAT_POLICIES
    )
    assert full < lean < dots < norms < none


def test_an_unknown_policy_is_refused_by_name(inputs):
    weights, _, microbatch, slots = inputs
    with pytest.raises(ValueError, match="'some'; known: none, norms, dots, lean, full"):
        options = ForwardOptions("xla", remat="some")
        hidden_states(CONFIG, weights, {"lora": {}}, None, microbatch, slots, options)


def test_a_policy_for_each_layer_or_one_for_all(inputs):
    weights, _, microbatch, slots = inputs
    with pytest.raises(ValueError, match="3 remat policies for 2 layers"):
        options = ForwardOptions("xla", remat=("dots", "lean", "full"))
        hidden_states(CONFIG, weights, {"lora": {}}, None, microbatch, slots, options)
