"""The time model recovers the times that its profile is made of."""

import dataclasses
import functools
import math

import numpy as np
import pytest
from packings import muxtune_shape
from research.replicas import ModelledSequenceCosts
from true_costs import TRUE_ADAPTERS

from jaxmux.planner import PlanningError
from jaxmux.planner.costs.device_profile import (
    AttentionPoint,
    BackboneSize,
    CollectivePoint,
    HeadPoint,
    LayerPoint,
    Measurement,
    PackedBytes,
    Profile,
    ProfileError,
    RoundPoint,
    UpdatePoint,
)
from jaxmux.planner.costs.fitting import fit_time_model
from jaxmux.planner.costs.h200 import DECODED_PER_SECOND, FLOAT8_SAVING, linear_seconds
from jaxmux.planner.costs.memory_model import MemoryModel, OnlineFit
from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.costs.replica_costs import ReplicaCosts
from jaxmux.planner.costs.time_model import AdapterLoad, AdapterTimes
from jaxmux.planner.devices import Replica
from jaxmux.planner.packing import ShapeClass
from jaxmux.planner.packing.shape_choice import ShapeRequest, choose_shape
from jaxmux.planner.replicas.cost_table import tabulate_costs

BACKBONE = BackboneSize(
    name="LlamaForCausalLM",
    layers=32,
    hidden_size=4096,
    vocab_size=128256,
    linears={"q_proj": (4096, 4096), "up_proj": (4096, 14336)},
    layer_bytes=436 * 10**6,
    outside_bytes=2 * 10**9,
    stream_bytes=2,
    kept={"dots": (130e3, 14.0), "lean": (60e3, 14.0), "full": (8e3, 0.0)},
    head_block_bytes=2**30,
    packed=PackedBytes.of(4, 2, 64, itemsize=2),
)
RECOMPUTED = {"dots": 0.0, "lean": 0.2, "full": 0.5}
ROUND_OVERHEAD = 2e-3
EMPTY_SHARE = 0.3


def attention_per_token(row_len: int, max_sequences: int) -> float:
    packed = 2e-12 * max_sequences * row_len + 10e-9 if max_sequences > 1 else 0
    return 20e-9 + 0.05e-9 * row_len + packed


def true_layer(point: LayerPoint) -> float:
    """Seconds of a layer in the profile of these tests."""
    owned = point.tokens * (1 - point.padding)
    base = 0.2e-3 + 1.2e-6 * (owned + EMPTY_SHARE * (point.tokens - owned))
    rows = attention_per_token(point.row_len, 1) - attention_per_token(512, 1)
    tokens = (owned / point.tasks,) * point.tasks if point.rank else ()
    load = AdapterLoad(tokens, point.slots, point.rank, point.chunk_len, point.dropout)
    adapted = base + TRUE_ADAPTERS.seconds(load)
    if not point.backward:
        return 0.45 * adapted
    return adapted + point.tokens * rows + RECOMPUTED[point.remat] * base


def plentiful_memory() -> MemoryModel:
    return MemoryModel(BACKBONE, 2**50, OnlineFit.of_features(3), math.inf)


def layer_point(tokens=8192, rank=16, tasks=4, slots=4, **changes) -> LayerPoint:
    point = LayerPoint(3, tokens, 512, 128, 1, slots, rank, tasks, "dots", False, True)
    return dataclasses.replace(point, **changes)


def layer_points() -> list[LayerPoint]:
    sizes = (512, 2048, 8192, 16384)
    return [
        *(layer_point(n, rank=0, tasks=1, slots=1) for n in sizes),
        *(layer_point(n, tasks=tasks) for n in sizes for tasks in (1, 4)),
        *(layer_point(slots=16, tasks=tasks) for tasks in (1, 16)),
        *(layer_point(rank=64, tasks=tasks) for tasks in (1, 4)),
        layer_point(chunk_len=512),
        layer_point(dropout=True),
        layer_point(padding=0.5),
        layer_point(row_len=8192),
        layer_point(remat="lean"),
        layer_point(remat="full"),
        layer_point(backward=False),
    ]


