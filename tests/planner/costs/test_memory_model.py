"""The memory model: its counted parts, its learnt part, and what fits."""

import dataclasses

import numpy as np
import pytest

from jaxmux.planner import PlanningError
from jaxmux.planner.costs.device_profile import (
    AttentionPoint,
    BackboneSize,
    HeadPoint,
    LayerPoint,
    Measurement,
    PackedBytes,
    Profile,
    ProfileError,
)
from jaxmux.planner.costs.fitting import fit_memory_model
from jaxmux.planner.costs.memory_model import USABLE, MemoryModel, split_stages
from jaxmux.planner.costs.pool_spec import KindSize, PointSize, PoolSpec
from jaxmux.planner.devices import Replica
from jaxmux.planner.packing import ShapeClass

GIB = 2**30
BACKBONE = BackboneSize(
    name="LlamaForCausalLM",
    layers=8,
    hidden_size=256,
    vocab_size=1000,
    linears={"q_proj": (256, 256), "up_proj": (256, 512)},
    layer_bytes=GIB // 8,
    outside_bytes=GIB // 4,
    stream_bytes=2,
    kept={"dots": (40000.0, 100.0), "lean": (20000.0, 100.0), "full": (512.0, 0.0)},
    head_block_bytes=GIB // 16,
    packed=PackedBytes.of(4, 2, 64, itemsize=2),
)
WEIGHT_BYTES = 8 * BACKBONE.layer_bytes + BACKBONE.outside_bytes
BETA = np.array([3e7, 9e3, 2.5])
SHAPE, POOL = ShapeClass(8, 512, 128, 1), PoolSpec(4, 16)


def working(rows: int, row_len: int) -> float:
    return float(BETA @ [1, rows * row_len, rows * row_len**2])


def layer(rows: int, row_len: int, remat: str = "dots") -> Measurement:
    tokens = rows * row_len
    point = LayerPoint(2, tokens, row_len, 128, 1, 4, 16, 4, remat, False, True)
    of_token, of_rank = BACKBONE.kept[remat]
    kept = 2 * tokens * (of_token + 16 * of_rank)
    return Measurement(point, 1.0, int(kept + working(rows, row_len)))


@pytest.fixture(scope="module")
def model() -> MemoryModel:
    rows = [(1, 512), (4, 512), (16, 512), (2, 4096), (8, 256)]
    measured = (*(layer(*r) for r in rows), layer(4, 512, "full"))
    return fit_memory_model(Profile("test", 4 * GIB, "bfloat16", {}, BACKBONE, measured))


def test_fit_recovers_the_working_memory(model):
    np.testing.assert_allclose(model.working.coefficients(), BETA, rtol=1e-5)


@pytest.mark.parametrize("remat", ["dots", "lean", "full"])
def test_peak_is_weights_state_kept_values_and_workspace(model, remat):
    parameters = 8 * 4 * 16 * (512 + 768)
    of_token, of_rank = BACKBONE.kept[remat]
    expected = (
        WEIGHT_BYTES + 16 * parameters + 8 * 4096 * (of_token + 16 * of_rank) + working(8, 512)
    )
    assert model.peak(SHAPE, POOL, remat) == pytest.approx(expected, rel=1e-5)


# Bytes of the embedding, and of the head.
END_BYTES = 1000 * 256 * 2


def test_stages_divide_everything_but_the_working_memory(model):
    """Four stages have 3, 2, 2 and 1 layers; the first one also has the embedding."""
    stages = Replica.uniform(pp=4)
    assert BACKBONE.stage_layers(stages) == [3, 2, 2, 1]
    of_layer = GIB / 8 + 16 * 4 * 16 * (512 + 768)
    assert model.resident(POOL, stages) == pytest.approx(3 * of_layer + END_BYTES)
    kept = 3 * model.kept(4096, 16, "dots")
    needed = model.resident(POOL, stages) + working(8, 512)
    for in_flight in (1, 4):
        peak = model.peak(SHAPE, POOL, "dots", stages, in_flight=in_flight)
        assert peak == pytest.approx(needed + in_flight * kept, rel=1e-5)


def test_each_stage_has_a_peak_of_its_own(model):
    """Layers of two policies, and as many microbatches in flight as 1F1B has."""
    stages, policies = Replica.uniform(pp=4), ["full"] * 3 + ["dots"] * 5
    of_layer = GIB / 8 + 16 * 4 * 16 * (512 + 768)
    full, dots = (model.kept(4096, 16, remat) for remat in ("full", "dots"))
    peaks = model.stage_peaks(SHAPE, POOL, policies, stages, (4, 3, 2, 1))
    expected = [
        3 * of_layer + END_BYTES + 4 * 3 * full,
        2 * of_layer + 3 * 2 * dots,
        2 * of_layer + 2 * 2 * dots,
        of_layer + END_BYTES + dots,
    ]
    assert peaks == pytest.approx([own + working(8, 512) for own in expected], rel=1e-5)
    assert max(peaks) <= model.peak(SHAPE, POOL, policies, stages, in_flight=4)


