"""`python -m jaxmux.plan` on the bundled demo, for devices that this machine does not have."""

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import shutil
from functools import partial
from pathlib import Path

import gin
import jax.numpy as jnp
import pytest
from matplotlib.figure import Figure

from jaxmux.cli.arguments import DEMO_CONFIG
from jaxmux.cli.main import run_command
from jaxmux.engine.tasks import prepared_task
from jaxmux.engine.tasks.prepared_task import size_of
from jaxmux.installation import resolve_path
from jaxmux.models import BackboneConfig
from jaxmux.planner.costs.cost_models import estimated_memory
from jaxmux.planner.costs.device_profile import (
    AttentionPoint,
    HeadPoint,
    LayerPoint,
    RoundPoint,
    UpdatePoint,
    write_profile,
)
from jaxmux.planner.pipeline import Plan
from jaxmux.planner.pipeline.schedules import validate

main = partial(run_command, "plan", prog="jaxmux plan")

TASKS = ("mood", "pirate", "record", "telegram")
# Planning a few rounds of small microbatches takes a second.
QUICK = ("--rounds=3", "--gin.fine_tune.tokens_per_microbatch=512")


@pytest.fixture(autouse=True)
def clean_gin():
    """Clears gin's configuration, which is global."""
    yield
    gin.clear_config()


@pytest.fixture(scope="module", autouse=True)
def tokenize_once():
    """The demo's data is tokenized once in this file."""
    load_samples, known = prepared_task.load_samples, {}

    def remembered(source, tokenizer, *, max_length, part, **keywords):
        key = source, max_length, part
        if key not in known:
            known[key] = load_samples(
                source, tokenizer, max_length=max_length, part=part, **keywords
            )
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared_task, "load_samples", remembered)
        yield


