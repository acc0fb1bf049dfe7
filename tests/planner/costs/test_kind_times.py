"""The time of adapter kinds other than LoRA, beside sums that are counted here."""

import pytest

from jaxmux.planner.costs import h200
from jaxmux.planner.costs.cost_models import estimated_memory, estimated_times
from jaxmux.planner.costs.device_profile import BackboneSize, PackedBytes
from jaxmux.planner.costs.pool_spec import KindSize, PointSize, PoolSpec
from jaxmux.planner.packing import ShapeClass

LAYERS, D, F = 8, 4096, 14336
BACKBONE = BackboneSize(
    name="LlamaForCausalLM",
    layers=LAYERS,
    hidden_size=D,
    vocab_size=128256,
    linears={
        **{f"self_attn.{m}_proj": (D, n) for m, n in (("q", D), ("k", 1024), ("v", 1024))},
        **{"self_attn.o_proj": (D, D), "mlp.gate_proj": (D, F), "mlp.up_proj": (D, F)},
        "mlp.down_proj": (F, D),
    },
    layer_bytes=436 * 10**6,
    outside_bytes=2 * 10**9,
    stream_bytes=2,
    kept={},
    head_block_bytes=2**30,
    packed=PackedBytes.of(4, 2, 64, itemsize=2),
)
SHAPE = ShapeClass(4, 2048, 128, 1)
LORA = PoolSpec(4, 16, tuple(BACKBONE.linears))
TIMES = estimated_times(BACKBONE)
FULL = [(2048.0,) * 4]


def beside(*points: PointSize, rank: int = 64) -> PoolSpec:
    return LORA._replace(others=(KindSize("toy", rank, points),))


def longer(pool: PoolSpec, shape: ShapeClass = SHAPE) -> float:
    return TIMES.round(shape, FULL, pool) - TIMES.round(shape, FULL, LORA)


def test_a_mixed_round_takes_longer_by_the_flops_of_the_kind():
    flops, rest = 4 * D * LAYERS, 10**6
    pool = beside(PointSize("mlp", 0, 0, flops_per_rank=flops, flops=rest))
    # A frozen layer computes four FLOPs a weight, in forward and backward pass together.
    weights = sum(k * n for k, n in BACKBONE.linears.values())
    seconds_of_flop = TIMES.base(8192) * LAYERS / (4 * weights * LAYERS * 8192)
    assert longer(pool) == pytest.approx(3 * 8192 * (64 * flops + rest) * seconds_of_flop)
    # Most of a layer's time are these FLOPs, so a FLOP takes nearly as long as on the device.
    assert seconds_of_flop == pytest.approx(1 / h200.FLOPS, rel=0.25)


def test_bytes_of_the_stream_take_the_time_of_the_devices_memory():
    pool = beside(PointSize("mlp", 0, 0, moved=3 * D * LAYERS))
    of_memory = 3 * 8192 * 2 * 3 * D * LAYERS / h200.BYTES_PER_SECOND
    assert longer(pool) == pytest.approx(of_memory, rel=0.25)


def test_every_chunk_copies_the_values_of_its_task():
    pool = beside(PointSize("mlp", 2 * D * LAYERS, 0, frozen=64))
    short, long = (longer(pool, ShapeClass(4, 2048, chunk, 1)) for chunk in (128, 1024))
    # The update of more values takes its time in any shape.
    update = TIMES.pool_update(pool) - TIMES.pool_update(LORA)
    assert update > 0 and short - update == pytest.approx(8 * (long - update))


def test_all_chunks_pay_whoever_owns_them():
    pool = beside(PointSize("mlp", 0, 0, flops_per_rank=D))
    half = [(1024.0,) * 4]
    of_half = TIMES.round(SHAPE, half, pool) - TIMES.round(SHAPE, half, LORA)
    assert of_half == pytest.approx(longer(pool))


def test_the_backward_pass_takes_twice_the_forward_pass():
    pool = beside(PointSize("mlp", 0, 0, flops_per_rank=D, moved=D))
    mixed, alone = (TIMES.layer(SHAPE, FULL[0], own) for own in (pool, LORA))
    forward, backward = mixed.forward - alone.forward, mixed.backward - alone.backward
    assert backward == pytest.approx(2 * forward) and forward > 0


def test_work_takes_no_memory():
    memory = estimated_memory(BACKBONE)
    values = PointSize("mlp", 8 * D, D)
    busy = values._replace(flops_per_rank=10**9, flops=10**9, moved=10**9)
    assert longer(beside(busy)) > longer(beside(values))
    peaks = {memory.peak(SHAPE, beside(own), "dots") for own in (values, busy)}
    assert peaks == {memory.peak(SHAPE, beside(values), "dots")}
    assert memory.resident(beside(busy)) > memory.resident(LORA)