@pytest.fixture(scope="module")
def profile() -> Profile:
    attention = [
        AttentionPoint(8192, row_len, 128, sequences, backward)
        for row_len in (128, 512, 2048, 8192)
        for sequences in (1, 4, 16)
        for backward in (False, True)
    ]
    psum = [CollectivePoint("psum", "inner", 2, size) for size in (2**20, 2**26)]
    permute = [CollectivePoint("ppermute", "inner", 2, size) for size in (2**20, 2**26)]
    parameters = 3 * 4 * 16 * BACKBONE.adapter_width
    layers = [Measurement(point, true_layer(point)) for point in layer_points()]
    update, head = 1e-3 + 8e-12 * parameters, 1e-3 + 2e-6 * 8192
    in_layers = 3 * true_layer(layer_point())
    return Profile(
        "test",
        140 * 10**9,
        "bfloat16",
        {},
        BACKBONE,
        (
            *layers,
            *(
                Measurement(
                    p,
                    p.tokens
                    * attention_per_token(p.row_len, p.max_sequences)
                    * (1 if p.backward else 0.3),
                )
                for p in attention
            ),
            *(Measurement(HeadPoint(n), 1e-3 + 2e-6 * n) for n in (512, 8192, 16384)),
            *(Measurement(UpdatePoint(n, 4, "adamw"), 1e-3 + 8e-12 * n) for n in (10**7, 10**8)),
            Measurement(
                RoundPoint(3, 8192, 512, 128, 1, 4, 16, 4),
                in_layers + update + head + ROUND_OVERHEAD,
            ),
            *(Measurement(p, 2e-5 + p.payload_bytes / 2e11) for p in psum),
            *(Measurement(p, 1e-5 + p.payload_bytes / 4e11) for p in permute),
        ),
    )


@pytest.fixture(scope="module")
def model(profile):
    return fit_time_model(profile)


@pytest.fixture(scope="module")
def frozen(model):
    """The time model of the backbone without adapters."""
    return dataclasses.replace(model, adapters=AdapterTimes())