@pytest.fixture(scope="module", autouse=True)
def empty_plots():
    """Figures stay empty, because to draw one takes as long as a plan. The pictures of plans are
    drawn in tests/planner/pipeline/schedules/test_schedule_files.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "draw", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def planned(tmp_path_factory, tokenize_once, empty_plots):
    """Plans the demo on a mesh, from a config and a backbone without its weights; returns what the
    command has printed, and the folder with its files."""
    base = tmp_path_factory.mktemp("demo") / "base"
    ignored = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(resolve_path("jaxmux:demo/base"), base, ignore=ignored)
    config = [f"--gin_file={DEMO_CONFIG}", f"--gin_param=fine_tune.backbone='{base}'"]

    @functools.cache
    def run(mesh: str) -> tuple[str, Path]:
        out = tmp_path_factory.mktemp("plan") / "plan"
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            assert main([*QUICK, *config, f"--mesh={mesh}", f"--out={out}"]) == 0
        gin.clear_config()
        return shown.getvalue(), out

    return run


DEPLOYMENT = "pp2 + 2*(tp1)"


@pytest.fixture
def refused(capsys):
    """Runs a command that should refuse its input; returns its error message, one line."""

    def run(*arguments: str) -> str:
        assert main([*QUICK, *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        return line

    return run


def price(point) -> float:
    """Seconds of a point: a layer takes 1 µs per token, and 2 µs with adapters."""
    match point:
        case LayerPoint():
            return (2e-6 if point.rank else 1e-6) * point.tokens
        case AttentionPoint():
            return 1e-9 * point.row_len * point.tokens
        case HeadPoint():
            return 1e-6 * point.tokens
        case UpdatePoint():
            return 1e-12 * point.parameters
        case RoundPoint():
            return 4e-6 * point.tokens


def peak(point) -> int | None:
    """Peak bytes of a point."""
    match point:
        case LayerPoint():
            return 10_000 * point.tokens if point.rank else None
        case HeadPoint():
            return 1000


@pytest.fixture
def profile_of_the_demo(tmp_path, small_profile) -> Path:
    config = BackboneConfig.from_folder(resolve_path("jaxmux:demo/base"))
    size = estimated_memory(size_of(config, jnp.dtype("bfloat16"))).backbone
    made = {"row_lens": (128, 256), "optimizers": ("adamw", "sgd", "lion")}
    profile = small_profile(size, price, peak=peak, **made)
    write_profile(profile, tmp_path / "profile.json")
    return tmp_path / "profile.json"


def edit_profile(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("name", ["plan.json", "schedule.png", "trace.json"])
def test_foreign_files_are_not_replaced_by_a_plan(name, refused, tmp_path):
    (tmp_path / name).write_text("precious")
    assert f"{tmp_path / name}: exists and is no " in refused("--mesh=pp2", f"--out={tmp_path}")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "precious"


@pytest.mark.long
def test_a_plan_replaces_an_earlier_one(planned, capsys, tmp_path):
    _, earlier = planned("pp2")
    shutil.copytree(earlier, tmp_path / "plan")
    assert main([*QUICK, "--mesh=pp3", f"--out={tmp_path / 'plan'}"]) == 0
    assert f"{tmp_path / 'plan' / 'plan.json'}: an earlier plan is replaced" in (
        capsys.readouterr().err
    )
    assert json.loads((tmp_path / "plan" / "plan.json").read_text())["replica"].startswith("pp3")


@pytest.mark.long
def test_a_deployment_has_a_plan_for_each_replica(planned):
    shown, folder = planned(DEPLOYMENT)
    assert all(f"{i}: {name}" in shown for i, name in enumerate(("pp2,tp1", "pp1,tp1", "pp1,tp1")))
    assert "part of" in shown and "tokens/s" not in shown
    written = json.loads((folder / "plan.json").read_text())
    assert written["deployment"] == "pp2,tp1 + 2*(pp1,tp1)"
    plans = [Plan.from_json(plan) for plan in written["plans"]]
    assert written["round_seconds"] == max(plan.prediction.round_seconds for plan in plans)
    for plan, tokens in zip(plans, written["tokens"], strict=True):
        assert tokens == pytest.approx(sum(plan.tokens_by_microbatch) / 3)
    for i in range(3):
        assert (folder / f"schedule_replica{i}.png").exists()
        assert json.loads((folder / f"trace_replica{i}.json").read_text())


@pytest.mark.long
def test_demo_is_planned_and_written_without_its_weights(planned):
    shown, out = planned("pp2")
    tables, _, paths = shown.partition(str(out))
    assert max(map(len, tables.splitlines())) <= 80 and str(out) in paths
    for wanted in (
        *TASKS,
        "2 × cpu",
        "no profile of cpu for this backbone",
        "bubble",
        "1F1B per task",
        "memory",
        "padding",
    ):
        assert wanted in shown
    plan = Plan.from_json(json.loads((out / "plan.json").read_text()))
    validate(plan.schedule)
    assert [task.name for task in plan.tasks] == list(TASKS)
    assert (plan.replica.pp, plan.shape.tokens, plan.rounds) == (2, 512, 3)
    assert plan.tasks[0].samples == 1500 and plan.tasks[3].rank == 16
    assert (out / "schedule.png").read_bytes().startswith(b"\x89PNG")
    trace = json.loads((out / "trace.json").read_text())
    ops = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(ops) == 2 * 2 * len(plan.microbatches)
    end = max(event["ts"] + event["dur"] for event in ops)
    assert end == pytest.approx(1e6 * plan.simulate().makespan, rel=0.02)


@pytest.mark.long
def test_methods_and_names_are_legible_on_80_columns(planned):
    shown, out = planned("pp2")
    for method in ("this plan", "1F1B per task", "batch everything"):
        assert f"\n  {method} " in shown.partition(str(out))[0]


def check_legend(shown: str, words: list[str]) -> None:
    """Each word is explained in at most two lines."""
    lines = shown.splitlines()
    begin = max(i for i, line in enumerate(lines) if line.startswith("round  "))
    legend = lines[begin:]
    assert max(map(len, legend)) <= 80
    starts = [i for i, line in enumerate(legend) if not line.startswith(" ")] + [len(legend)]
    assert all(end - start <= 2 for start, end in itertools.pairwise(starts))
    for word in words:
        assert any(line.startswith(f"{word} ") for line in legend)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("pp2", ["hTask", "bubble ratio", "1F1B per task", "batch everything"]),
        (DEPLOYMENT, ["round", "tokens", "microbatch", "shape class"]),
    ],
)
def test_a_legend_explains_each_word_in_at_most_two_lines(mesh, words, planned):
    shown, out = planned(mesh)
    check_legend(shown.partition(str(out))[0], words)


@pytest.mark.long
def test_command_plans_one_device_by_default(tmp_path, monkeypatch, capsys):
    """Without a config it plans the demo. It writes no files."""
    monkeypatch.chdir(tmp_path)
    assert main([*QUICK]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("no --gin_file: this is the bundled demo")
    assert max(map(len, shown.splitlines())) <= 80
    assert "1 × cpu" in shown and "tokens/s" not in shown
    assert "bubble" not in shown
    assert "\x1b" not in shown
    assert not list(tmp_path.iterdir())
    words = ["hTask", "bucket", "padding", "microbatch", "one task at a time", "kept"]
    check_legend(shown, words)


@pytest.mark.long
def test_parameters_of_the_config_count(tmp_path):
    parameters = (
        "--gin.fine_tune.row_len=256",
        "--gin_param=mood/Task.batch_size=5",
        "--gin_param=fine_tune.chunk_len=64",
    )
    assert main([*QUICK, *parameters, f"--out={tmp_path}"]) == 0
    plan = Plan.from_json(json.loads((tmp_path / "plan.json").read_text()))
    assert (plan.shape.row_len, plan.shape.chunk_len) == (256, 64)
    mood = [s for own in plan.microbatches for s in own if s.slot == 0]
    assert len(mood) == 5 * plan.rounds


@pytest.mark.long
def test_a_plan_shows_the_schedule_that_is_asked_for(tmp_path, capsys):
    asked = "--gin.fine_tune.schedule='interleaved'"
    assert main([*QUICK, "--mesh=pp2", asked, f"--out={tmp_path}"]) == 0
    assert "1 data shard, schedule interleaved" in capsys.readouterr().out
    plan = Plan.from_json(json.loads((tmp_path / "plan.json").read_text()))
    assert plan.schedule.virtual_per_stage == plan.replica.parts == 2
    validate(plan.schedule)
    assert main([*QUICK, "--mesh=tp2", asked]) == 2
    assert "schedule='interleaved' orders the passes of a pipeline" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("mesh", [pytest.param("dp3", marks=pytest.mark.slow), "fsdp2,dp2,pp2"])
def test_data_shards_divide_the_samples(mesh, tmp_path, capsys):
    """The plan is that of the first shard, which has at least as many samples as any other."""
    assert main([*QUICK, f"--mesh={mesh}", f"--out={tmp_path}"]) == 0
    plan = Plan.from_json(json.loads((tmp_path / "plan.json").read_text()))
    shards = plan.replica.shards
    assert f"{shards} data shards train different samples" in capsys.readouterr().out
    samples = [sample.slot for own in plan.microbatches for sample in own]
    for slot, batch_size in enumerate([16, 8, 8, 6]):
        assert samples.count(slot) == -(-batch_size // shards) * plan.rounds


def test_a_plan_for_another_device_does_not_choose_the_devices(capsys):
    assert main(["--mesh=auto", "--profile=h200"]) == 2
    assert "name them, e.g. --mesh=pp4" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "device", "times"), [("h200", "NVIDIA H200", True), ("h100", "NVIDIA H100", False)]
)
def test_a_profile_that_ships_is_named_by_its_device(name, device, times, capsys, tmp_path):
    """There are none of the demo's backbone, and estimates have the speed of an H200."""
    assert main([*QUICK, f"--profile={name}", f"--out={tmp_path}"]) == 0
    shown = capsys.readouterr().out
    assert f"1 × {device}" in shown and ("tokens/s" in shown) is times
    assert ("no profile of NVIDIA H100" in shown) is not times
    plan = Plan.from_json(json.loads((tmp_path / "plan.json").read_text()))
    assert plan.costs.device == "NVIDIA H200" and plan.shape.chunk_len >= 128