def test_fsdp_divides_the_weights_and_gathers_two_layers(model):
    one, four = (model.resident(POOL, Replica.uniform(fsdp=n)) for n in (1, 4))
    assert one - four == pytest.approx(0.75 * WEIGHT_BYTES - 2 * BACKBONE.layer_bytes)


def test_tensor_parallelism_divides_all_kept_values_but_the_stream_and_the_intermediates(model):
    """Every device keeps the whole stream before and after attention."""
    tokens, rank = 4096, 16
    size = model.backbone
    one, four = (model.kept(tokens, rank, "dots", tp) for tp in (1, 4))
    stream = tokens * 2 * size.hidden_size * size.stream_bytes
    of_rank = tokens * rank * size.kept["dots"][1]
    assert one == pytest.approx(model.kept(tokens, rank, "dots"))
    assert four == pytest.approx(stream + of_rank + (one - stream - of_rank) / 4)
    assert model.kept(tokens, rank, "full", 4) == model.kept(tokens, rank, "full")


def test_every_device_keeps_the_whole_norms_of_the_stream(model):
    """The norms are the inputs of column-parallel linears: two per layer, 256 values of 2 bytes
    each."""
    kept = {"norms": (41024.0, 100.0), **BACKBONE.kept}
    model = dataclasses.replace(model, backbone=dataclasses.replace(BACKBONE, kept=kept))
    for tp in (1, 2, 8):
        norms, dots = (model.kept(4096, 16, remat, tp) for remat in ("norms", "dots"))
        assert norms - dots == pytest.approx(4096 * 2 * 256 * 2)
    assert dots == pytest.approx(4096 * (1024 + (40000 - 1024) / 8 + 16 * 100))


def test_memory_of_uneven_stages_is_that_of_the_fullest(model):
    """Eight layers on three stages are 3, 3 and 2."""
    # Both devices have the factors beside the inputs of both linears whole.
    state = 16 * 4 * 16 * (256 + 256 + (256 + 512) / 2)
    resident = (3 * GIB / 8 + END_BYTES) / 2 + 3 * state
    replica = Replica.uniform(pp=3, tp=2)
    assert model.resident(POOL, replica) == pytest.approx(resident)
    dots, full = (model.kept(4096, 16, remat, tp=2) for remat in ("dots", "full"))
    needed = resident + working(8, 512)
    peak = model.peak(SHAPE, POOL, "dots", replica, in_flight=5)
    assert peak == pytest.approx(needed + 5 * 3 * dots, rel=1e-5)
    mixed = ("full", "full", "dots", "dots", "full", "dots", "full", "full")
    peak = model.peak(SHAPE, POOL, mixed, replica, in_flight=5)
    assert peak == pytest.approx(needed + 5 * (2 * dots + full), rel=1e-5)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_every_stage_has_the_same_mixture_of_policies(model, stages):
    replica = Replica.uniform(pp=stages)
    dots, lean = (model.kept(4096, 16, remat) for remat in ("dots", "lean"))
    fullest = max(BACKBONE.stage_layers(replica))
    room = stages * (fullest * lean + 1.5 * (dots - lean))
    memory = (model.resident(POOL, replica) + 1.25 * dots + room) / USABLE
    tight = dataclasses.replace(model, memory=int(memory))
    policies = tight.policies(SHAPE, POOL, replica, in_flight=stages)
    split = split_stages(policies, BACKBONE.stage_layers(replica))
    assert all(stage == split[0][-len(stage) :] for stage in split)
    assert split[0] == ("lean",) * (fullest - 1) + ("dots",)
    assert [len(stage) for stage in split] == BACKBONE.stage_layers(replica)
    assert tight.peak(SHAPE, POOL, policies, replica, in_flight=stages) <= USABLE * tight.memory


def test_engine_policies_fill_the_memory(model):
    tight = dataclasses.replace(model, memory=int(2.6 * GIB))
    policies = tight.policies(SHAPE, POOL)
    assert policies == tuple(sorted(policies, key=list(BACKBONE.kept).index, reverse=True))
    assert len(set(policies)) == 2
    peaks = [one.peak(SHAPE, POOL) for one in (tight, model)]
    assert peaks[0] < peaks[1] == model.peak(SHAPE, POOL, "dots")
    assert model.policies(SHAPE, POOL) == ("dots",) * 8


