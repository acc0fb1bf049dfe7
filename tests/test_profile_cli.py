"""`python -m jaxmux.profile` on the CPU, with a tiny Llama."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxmux.cli.arguments import profile_options
from jaxmux.cli.main import run_command
from jaxmux.models import BACKBONE_FORMATS, Backbone
from jaxmux.models.architectures import parse_config
from jaxmux.planner import PlanningError
from jaxmux.planner.costs.device_profile import CollectivePoint, LayerPoint, read_profile
from jaxmux.planner.costs.fitting import fit_memory_model, fit_time_model
from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.packing import ShapeClass
from jaxmux.profiling import CheckedCase, Grid, profiler, timed_programs
from jaxmux.profiling import grid as grids
from jaxmux.profiling.grid import points
from jaxmux.profiling.timed_programs import make_program
from jaxmux.profiling.timing import measure

main = partial(run_command, "profile", prog="jaxmux profile")

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# One value of each, because every program takes a second or two to compile.
SIZES = "--tokens 128 --row_lens 128 --chunk_lens 64 --ranks 4 --slots 1".split()


@pytest.fixture(scope="module", autouse=True)
def few_points():
    """Profiles have fewer policies, numbers of sequences and adapted linears, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grids, "_MAX_SEQUENCES", (1, 4))
        for module in (grids, profiler):
            patch.setattr(module, "NAMED_POLICIES", ("dots", "full"))
        for module in (profiler, timed_programs):
            patch.setattr(module, "MODULES", ("self_attn.q_proj", "mlp.down_proj"))
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("backbone") / "config.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.fixture(scope="module")
def profile_path(config, few_points) -> Path:
    path = config.parent / "profile.json"
    assert main(["--config", str(config), "--out", str(path), "--seconds", "0.02", *SIZES]) == 0
    return path


def test_profile_is_complete(profile_path):
    profile = read_profile(profile_path)
    grid = Grid((128,), (128,), (64,), (4,), (1,), layers=1)
    measured = [measurement.point for measurement in profile.measurements]
    assert measured == points(grid, profile.backbone, devices=1)
    assert all(measurement.seconds > 0 for measurement in profile.measurements)
    layers = [m for m in profile.measurements if isinstance(m.point, LayerPoint)]
    assert all(measurement.peak_bytes > 0 for measurement in layers)


def test_command_says_that_it_compiles_and_shows_every_number_on_80_columns(
    profile_path, config, tmp_path, monkeypatch, capsys
):
    new = tmp_path / "profile.json"
    known = read_profile(profile_path)
    monkeypatch.setattr(profiler, "_measure", lambda *arguments: iter(known.measurements))
    monkeypatch.setattr(profiler, "kept_by_policy", lambda *arguments: known.backbone.kept)
    assert main(["--config", str(config), "--out", str(new), *SIZES]) == 0
    first, *_, table = capsys.readouterr().out.split("\n", 1)
    assert first.startswith("compiling ")
    rows = [line for line in table.splitlines() if line.rstrip().endswith("%")]
    layers = read_profile(profile_path).of(LayerPoint)
    for row, (point, seconds) in zip(rows, layers, strict=True):
        assert len(row) <= 80 and "…" not in row
        assert f"{1e3 * seconds:,.3f}" in row
        if point.remat == "full":
            assert "remat=full" in row
        if not point.backward:
            assert "backward=False" in row


@pytest.mark.long
def test_a_profile_records_the_format_of_the_linears(
    profile_path, config, tmp_path, monkeypatch, capsys
):
    """A profile in a format is not completed with measurements in another."""
    new, plain = tmp_path / "profile.json", read_profile(profile_path)
    measured: list[str | None] = []

    def measure_nothing(backbone, missing, seconds):
        measured.append(backbone.weights["layers"]["mlp"]["up_proj"]["kernel"].format)
        return iter(plain.measurements)

    monkeypatch.setattr(profiler, "_measure", measure_nothing)
    monkeypatch.setattr(profiler, "kept_by_policy", lambda *arguments: plain.backbone.kept)
    command = ["--config", str(config), "--out", str(new), *SIZES]
    assert main([*command, "--backbone_format", "int8"]) == 0
    assert measured == ["int8"] and "linears in int8" in capsys.readouterr().out
    backbone = read_profile(new).backbone
    assert backbone.backbone_format == "int8"
    assert backbone.layer_bytes < plain.backbone.layer_bytes
    assert main(command) == 2
    assert f"{new}: backbone is" in capsys.readouterr().err


@pytest.mark.long
def test_layers_are_measured_in_the_format_of_their_linears():
    tiny = dataclasses.replace(parse_config(TINY, "tiny"), num_layers=1, backbone_format="int8")
    backbone = Backbone.random(tiny, dtype=jnp.float32)
    point = LayerPoint(1, 128, 128, 64, 1, 1, 4, 1, "full", False, True)
    (found,) = measure([(point, make_program(backbone, point))], 0.01)
    assert found.point == point and found.seconds > 0 and found.peak_bytes > 0


def test_profiles_are_measured_in_the_formats_of_backbones():
    for form in BACKBONE_FORMATS:
        options = profile_options(["--config=c", "--out=o", f"--backbone_format={form}"], "")
        assert options.backbone_format == form