def test_an_unknown_device_is_refused_with_those_that_ship(refused):
    assert "--profile=a100: there is no such file; h100 and h200 ship" in refused("--profile=a100")


def test_dropped_records_are_shown(tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    records = [{"prompt": "a", "completion": "b" * n} for n in (5, 5, 500)]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = tmp_path / "tasks.gin"
    config.write_text(f"""
        fine_tune.backbone = "jaxmux:demo/base"
        fine_tune.tasks = [@Task()]
        Task.name = "one"
        Task.data = @Source()
        Source.path = "{data}"
        Source.overlong = "drop"
        Task.max_length = 64
        Task.steps = 3
        Task.batch_size = 2
        Task.adapter = @LoRA()
        LoRA.rank = 4
        Task.optimizer = @AdamW()
        AdamW.learning_rate = 1e-3
    """)
    assert main([*QUICK, f"--gin_file={config}"]) == 0
    assert "task one: 1 of 3 records dropped" in capsys.readouterr().out


def test_mismatched_answers_are_not_planned(tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    # The mismatched sample of the long prompt is longer than all others.
    texts = [("a" * 60, "b"), ("a", "b" * 60)]
    records = [{"prompt": a, "completion": b, "label": b == "b"} for a, b in texts]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = tmp_path / "tasks.gin"
    config.write_text(f"""
        fine_tune.backbone = "jaxmux:demo/base"
        fine_tune.tasks = [@Task()]
        Task.name = "one"
        Task.data = "{data}"
        Task.steps = 3
        Task.batch_size = 2
        Task.adapter = @LoRA()
        Task.objective = @KTO()
    """)
    assert main([*QUICK, f"--gin_file={config}", f"--out={tmp_path}/out"]) == 0
    assert "2 answers" in capsys.readouterr().out
    plan = Plan.from_json(json.loads((tmp_path / "out" / "plan.json").read_text()))
    assert [len(microbatch) for microbatch in plan.microbatches] == [2] * plan.rounds
    longest = max(sample.tokens for microbatch in plan.microbatches for sample in microbatch)
    assert plan.shape.row_len > longest and plan.prediction.update_seconds > 0


@pytest.mark.long
def test_fewer_rounds_of_large_global_batches_are_planned_and_announced(tmp_path, capsys):
    without_rounds = [argument for argument in QUICK if "rounds" not in argument]
    large = "--gin.mood/Task.batch_size=1000"
    assert main([*without_rounds, large, f"--out={tmp_path}"]) == 0
    assert "packing 4 rounds of up to 1,000 samples" in capsys.readouterr().err
    plan = Plan.from_json(json.loads((tmp_path / "plan.json").read_text()))
    assert plan.rounds == 4


@pytest.mark.long
def test_profile_is_the_source_of_costs(profile_of_the_demo, tmp_path, capsys):
    assert main([*QUICK, f"--profile={profile_of_the_demo}", f"--out={tmp_path}"]) == 0
    shown = capsys.readouterr().out
    assert "costs are measured" in shown and "Abacus" in shown and "16.0 GiB" in shown
    plan = Plan.from_json(json.loads((tmp_path / "plan.json").read_text()))
    assert plan.costs.kind == "measured"
    assert plan.shape.chunk_len == 64
    # Six layers of at least 2 µs per token, and the head.
    seconds = plan.forward_seconds[0] + plan.backward_seconds[0]
    assert seconds == pytest.approx(plan.shape.tokens * 13e-6, rel=0.2)


@pytest.mark.long
def test_collectives_that_a_profile_lacks_are_estimated_and_named(profile_of_the_demo, capsys):
    assert main([*QUICK, f"--profile={profile_of_the_demo}", "--mesh=pp2"]) == 0
    assert "not in the profile, so estimated for H200s: ppermute over 2" in capsys.readouterr().out


@pytest.mark.long
def test_profile_of_another_backbone_is_refused(refused, profile_of_the_demo):
    path = profile_of_the_demo
    backbone = json.loads(path.read_text())["backbone"]
    edit_profile(path, backbone=backbone | {"hidden_size": 4096})
    message = refused(f"--profile={path}")
    assert f"{path}: measured for another backbone, hidden_size=4096" in message
    assert "has 192" in message


@pytest.mark.long
def test_plan_takes_the_dtype_of_its_profile(profile_of_the_demo, tmp_path, capsys):
    config = BackboneConfig.from_folder(resolve_path("jaxmux:demo/base"))
    sizes = estimated_memory(size_of(config, jnp.dtype("float32"))).backbone
    path = profile_of_the_demo
    edit_profile(path, dtype="float32", backbone=dataclasses.asdict(sizes))
    assert main([*QUICK, f"--profile={path}"]) == 0
    assert f"costs are measured: {path}, float32" in " ".join(capsys.readouterr().out.split())


def test_profile_of_another_dtype_is_refused(refused, profile_of_the_demo):
    message = refused(f"--profile={profile_of_the_demo}", "--gin.fine_tune.dtype='float32'")
    assert "was measured in bfloat16, and the plan is for float32" in message
    assert "set fine_tune.dtype='bfloat16'" in message


@pytest.mark.long
def test_profile_without_the_devices_memory_names_the_option(refused, profile_of_the_demo):
    edit_profile(profile_of_the_demo, memory_bytes=None)
    assert "set fine_tune.memory_gib" in refused(f"--profile={profile_of_the_demo}")


def test_empty_plan_is_refused(refused, tmp_path):
    config = tmp_path / "empty.gin"
    config.write_text('fine_tune.backbone = "jaxmux:demo/base"\nfine_tune.tasks = []\n')
    assert "fine_tune.tasks is empty" in refused(f"--gin_file={config}")


REFUSED = {
    "no such axis": (["--mesh=ep2"], "'ep2' is no axis"),
    "more stages than layers": (["--mesh=pp7"], "it would fit with pp6"),
    "heads that do not divide": (["--mesh=tp2"], "tp2 does not divide num_key_value_heads=3"),
    "a row too short": (
        ["--gin.fine_tune.row_len=64"],
        "'record': its longest sample takes 99",
    ),
    "no room": (["--gin.fine_tune.memory_gib=0.01"], "task 'mood' does not fit even alone on pp1"),
    "no memory": (
        ["--gin.fine_tune.memory_gib=0"],
        "memory_gib should be a number above 0 or None, found 0",
    ),
    "unknown policy": (["--gin.fine_tune.remat='dost'"], "remat should be one of 'auto', 'none'"),
    "missing profile": (["--profile=nowhere.json"], "nowhere.json"),
    "missing config": (["--gin_file=nowhere.gin"], "nowhere.gin: cannot be read"),
    "missing data": (["--gin.pirate/Task.data='nowhere.jsonl'"], "task 'pirate': nowhere.jsonl"),
    "a name twice": (["--gin.mood/Task.name='pirate'"], "task 'pirate': 2 tasks have this name"),
}


@pytest.mark.long
@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_a_config_that_cannot_be_planned_is_refused_in_one_line(arguments, message, refused):
    assert message in refused(*arguments)


def test_unwritable_folder_is_named(refused, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert str(file) in refused(f"--out={file}")


@pytest.mark.parametrize("argument", ["--gin_fiel=x.gin", "--rounds=0"])
def test_bad_argument_is_named(argument, capsys):
    with pytest.raises(SystemExit) as exit:
        main([argument])
    assert exit.value.code == 2
    assert argument.split("=")[0] in capsys.readouterr().err
