"""Costs come from a profile that ships for the device and the backbone, and otherwise from
estimates."""

import dataclasses
from pathlib import Path

import pytest

from jaxmux.installation import resolve_path
from jaxmux.planner.costs import h200
from jaxmux.planner.costs.cost_models import (
    PROFILES,
    device_models,
    estimated_memory,
    estimated_models,
    measured_models,
)
from jaxmux.planner.costs.device_profile import (
    BackboneSize,
    LayerPoint,
    PackedBytes,
    ProfileError,
    UpdatePoint,
    read_profile,
    write_profile,
)
from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.devices import Replica
from jaxmux.planner.packing.rows import ShapeClass

LINEARS = {name: (64, 64) for name in ("q_proj", "k_proj", "v_proj", "o_proj")} | {
    "gate_proj": (64, 128),
    "up_proj": (64, 128),
    "down_proj": (128, 64),
}
PACKED = PackedBytes.of(4, 2, 16, itemsize=2)
SIZE = BackboneSize("Llama", 4, 64, 256, LINEARS, 10**5, 10**5, 2, {}, 10**5, PACKED)
DEVICE = "Abacus"
SHAPE = ShapeClass(4, 256, 64, 1)


def price(point) -> float:
    """A layer takes 1 ms per token, every other point 1 ns."""
    return 1e-3 * point.tokens if isinstance(point, LayerPoint) else 1e-9


@pytest.fixture
def ship(tmp_path, small_profile):
    def write(*without: type, name: str = "shipped", stored: str | None = None, **changed) -> None:
        size = dataclasses.replace(estimated_memory(SIZE).backbone, backbone_format=stored)
        whole = small_profile(size, price, peak=lambda _: 1000, row_lens=(256,), sequences=(1,))
        found = tuple(m for m in whole.measurements if not isinstance(m.point, without))
        profile = dataclasses.replace(whole, measurements=found, **changed)
        write_profile(profile, tmp_path / f"{name}.json")

    return write


@pytest.fixture
def models(tmp_path):
    def get(size: BackboneSize = SIZE, device: str = DEVICE):
        return device_models(size, None, Replica(), device, profiles=tmp_path)

    return get


def test_without_a_profile_costs_are_estimates(models):
    assert models().source.kind == "estimated"


def test_the_profile_of_device_and_backbone_is_taken(ship, models, tmp_path):
    ship()
    found = models()
    assert found.source.kind == "measured" and str(tmp_path / "shipped.json") in found.source.text
    assert found.times.layer(SHAPE, (), PoolSpec(1, 8), total=512).total == pytest.approx(0.512)
    # The number of layers may differ.
    deep = models(dataclasses.replace(SIZE, layers=40))
    assert deep.source.kind == "measured" and deep.times.backbone.layers == 40


@pytest.mark.parametrize(
    ("profile", "asked"),
    [
        ({"device": "Slide rule"}, {}),
        ({"dtype": "float32"}, {}),
        ({}, {"size": dataclasses.replace(SIZE, hidden_size=128)}),
        ({}, {"device": "Slide rule"}),
    ],
    ids=["device", "dtype", "backbone", "other device"],
)
def test_the_profile_of_another_device_or_backbone_is_not_taken(profile, asked, ship, models):
    ship(**profile)
    assert models(**asked).source.kind == "estimated"


def in_format(backbone_format: str | None) -> BackboneSize:
    return dataclasses.replace(SIZE, backbone_format=backbone_format)


def test_a_profile_measured_in_a_format_serves_this_format_only(ship, models, tmp_path):
    ship(stored="nf4")
    assert models(in_format("nf4")).source.kind == "measured"
    assert models(in_format("nf4")).source.notes == ()
    for other in (None, "int8", "float8"):
        assert models(in_format(other)).source.kind == "estimated"
    with pytest.raises(ProfileError, match="backbone_format=nf4, the config's has int8"):
        measured_models(tmp_path / "shipped.json", in_format("int8"), None, Replica())