def test_fit_explains_every_measured_layer(model, frozen):
    for point in layer_points():
        tokens = (point.tokens * (1 - point.padding) / point.tasks,) * point.tasks
        shape = ShapeClass(point.tokens // point.row_len, point.row_len, point.chunk_len, 1)
        pool = PoolSpec(point.slots, point.rank, dropout=point.dropout)
        of_point = model if point.rank else frozen
        passes = of_point.layer(shape, tokens, pool, point.remat, total=point.tokens)
        found = passes.total if point.backward else passes.forward
        assert found == pytest.approx(true_layer(point), rel=5e-3), point


@pytest.mark.parametrize("remat", ["dots", "lean", "full"])
@pytest.mark.parametrize(
    ("tokens", "row_len", "tasks", "rank"),
    [(4096, 256, 2, 16), (6144, 2048, 3, 32), (12288, 4096, 3, 8), (8192, 1024, 8, 48)],
)
def test_prediction_holds_at_shapes_that_were_not_measured(
    model, tokens, row_len, tasks, rank, remat
):
    shape = ShapeClass(tokens // row_len, row_len, 128, 1)
    point = layer_point(tokens, rank, tasks, tasks, row_len=row_len, remat=remat)
    update = 1e-3 + 8e-12 * 32 * tasks * rank * BACKBONE.adapter_width
    microbatch = 32 * true_layer(point) + 1e-3 + 2e-6 * tokens
    expected = 2 * microbatch + update + ROUND_OVERHEAD
    found = model.predict(shape, tasks, rank, microbatches=2, remat=remat)
    assert found == pytest.approx(expected, rel=0.01)


def test_no_time_is_negative_however_noisy_the_profile_is(profile, model):
    """Where attention, or the forward pass alone, seems to take longer than the whole layer."""

    def noisy(m: Measurement) -> Measurement:
        attention = isinstance(m.point, AttentionPoint) and m.point.row_len == 512
        forward = isinstance(m.point, LayerPoint) and not m.point.backward
        return m._replace(seconds=m.seconds * (1000 if attention else 10 if forward else 1))

    noise = fit_time_model(
        dataclasses.replace(profile, measurements=tuple(map(noisy, profile.measurements)))
    )
    for times in (noise, dataclasses.replace(model, recompute={"dots": 0.0, "lean": -2.0})):
        for shape in (ShapeClass(8, 128, 128, 1), ShapeClass(4, 512, 128, 4)):
            for tokens in ((), (float(shape.tokens),)):
                for remat in ("dots", "lean"):
                    found = times.layer(shape, tokens, PoolSpec(1, 16), remat, total=shape.tokens)
                    assert min(found) >= 0 and found.total > 0


def test_more_work_never_takes_less_time(model):
    pool = PoolSpec(8, 16)
    shapes = [ShapeClass(rows, 512, 128, 1) for rows in range(1, 50)]
    times = [model.microbatch(shape, (shape.tokens / 2,) * 2, pool) for shape in shapes]
    assert times == sorted(times)
    ranks = [model.predict(shapes[15], 4, rank) for rank in range(1, 100, 7)]
    assert ranks == sorted(ranks)


def test_padding_takes_the_measured_part_of_the_backbones_time(model, profile):
    shape, pool = ShapeClass(16, 512, 128, 1), PoolSpec(2, 16)
    empty, half, full = (model.microbatch(shape, t, pool) for t in ((), (4096,), (4096, 4096)))
    assert empty < half < full
    all_empty = layer_point(rank=0, padding=1.0)
    assert empty == pytest.approx(32 * true_layer(all_empty) + 1e-3 + 2e-6 * 8192)
    measured = tuple(m for m in profile.measurements if not getattr(m.point, "padding", 0))
    unaware = fit_time_model(dataclasses.replace(profile, measurements=measured))
    none_skipped = 32 * true_layer(layer_point(rank=0)) + 1e-3 + 2e-6 * 8192
    assert unaware.microbatch(shape, (), pool) == pytest.approx(none_skipped)


def test_layers_under_several_policies_add_up(model):
    shape, tokens, pool = ShapeClass(16, 512, 128, 1), (8192,), PoolSpec(1, 16)
    mixed = model.microbatch(shape, tokens, pool, ("dots",) * 16 + ("full",) * 16)
    halves = [model.microbatch(shape, tokens, pool, remat) for remat in ("dots", "full")]
    assert mixed == pytest.approx(sum(halves) / 2)
    with pytest.raises(PlanningError, match="3 policies for 32 layers"):
        model.microbatch(shape, tokens, pool, ("dots",) * 3)


@pytest.mark.parametrize(("row_len", "max_sequences"), [(512, 1), (1024, 4), (2048, 9), (8192, 64)])
def test_every_sequence_that_a_row_has_room_for_takes_time(model, row_len, max_sequences):
    expected = attention_per_token(row_len, max_sequences)
    assert model.attention(row_len, max_sequences) == pytest.approx(expected)
    assert model.attention_forward(row_len, max_sequences) == pytest.approx(0.3 * expected)


def test_layer_time_is_that_of_equation_3(model):
    tokens = (4096, 2048)
    passes = model.layer(ShapeClass(1, 512, 128, 1), tokens, PoolSpec(2, 16), tp=2)
    base = (0.2e-3 + 1.2e-6 * 6144) / 2
    adapters = TRUE_ADAPTERS.seconds(AdapterLoad(tokens, 2, 16, 128, False))
    assert passes.total == pytest.approx(base + adapters, rel=0.01)


def test_stages_have_their_layers_with_all_reduces_and_the_last_one_the_head(model):
    shape, pool = ShapeClass(12, 512, 128, 1), PoolSpec(2, 16)
    costs = ReplicaCosts(model, plentiful_memory(), pool, Replica.uniform(pp=4, tp=2), "dots")
    layer = model.layer(shape, (6144,), pool, tp=2).total
    all_reduce = 2e-5 + 6144 * BACKBONE.hidden_size * BACKBONE.stream_bytes / 2e11
    head = (1e-3 + 2e-6 * 6144) / 2
    expected = np.array(BACKBONE.stage_layers(costs.replica)) * (layer + 4 * all_reduce)
    expected[-1] += head
    assert sum(costs.stages(shape)) == pytest.approx(expected)


def test_one_stage_takes_the_time_of_a_microbatch(model):
    shape, pool = ShapeClass(16, 512, 128, 1), PoolSpec(1, 16)
    costs = ReplicaCosts(model, plentiful_memory(), pool, Replica(), "dots")
    assert costs.microbatch(shape) == pytest.approx(model.microbatch(shape, (8192,), pool))
    half_empty = model.microbatch(shape, (4096,), pool)
    assert costs.microbatch(shape, owned=4096) == pytest.approx(half_empty)


def test_shape_choice_takes_the_model_as_its_cost(model):
    pool = PoolSpec(2, 16)

    def seconds(shape: ShapeClass, owned: float) -> float:
        return model.microbatch(shape, (owned / 2,) * 2, pool)

    rounds = [{0: [100, 300, 250], 1: [90, 511]}]
    best = choose_shape(rounds, ShapeRequest(2048), seconds)
    assert best.seconds < best.microbatches * seconds(best.shape, best.shape.tokens)
    assert best.seconds <= muxtune_shape(rounds, ShapeRequest(2048), seconds).seconds


def test_replicas_take_longer_sequences_and_more_devices_into_account(model):
    working = OnlineFit.of_features(3).observe(np.array([1.0, 8192, 8192 * 512]), 3e9)
    memory = MemoryModel(BACKBONE, 30 * 10**9, working, math.inf)
    replicas = ModelledSequenceCosts(model, memory, PoolSpec(4, 16))
    one, two, deep = Replica(), Replica.uniform(tp=2), Replica.uniform(pp=2)
    costs = tabulate_costs([one, two, deep], [512, 2048, 8192], replicas)
    assert (np.diff(costs.per_sequence) > 0).all()
    assert (costs.per_sequence[0] > costs.per_sequence[1:]).all()
    # Two devices that share a layer exchange its stream, and adapters are not divided (MuxTune
    # Eq. 3).
    assert (costs.per_sequence[1] > costs.per_sequence[0] / 2).all()
    assert costs.constant[2] > costs.constant[0] - replicas.constant_seconds(one) / 2
    longest = [replicas.longest(configuration) for configuration in (one, two)]
    assert longest[0] < longest[1]
    with pytest.raises(ProfileError, match=r"no psum over 4 devices .* measured: psum over 2"):
        replicas.sequence_seconds(Replica.uniform(tp=4), 512)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, s: m.predict(s, 1, 8, remat="some"), "no remat policy 'some'; known: dots"),
        (lambda m, s: m.round(s, [(512,)], PoolSpec(1, 8, optimizer="sgd")), "no update of 'sgd'"),
        (
            lambda m, s: m.microbatch(s, (512,), PoolSpec(1, 8, ("lm_head",))),
            "'lm_head' is no linear",
        ),
    ],
)
def test_unknown_choices_are_named(model, call, message):
    with pytest.raises(PlanningError, match=message):
        call(model, ShapeClass(1, 512, 128, 1))