def test_observations_correct_the_model(model):
    shapes = [ShapeClass(rows, 512, 128, 1) for rows in (2, 4, 8, 16)]
    true = {shape: 1.1 * model.peak(shape, POOL, "dots") for shape in shapes}
    seen = model
    for shape in shapes[:3]:
        seen = seen.observe(shape, POOL, "dots", int(true[shape]))
    before, after = (
        abs(m.peak(shapes[3], POOL, "dots") / true[shapes[3]] - 1) for m in (model, seen)
    )
    assert after < 0.02 < before


def test_a_round_that_fits_is_not_refused(model):
    assert model.fits(SHAPE, POOL)
    model.require(SHAPE, POOL)
    assert model.peak(SHAPE, POOL, "full") <= USABLE * model.memory


def test_error_names_the_smallest_change_that_fits(model):
    pool = PoolSpec(64, 256)
    shape = ShapeClass(16, 512, 128, 1)
    assert not model.fits(shape, pool)
    with pytest.raises(PlanningError, match="64 slots of rank 256 with 8192 tokens") as error:
        model.require(shape, pool)
    slots = max(t for t in range(1, 64) if model.fits(shape, pool._replace(slots=t)))
    ranks = max(r for r in range(1, 256) if model.fits(shape, pool._replace(rank=r)))
    stages = min(s for s in range(2, 9) if model.fits(shape, pool, Replica.uniform(pp=s)))
    text = str(error.value)
    assert f"at most {slots} slots or ranks of at most {ranks}" in text
    assert f"{stages} pipeline stages" in text
    long = ShapeClass(1024, 512, 128, 1)
    tokens = 512 * max(r for r in range(1, 1024) if model.fits(ShapeClass(r, 512, 128, 1), POOL))
    with pytest.raises(PlanningError, match=f"at most {tokens} tokens a microbatch"):
        model.require(long, POOL)


def test_error_says_where_no_single_change_fits(model):
    tiny = dataclasses.replace(model, memory=1000)
    with pytest.raises(PlanningError, match="no single change"):
        tiny.require(SHAPE, POOL)


def test_working_memory_is_the_heads_where_that_needs_more(model):
    head = Measurement(HeadPoint(2048), 1.0, 5 * GIB)
    profile = Profile("test", GIB, "bfloat16", {}, BACKBONE, (layer(4, 512), head))
    shape = ShapeClass(4, 512, 128, 1)
    rest = fit_memory_model(profile).resident(POOL) + 8 * model.kept(2048, 16, "dots")
    assert fit_memory_model(profile).peak(shape, POOL, "dots") - rest == pytest.approx(5 * GIB)


@pytest.mark.parametrize(
    ("memory", "measured", "message"),
    [(None, (layer(4, 512),), "memory_bytes is null"), (GIB, (), "no peak_bytes of an adapted")],
)
def test_profile_without_memory_is_refused(memory, measured, message):
    with pytest.raises(ProfileError, match=message):
        fit_memory_model(Profile("test", memory, "bfloat16", {}, BACKBONE, measured))
    known = Profile("test", None, "bfloat16", {}, BACKBONE, (layer(4, 512),))
    assert fit_memory_model(known, memory=GIB).memory == GIB


def test_unknown_policy_and_optimizer_are_named(model):
    with pytest.raises(ProfileError, match="no remat policy 'some'; known: dots, lean, full"):
        model.peak(SHAPE, POOL, "some")
    with pytest.raises(PlanningError, match="unknown kind 'adafactor'; known: adamw"):
        model.peak(SHAPE, POOL._replace(optimizer="adafactor"), "dots")