def test_a_format_has_its_own_profile_before_that_of_plain_weights(ship, models, tmp_path):
    ship(name="a")
    for form in (None, "nf4"):
        assert str(tmp_path / "a.json") in models(in_format(form)).source.text
    assert "what another format changes" in models(in_format("nf4")).source.notes[0]
    ship(name="b", stored="nf4")
    found = {form: models(in_format(form)).source.text for form in (None, "int8", "nf4")}
    named = {form: Path(text.split(",")[0]).stem for form, text in found.items()}
    assert named == {None: "a", "int8": "a", "nf4": "b"}


@pytest.mark.parametrize("form", ["float8", "int8", "nf4"])
def test_what_was_measured_in_a_format_is_not_changed_for_it_again(ship, models, form):
    def seconds(size: BackboneSize) -> float:
        return models(size).times.layer(SHAPE, (512,), PoolSpec(1, 8)).total

    ship(stored=form)
    assert seconds(in_format(form)) == pytest.approx(0.512)
    ship()
    assert seconds(in_format(form)) != seconds(SIZE) == pytest.approx(0.512)


def test_float8_saves_what_was_measured_at_8b_and_a_larger_part_at_70b():
    """The measured microbatch had 8192 tokens in rows of 512; without a profile, sizes alone tell
    that linears take a larger part of a wider layer."""
    profile = Path(resolve_path(PROFILES)) / "h200_llama3_8b.json"
    size, shape = read_profile(profile).backbone, ShapeClass(16, 512, 128, 1)

    def seconds(size: BackboneSize, form: str | None, measured: bool) -> float:
        of = dataclasses.replace(size, backbone_format=form), None, Replica()
        found = measured_models(profile, *of) if measured else estimated_models(*of)
        return found.times.layer(shape, (8192,), PoolSpec(1, 0)).total

    saved = seconds(size, None, True) - seconds(size, "float8", True)
    assert 32 * saved == pytest.approx(0.1353, rel=1e-3)

    def remaining(size: BackboneSize) -> float:
        return seconds(size, "float8", False) / seconds(size, None, False)

    of_70b = {
        "self_attn.q_proj": (8192, 8192),
        "self_attn.k_proj": (8192, 1024),
        "self_attn.v_proj": (8192, 1024),
        "self_attn.o_proj": (8192, 8192),
        "mlp.gate_proj": (8192, 28672),
        "mlp.up_proj": (8192, 28672),
        "mlp.down_proj": (28672, 8192),
    }
    wide = dataclasses.replace(size, hidden_size=8192, linears=of_70b)
    assert remaining(wide) < remaining(size) - 0.02


def test_an_incomplete_profile_is_refused(ship, models):
    ship(UpdatePoint)
    with pytest.raises(ProfileError, match="measures no 'update'"):
        models()


def test_profiles_that_ship_serve_their_device_and_backbone_and_no_other():
    found = device_models(SIZE, None, Replica(), DEVICE, profiles=PROFILES)
    assert found.source.kind == "estimated"
    for path in Path(resolve_path(PROFILES)).glob("*.json"):
        profile = read_profile(path)
        size = profile.backbone
        found = device_models(size, None, Replica(), profile.device, profile.dtype, PROFILES)
        assert found.source.kind == "measured" and str(path) in found.source.text
        assert found.memory.memory == profile.memory_bytes
        estimate = estimated_memory(size)
        assert size.kept == estimate.backbone.kept
        if profile.device == h200.NAME:
            assert profile.memory_bytes == estimate.memory


def test_estimates_for_another_dtype_say_so(tmp_path):
    found = device_models(SIZE, None, Replica(), dtype="float32", profiles=tmp_path)
    assert found.source.notes == ("rates are those of bfloat16; float32 is slower",)


def test_long_rows_cost_more_on_a_cpu(tmp_path):
    """Attention writes and reads the scores of whole rows there."""
    shapes = ShapeClass(4, 512, 128, 1), ShapeClass(16, 128, 128, 1)

    def ratio(device: str) -> float:
        times = device_models(SIZE, None, Replica(), device, profiles=tmp_path).times
        long, short = (times.layer(s, (), PoolSpec(1, 8), total=2048).total for s in shapes)
        return long / short

    assert ratio("cpu") > 1.5 * ratio(DEVICE)