@pytest.mark.parametrize(
    ("lacks", "message"),
    [
        (lambda p: isinstance(p, LayerPoint) and not p.rank, r"frozen \(rank 0\)"),
        (lambda p: isinstance(p, LayerPoint) and p.rank, r"adapted \(rank > 0\)"),
        (lambda p: isinstance(p, HeadPoint), "'head'"),
        (lambda p: isinstance(p, AttentionPoint), "'attention'"),
    ],
)
def test_incomplete_profile_is_refused(profile, lacks, message):
    kept = tuple(m for m in profile.measurements if not lacks(m.point))
    with pytest.raises(ProfileError, match=message):
        fit_time_model(dataclasses.replace(profile, measurements=kept))


def test_adapters_of_some_modules_cost_their_share(model, frozen):
    shape, layer = ShapeClass(16, 512, 128, 1), functools.partial(model.layer, tokens=(8192,))
    bare = frozen.layer(shape, (8192,), PoolSpec(1, 16)).total
    all_of_them = layer(shape, pool=PoolSpec(1, 16)).total - bare
    some = layer(shape, pool=PoolSpec(1, 16, ("q_proj",))).total - bare
    assert some == pytest.approx(all_of_them * 8192 / (8192 + 18432))


def test_formats_of_weights_take_time_to_decode_or_save_some(model):
    shape, pool = ShapeClass(16, 512, 128, 1), PoolSpec(4, 16)

    def seconds(backbone_format=None, remat="dots"):
        backbone = dataclasses.replace(model.backbone, backbone_format=backbone_format)
        changed = dataclasses.replace(model, backbone=backbone)
        return changed.layer(shape, (2048,) * 4, pool, remat)

    plain, nf4, whole = seconds(), seconds("nf4"), seconds("nf4", "full")
    decoding = nf4.forward - plain.forward
    # Every linear is decoded in both passes, and once more where its product is recomputed.
    assert decoding == pytest.approx((4096 * 4096 + 4096 * 14336) / DECODED_PER_SECOND["nf4"])
    assert nf4.backward - plain.backward == pytest.approx(decoding)
    assert whole.backward - seconds(None, "full").backward == pytest.approx(2 * decoding)
    assert seconds("int8").total < nf4.total
    weights = 4096 * 4096 + 4096 * 14336
    saved = FLOAT8_SAVING * 2 * linear_seconds(8192, weights)
    assert plain.total - seconds("float8").total == pytest.approx(saved)