def test_rows_of_several_sequences_need_memory_for_every_sequence():
    """As measured of cuDNN: only rows of at least 512 tokens take memory for every sequence."""
    packed = BACKBONE.packed

    def attention(row_len: int, max_sequences: int) -> Measurement:
        taken = packed.needed_by(2048, max_sequences) if row_len >= 512 else 0
        point = AttentionPoint(2048, row_len, 128, max_sequences, True)
        return Measurement(point, 1.0, int(1e6 + taken))

    points = [attention(row_len, most) for row_len in (128, 512, 1024) for most in (1, 16)]
    measured = (layer(4, 512), layer(16, 512), *points)
    model = fit_memory_model(Profile("test", 16 * GIB, "bfloat16", {}, BACKBONE, measured))
    # Rows between 128 and 512 tokens were not measured.
    assert model.packed_from == 256

    def peak(row_len: int, max_sequences: int, remat: str) -> float:
        shape = ShapeClass(8192 // row_len, row_len, 128, max_sequences)
        return model.peak(shape, POOL, remat)

    assert peak(128, 32, "dots") == peak(128, 1, "dots")
    kept = 8 * 8192 * (packed.kept + 32 * packed.kept_sequence)
    # Attention needs more working memory than the rest of the pass.
    needed = 8192 * 32 * packed.working_sequence - working(16, 512)
    for remat, extra in (("dots", kept + needed), ("full", needed)):
        more = peak(512, 32, remat) - peak(512, 1, remat)
        assert more == pytest.approx(extra, rel=1e-3)


def test_a_peak_of_packed_attention_does_not_change_the_prediction_for_other_rows(model):
    packed = dataclasses.replace(model, packed_from=512)
    shape, alone = ShapeClass(8, 512, 128, 64), ShapeClass(8, 512, 128, 1)
    predicted, before = (packed.peak(s, POOL, "dots") for s in (shape, alone))
    for nearly in (0.99, 1.005):
        same = packed.observe(shape, POOL, "dots", int(nearly * predicted))
        assert same.peak(alone, POOL, "dots") == before
    # A higher peak has another cause, from which the model learns.
    more = packed.observe(shape, POOL, "dots", int(1.2 * predicted))
    assert more.peak(shape, POOL, "dots") > predicted


def test_layers_keep_less_where_attention_takes_memory(model):
    shape = ShapeClass(8, 512, 128, 64)
    little = dataclasses.replace(model, memory=3 * GIB)
    packed = dataclasses.replace(little, packed_from=512)
    policies = [m.policies(shape, POOL) for m in (little, packed)]
    assert policies[0] != policies[1]
    assert packed.peak(shape, POOL) <= USABLE * packed.memory < little.memory


def test_chunks_have_copies_of_what_changes_logits(model):
    values = 10**6
    point = PointSize("lm_head", 0, values)
    pools = [
        POOL._replace(others=(KindSize("rows", 1, (own,)),))
        for own in (point, point._replace(at_head=True))
    ]
    peaks = [model.peak(SHAPE, pool, "dots", in_flight=2) for pool in pools]
    # Values and gradients, float32.
    assert peaks[1] - peaks[0] == pytest.approx(2 * 8 * values * SHAPE.chunks)
    room = [sum(p == "dots" for p in model.policies(SHAPE, pool)) for pool in pools]
    assert room[1] <= room[0]


def test_stages_hold_what_belongs_to_no_layer_whole(model):
    values = 8 * 10**6
    stages = Replica.uniform(pp=4)
    layers = BACKBONE.stage_layers(stages)
    before = POOL.stage_bytes(BACKBONE, layers)

    def pool_with(**more):
        point = PointSize("place", 0, 0, frozen_per_rank=values, **more)
        return POOL._replace(others=(KindSize("kind", 3, (point,)),))

    whole = 4 * POOL.slots * 3 * values
    for more, expected in (
        ({}, [whole * own // 8 for own in layers]),
        ({"whole_per_rank": values}, [whole] * 4),
        ({"end": 0}, [whole, 0, 0, 0]),
        ({"end": -1}, [0, 0, 0, whole]),
    ):
        found = pool_with(**more).stage_bytes(BACKBONE, layers)
        assert [now - then for now, then in zip(found, before, strict=True)] == expected
    divided, everywhere = (
        model.resident(pool_with(**more), stages) for more in ({}, {"whole_per_rank": values})
    )
    assert everywhere - divided == pytest.approx(whole * 5 / 8)


@pytest.mark.parametrize(("backbone_format", "of_weight"), [("nf4", 2), ("int8", 2), ("float8", 1)])
def test_formats_of_weights_need_room_for_two_decoded_linears(model, backbone_format, of_weight):
    backbone = dataclasses.replace(model.backbone, backbone_format=backbone_format)
    changed = dataclasses.replace(model, backbone=backbone)
    largest = 256 * 512
    assert changed.resident(POOL) == model.resident(POOL) + 2 * of_weight * largest


def test_decoded_weights_in_a_measured_peak_are_counted_once(model):
    """The same backbone, measured in nf4: peaks are higher by two decoded linears."""
    backbone = dataclasses.replace(BACKBONE, backbone_format="nf4")
    decoded = backbone.decoded_bytes
    measured = [
        m._replace(peak_bytes=m.peak_bytes + decoded)
        for m in (layer(1, 512), layer(4, 512), layer(16, 512), layer(2, 4096), layer(8, 256))
    ]
    nf4 = fit_memory_model(Profile("test", 4 * GIB, "bfloat16", {}, backbone, tuple(measured)))
    expected = model.peak(SHAPE, POOL, "dots") + decoded
    assert nf4.peak(SHAPE, POOL, "dots") == pytest.approx(expected, rel=1e-5)
