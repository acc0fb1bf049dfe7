"""The remat policies that the engine chooses depend on the memory that it may use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmux.data import Microbatch
from jaxmux.engine.devices.programs import choose_remat
from jaxmux.models import Backbone, BackboneConfig, ForwardOptions, SlotTable
from jaxmux.peft import empty_pool
from tests.engine.conftest import SMALL

CONFIG = BackboneConfig("LlamaForCausalLM", 128, 32, 96, 4, 4, 2, 8)
MODULES = ("self_attn.q_proj", "mlp.down_proj")


pytestmark = pytest.mark.usefixtures("trace_once")


def remat_of(attention: str, max_sequences: int, room: int):
    """The policies chosen for four rows of two tasks."""
    options, shape = ForwardOptions(attention, max_sequences=max_sequences), (4, 256)
    integers = jax.ShapeDtypeStruct(shape, jnp.int32)
    microbatch = Microbatch(
        *(integers, integers, jax.ShapeDtypeStruct(shape, jnp.float32), integers, integers),
        jax.ShapeDtypeStruct(shape, jnp.uint32),
        jax.ShapeDtypeStruct((8,), jnp.int32),
    )
    slots = SlotTable(np.zeros(2, np.float32), np.zeros(2, np.float32), np.zeros(2, np.uint32))
    adapters = {"lora": empty_pool(CONFIG, ("self_attn.q_proj",), 2, 4)}
    return choose_remat(Backbone.random(CONFIG), options, adapters, microbatch, slots, room)


@pytest.mark.long
def test_less_memory_recomputes_more():
    plenty, some, none = (remat_of("xla", 64, room) for room in (2**30, 6 * 2**20, 0))
    assert plenty == ("norms",) * 4 and none == ("full",) * 4
    assert some not in (plenty, none)


@pytest.mark.long
def test_sequences_of_packed_rows_take_memory():
    """The memory of cuDNN's attention is counted, also on a CPU, which does not have it."""

    room = 8 * 2**20
    assert remat_of("cudnn", 1, room) == remat_of("xla", 64, room) == ("norms",) * 4
    assert "norms" not in remat_of("cudnn", 64, room)


def test_an_engine_with_little_memory_recomputes_and_learns_the_same(
    make_engine, make_task, train, backbone
):
    one = make_task("one", steps=2, dropout=0.1)
    adapters = make_engine(one, shape=SMALL, modules=MODULES).state.adapters

    def memory_for(kept: int) -> int:
        """Bytes of memory in which layers may keep about `kept` bytes."""
        weight_bytes, adapter_bytes = (
            sum(array.nbytes for array in jax.tree.leaves(tree))
            for tree in (backbone.weights, adapters)
        )
        return int((weight_bytes + 4 * adapter_bytes + kept) / 0.97)

    rich, poor = (
        make_engine(one, shape=SMALL, modules=MODULES, memory=memory_for(kept))
        for kept in (2**32, 0)
    )
    losses = [[update.loss for update in train(engine)["one"]] for engine in (rich, poor)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert set(rich.remat) == {"norms"} and set(poor.remat) == {"full"}

    # The policies are chosen again once the train state grows.
    poor.register_tasks([make_task("two", steps=1)])
    assert set(poor.remat) == {"full"}
    poor.register_tasks([make_task("three", steps=1, rank=16)])
    assert poor.remat is None
