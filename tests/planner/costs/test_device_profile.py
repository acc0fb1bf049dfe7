"""Profiles as files: they survive writing and reading, and errors name the file and the key."""

import json

import pytest

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
    read_profile,
    write_profile,
)

BACKBONE = BackboneSize(
    name="LlamaForCausalLM",
    layers=4,
    hidden_size=64,
    vocab_size=1000,
    linears={"self_attn.q_proj": (64, 64), "mlp.up_proj": (64, 128)},
    layer_bytes=1000,
    outside_bytes=500,
    stream_bytes=2,
    kept={"dots": (100.0, 4.0), "full": (20.0, 0.0)},
    head_block_bytes=64,
    packed=PackedBytes.of(4, 2, 64, itemsize=2),
)
MEASUREMENTS = (
    Measurement(LayerPoint(2, 512, 64, 64, 1, 4, 8, 2, "dots", False, True), 0.25, 1234),
    Measurement(AttentionPoint(512, 64, 64, 4, False), 1e-7),
    Measurement(HeadPoint(512), 0.5, 99),
    Measurement(UpdatePoint(4096, 4, "adamw"), 0.125),
    Measurement(RoundPoint(2, 512, 64, 64, 1, 4, 8, 4), 1.5),
    Measurement(CollectivePoint("psum", "inner", 2, 4096), 3e-5),
)


@pytest.fixture
def profile() -> Profile:
    return Profile("cpu", None, "float32", {"jax": "0.11.2"}, BACKBONE, MEASUREMENTS)


def test_profile_survives_its_file(profile, tmp_path):
    path = tmp_path / "profile.json"
    write_profile(profile, path)
    assert read_profile(path) == profile
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]
    write_profile(Profile("cpu", 10, "float32", {}, BACKBONE), path)
    assert read_profile(path).measurements == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(version=2), "version should be 1"),
        (lambda raw: raw.pop("device"), "device is missing"),
        (lambda raw: raw.update(colour="red"), "unknown key colour"),
        (lambda raw: raw["backbone"].pop("layers"), "backbone: layers is missing"),
        (lambda raw: raw["backbone"].update(layers="4"), "backbone: layers should be of type int"),
        (lambda raw: raw["backbone"].update(kept=[1]), "backbone.kept should map"),
        (lambda raw: raw["measurements"][1].pop("row_len"), r"measurements\[1\]: row_len is miss"),
        (lambda raw: raw["measurements"][0].update(remat=1), r"measurements\[0\]: remat should be"),
        (lambda raw: raw["measurements"][2].update(seconds=-1), r"\[2\].seconds should be a time"),
        (lambda raw: raw["measurements"][3].update(operator="gemm"), r"\[3\].operator should be"),
        (lambda raw: raw.pop("measurements"), "measurements should be a list"),
    ],
)
def test_error_names_file_and_key(profile, tmp_path, change, message):
    path = tmp_path / "profile.json"
    write_profile(profile, path)
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(ProfileError, match=message) as error:
        read_profile(path)
    assert str(path) in str(error.value)


def test_absent_or_broken_file_is_named(tmp_path):
    with pytest.raises(ProfileError, match="absent.json: not found"):
        read_profile(tmp_path / "absent.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ProfileError, match="broken.json: not valid JSON"):
        read_profile(broken)


def test_operator_without_measurements_is_named(profile):
    empty = Profile("cpu", None, "float32", {}, BACKBONE)
    assert profile.of(HeadPoint) == [(HeadPoint(512), 0.5)]
    with pytest.raises(ProfileError, match="profile of cpu measures no 'head'"):
        empty.of(HeadPoint)


def test_adapter_width_is_the_sum_of_the_linears_widths():
    assert BACKBONE.adapter_width == 64 + 64 + 64 + 128