@pytest.mark.long
def test_chunks_of_padding_have_no_owner():
    backbone = Backbone.random(parse_config(TINY, "tiny"), dtype=jnp.float32)
    full = LayerPoint(2, 256, 128, 64, 1, 2, 4, 2, "dots", False, True)
    padded = dataclasses.replace(full, padding=0.5)
    owners = []
    for point in (full, padded):
        stream = make_program(backbone, point).constants[2]
        owners.append(stream.dispatch.routing.chunk_slot.tolist())
    assert owners == [[0, 0, 1, 1], [0, -1, 1, -1]]


def test_second_run_measures_nothing(profile_path, config, monkeypatch, capsys):
    def refuse(*arguments):
        raise AssertionError("measured again")

    monkeypatch.setattr(profiler, "_measure", refuse)
    before = profile_path.read_text()
    assert main(["--config", str(config), "--out", str(profile_path), *SIZES]) == 0
    assert profile_path.read_text() == before
    shown = capsys.readouterr().out
    assert "error" in shown and "compiling" not in shown


def test_interrupted_run_goes_on(profile_path, config, tmp_path, monkeypatch):
    lines = profile_path.read_text().splitlines()
    (last,) = [i for i, line in enumerate(lines) if '"round"' in line]
    part = tmp_path / "part.json"
    part.write_text(
        "\n".join(lines[: last - 1] + [lines[last - 1].rstrip(",")] + lines[last + 1 :])
    )
    measured = []
    measure = profiler.measure_round
    monkeypatch.setattr(profiler, "measure_round", lambda *a: measured.append(a[1]) or measure(*a))
    assert main(["--config", str(config), "--out", str(part), "--seconds", "0", *SIZES]) == 0
    assert measured == [read_profile(profile_path).measurements[-1].point]
    assert len(read_profile(part).measurements) == len(read_profile(profile_path).measurements)


@pytest.mark.slow
def test_check_compares_rounds_with_predictions(profile_path, config, tmp_path, capsys):
    out = tmp_path / "check.json"
    folder = str(config.parent)
    arguments = ["--backbone", folder, "--check", str(profile_path), "--out", str(out)]
    assert (
        main([*arguments, "--seconds", "0.1", "--cases", "3x128x6x384", "3x64x6x384x128", *SIZES])
        == 0
    )
    for case in json.loads(out.read_text())["cases"]:
        measured, predicted = case["seconds"]
        # Times of a busy CPU vary, so only the order of magnitude is checked.
        assert 0.1 < predicted / measured < 10
    assert "mean absolute error of step time" in capsys.readouterr().out


def test_cases_are_written_as_they_are_parsed():
    for text in ("3x64x6x192", "3x64x6x384x128", "3x64x6x384x128xlean", "3x64x6x192xfull"):
        assert str(CheckedCase.parse(text)) == text
    assert CheckedCase.parse("3x64x6x384x128").shape(64) == ShapeClass(3, 128, 64, 2)
    with pytest.raises(PlanningError, match="3x0x6x192"):
        CheckedCase.parse("3x0x6x192")


def test_predicted_time_and_memory_grow_with_tokens(profile_path):
    profile = read_profile(profile_path)
    times = fit_time_model(profile)
    memory = fit_memory_model(profile, memory=2**30)
    shapes = [CheckedCase(1, 128, 4, tokens).shape(64) for tokens in (128, 256, 384, 512)]
    seconds = [times.predict(shape, 1, 4) for shape in shapes]
    peaks = [memory.peak(shape, PoolSpec(1, 4), "dots") for shape in shapes]
    assert seconds == sorted(seconds) and seconds[0] > 0
    size = profile.backbone
    weight_bytes = size.layers * size.layer_bytes + size.outside_bytes
    assert peaks == sorted(peaks) and peaks[0] > weight_bytes


def test_collectives_cover_every_division_of_the_devices(profile_path):
    backbone = read_profile(profile_path).backbone
    grid = Grid(payload_bytes=(1024,))
    found = [p for p in points(grid, backbone, devices=4) if isinstance(p, CollectivePoint)]
    axes = {(p.axis, p.devices) for p in found}
    assert axes == {("inner", 2), ("inner", 4), ("outer", 2)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "200"], "tokens=200 is no multiple of row_len=128"),
        (["--tokens", "64"], "the shortest row, 128"),
        (["--ranks", "0"], "ranks: expected positive numbers"),
    ],
)
def test_impossible_grid_is_refused(config, tmp_path, capsys, arguments, message):
    out = tmp_path / "profile.json"
    assert main(["--config", str(config), "--out", str(out), *SIZES, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_profile_of_another_backbone_is_refused(profile_path, tmp_path, capsys):
    other = tmp_path / "config.json"
    other.write_text(json.dumps(TINY | {"hidden_size": 64}))
    assert main(["--config", str(other), "--out", str(profile_path), *SIZES]) == 2
    message = capsys.readouterr().err
    assert str(profile_path) in message and "backbone" in message


def test_bad_config_and_case_are_refused(profile_path, config, tmp_path, capsys):
    absent = tmp_path / "absent.json"
    assert main(["--config", str(absent), "--out", str(tmp_path / "p.json")]) == 2
    assert str(absent) in capsys.readouterr().err
    with pytest.raises(PlanningError, match="case '3x64': expected tasks x length x rank x tokens"):
        CheckedCase.parse("3x64")
