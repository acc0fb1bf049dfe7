"""A run from a checkpoint folder and tasks to exported adapters, with all its files."""

import json
import math
import re
import resource
import shutil
import struct
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import ModelCard
from matplotlib.image import imread
from safetensors.numpy import load_file
from tensorboardX.proto.event_pb2 import Event

from jaxmux import SGD, AdamW, LoRA, RunDirectoryError, Schedule, import_adapter
from jaxmux.cli.main import run_command
from jaxmux.data import load_tokenizer
from jaxmux.models import BackboneConfig
from jaxmux.runs.metrics import has_details
from jaxmux.runs.recorder import Recorder
from jaxmux.runs.run_directory import lock_state
from jaxmux.runs.summary import plot_losses

export = partial(run_command, "export", prog="jaxmux export")

METRICS = ["step", "task", "task_step", "loss", "lr", "grad_norm", "target_tokens", "tokens"]
METRICS += ["computed_tokens", "skipped", "time"]
TASK_SUMMARY = {"status", "error", "steps", "train_loss_first", "train_loss_last", "eval_loss"}
TASK_SUMMARY |= {"eval_target_tokens", "target_tokens", "tokens", "best_step", "stopped_early"}
TASK_SUMMARY |= {"skipped", "bad_streak", "best_metric", "eval_metrics"}
SUMMARY = {"tasks", "tokens_per_second", "effective_tokens_per_second", "padding_fraction"}
SUMMARY |= {"wall_seconds", "versions", "peak_memory_bytes", "predicted_memory_bytes"}
SUMMARY |= {"round_seconds", "predicted_round_seconds", "sweeps"}
# A first update that makes every forward pass after it overflow.
TARGETS = ("q_proj", "down_proj")
DESTRUCTIVE = {
    "optimizer": SGD(1e30, clip_norm=None),
    "adapter": LoRA(rank=4, alpha=64.0, target_modules=TARGETS),
}


@pytest.fixture(scope="module")
def tasks(make_task, data):
    """By name: epochs and steps, two optimizers, ranks, lengths and batch sizes."""
    by_epochs = make_task(
        "epochs",
        eval_data=data["short.eval"],
        adapter=LoRA(rank=4, alpha=8.0, dropout=0.1, target_modules=(*TARGETS, "v_proj")),
        optimizer=AdamW(2e-2, schedule=Schedule("cosine", warmup_ratio=0.1)),
        max_length=32,
        batch_size=4,
        epochs=3,
    )
    by_steps = make_task(
        "steps",
        data=data["long"],
        eval_data=data["long.eval"],
        adapter=LoRA(rank=2, alpha=2.0, target_modules=("q_proj", "v_proj")),
        optimizer=SGD(0.5),
        max_length=96,
        batch_size=6,
        steps=17,
    )
    return {task.name: task for task in (by_epochs, by_steps)}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs") / "two_tasks"


@pytest.fixture(scope="module")
def summary(tasks, train, run_dir):
    return train(run_dir, *tasks.values(), config_text="# as given\n")


@pytest.fixture(scope="module")
def metrics(summary, run_dir) -> list[dict]:
    return read_metrics(run_dir)


def read_metrics(run_dir) -> list[dict]:
    return [strict_json(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def strict_json(text: str):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_every_documented_file_is_there(summary, run_dir, tasks):
    names = {path.name for path in run_dir.iterdir() if not path.name.startswith(".")}
    documented = {"config.gin", "metrics.jsonl", "checkpoints", "adapters", "summary.json"}
    assert documented | {"loss.png", "tensorboard"} <= names
    assert {path.name for path in (run_dir / "adapters").iterdir()} == set(tasks)
    assert (run_dir / "config.gin").read_text() == "# as given\n"


def test_tasks_end_when_their_own_epochs_or_steps_are_done(summary, metrics):
    # Three epochs of 14 samples in batches of 4.
    steps = {"epochs": 12, "steps": 17}
    for name, count in steps.items():
        assert [m["task_step"] for m in metrics if m["task"] == name] == list(range(1, count + 1))
        assert summary.tasks[name]["steps"] == count
        assert summary.tasks[name]["status"] == "succeeded"
        assert summary.tasks[name]["error"] is None
    assert summary.succeeded


def test_metrics_have_exactly_the_documented_fields(metrics):
    for line in metrics:
        assert list(line) == METRICS
        assert math.isfinite(line["loss"]) and line["grad_norm"] > 0 and line["lr"] >= 0
        assert 0 < line["target_tokens"] <= line["tokens"] <= line["computed_tokens"]
        assert line["skipped"] is False


def test_metrics_show_each_schedule(metrics, tasks):
    for name, task in tasks.items():
        lrs = [m["lr"] for m in metrics if m["task"] == name]
        schedule, peak = task.optimizer.schedule, task.optimizer.learning_rate
        expected = [peak * schedule.factor(k, len(lrs)) for k in range(len(lrs))]
        assert lrs == pytest.approx(expected)


def test_every_epoch_trains_every_token_once(metrics, tasks, backbone, data):
    tokenizer = load_tokenizer(backbone)
    samples = [tokenized(tokenizer, r) for r in read_records(data["short"])]
    trained = [m for m in metrics if m["task"] == "epochs"]
    assert sum(m["tokens"] for m in trained) == 3 * sum(len(ids) - 1 for ids, _ in samples)
    assert sum(m["target_tokens"] for m in trained) == 3 * sum(n for _, n in samples)


def test_summary_file_holds_the_returned_summary(summary, run_dir):
    found = strict_json((run_dir / "summary.json").read_text())
    assert set(found) == SUMMARY
    assert found == summary._asdict()
    for task in found["tasks"].values():
        assert TASK_SUMMARY <= set(task)
    assert {"jaxmux", "jax"} <= set(found["versions"])


def test_rounds_hold_the_tokens_of_the_metrics(metrics, run_dir):
    lines = [strict_json(line) for line in (run_dir / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(1 + max(m["step"] for m in metrics)))
    for line in lines:
        own = [m for m in metrics if m["step"] == line["round"]]
        assert line["read_tokens"] == sum(m["tokens"] for m in own)
        assert line["chunk_tokens"] == sum(m["computed_tokens"] for m in own)
        assert line["seconds"] > 0 and line["host_bytes"] > 0
        assert sum(line["spent"].values()) == pytest.approx(line["seconds"], abs=1e-3)
        held = [tasks for _, _, tasks in line["held"]]
        assert len(held) == line["microbatches"]
        assert sum(capacity for _, capacity, _ in line["held"]) == line["tokens"]
        for m in own:
            found = [tasks[m["task"]] for tasks in held if m["task"] in tasks]
            assert [sum(n) for n in zip(*found, strict=True)] == [m["computed_tokens"], m["tokens"]]
    assert "compiling" in lines[0]["spent"] and "compiling" not in lines[-1]["spent"]
    kinds = {kind for line in lines for kind in line["spent"]}
    assert kinds == {"training", "evaluation", "checkpoints", "compiling", "idle"}


def test_summary_adds_up_the_metrics(summary, metrics):
    for name, task in summary.tasks.items():
        lines = [m for m in metrics if m["task"] == name]
        assert task["train_loss_first"] == lines[0]["loss"]
        assert task["train_loss_last"] == lines[-1]["loss"]
        for field in ("tokens", "target_tokens"):
            assert task[field] == sum(line[field] for line in lines)


def test_padding_is_what_the_microbatches_hold_beyond_the_metrics_tokens(summary, metrics):
    useful = sum(m["tokens"] for m in metrics)
    assert 0 < summary.padding_fraction < 1
    computed = useful / (1 - summary.padding_fraction)
    microbatches = computed / 256
    assert microbatches == pytest.approx(round(microbatches), abs=1e-6)
    assert round(microbatches) >= len({m["step"] for m in metrics})
    assert summary.wall_seconds > 0
    rates = summary.effective_tokens_per_second, summary.tokens_per_second
    assert rates == pytest.approx((useful / summary.wall_seconds, computed / summary.wall_seconds))


def test_eval_loss_equals_that_of_single_sequences(summary, run_dir, tasks, backbone, logits_of):
    tokenizer = load_tokenizer(backbone)
    config = BackboneConfig.from_folder(backbone)
    for name, task in tasks.items():
        spec, adapter = import_adapter(run_dir / "adapters" / name, config)
        records = read_records(task.eval_data.path)
        samples = [tokenized(tokenizer, record) for record in records]
        targets = sum(n for _, n in samples)
        for field, parts in (("eval_loss_first", ()), ("eval_loss", (spec, adapter))):
            total = sum(negative_log_likelihood(logits_of(s[0], *parts), *s) for s in samples)
            assert summary.tasks[name][field] == pytest.approx(total / targets, rel=1e-5)
        assert summary.tasks[name]["eval_target_tokens"] == targets
        # The exported adapter is the trained one, so it must matter.
        assert summary.tasks[name]["eval_loss"] < summary.tasks[name]["eval_loss_first"] - 0.01


def read_records(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def tokenized(tokenizer, record: dict) -> tuple[list[int], int]:
    """Token ids with BOS and EOS, and how many of the last are targets."""
    text = record["prompt"] + record["completion"]
    encoded = tokenizer(text, return_offsets_mapping=True)
    ends = [end for _, end in encoded["offset_mapping"]]
    completion = sum(end > len(record["prompt"]) for end in ends)
    return [*encoded["input_ids"], tokenizer.eos_token_id], completion + 1


def negative_log_likelihood(logits: np.ndarray, ids: list[int], targets: int) -> float:
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    positions = np.arange(len(ids) - 1 - targets, len(ids) - 1)
    return -log_p[positions, np.asarray(ids)[positions + 1]].sum()


def test_exported_adapters_have_true_ranks_and_targets(summary, run_dir, tasks, backbone):
    for name, task in tasks.items():
        folder = run_dir / "adapters" / name
        tensors = load_file(folder / "adapter_model.safetensors")
        linears = 2 if name == "steps" else 3
        assert len(tensors) == 2 * 2 * linears
        for key, tensor in tensors.items():
            assert tensor.shape["lora_B" in key] == task.adapter.rank
        settings = json.loads((folder / "adapter_config.json").read_text())
        assert settings["r"] == task.adapter.rank
        assert settings["base_model_name_or_path"] == str(backbone)


def test_cards_tell_what_was_trained(summary, run_dir, tasks, data):
    for name, task in tasks.items():
        card = ModelCard.load(run_dir / "adapters" / name / "README.md")
        assert card.data.library_name == "peft" and "lora" in card.data.tags
        rows = dict(re.findall(r"^\| (.+?) \| (.+) \|$", card.text, re.MULTILINE))
        results = summary.tasks[name]
        assert rows["Training data"] == f"`{Path(task.data.path).name}`"
        assert rows["Training samples"] == str(len(read_records(task.data.path)))
        assert rows["Held-out samples"] == str(len(read_records(task.eval_data.path)))
        assert rows["Steps"] == str(results["steps"])
        assert float(rows["Training, last step"]) == pytest.approx(
            results["train_loss_last"], rel=1e-4
        )
        for field, label in (("eval_loss_first", "before"), ("eval_loss", "after")):
            found = float(rows[f"Held-out data, {label} training"])
            assert found == pytest.approx(results[field], rel=1e-4)
        assert rows["All"] == f"{results['tokens']:,}"
        adapter, optimizer = map(json.loads, re.findall(r"```json\n(.+?)```", card.text, re.S))
        assert adapter["rank"] == task.adapter.rank
        assert optimizer["learning_rate"] == task.optimizer.learning_rate
        assert str(Path(task.data.path).parent) not in card.text


def test_export_command_writes_the_adapters_of_the_last_checkpoint(
    summary, run_dir, tmp_path, adapter_bytes
):
    assert export([f"--run_dir={run_dir}", f"--out={tmp_path}"]) == 0
    assert adapter_bytes(tmp_path) == adapter_bytes(run_dir / "adapters")


def test_export_command_writes_one_task_of_an_earlier_checkpoint(
    train, make_task, tmp_path, adapter_bytes, capsys
):
    constant = {"optimizer": SGD(0.1)}
    tasks = make_task("long", steps=4, **constant), make_task("b", steps=4)
    train(tmp_path / "run", *tasks, checkpoint_every=2)
    train(tmp_path / "half", make_task("long", steps=2, **constant), make_task("b", steps=4))
    capsys.readouterr()
    arguments = [f"--run_dir={tmp_path / 'run'}", f"--out={tmp_path / 'out'}"]
    assert export([*arguments, "--task=long", "--round=2"]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"long: step 2, round 2 -> {tmp_path / 'out' / 'long'}\n"
    assert shown.err == "task long: warning: not finished (2 of 4 steps)\n"
    found = adapter_bytes(tmp_path / "out")
    assert {path.split("/")[0] for path in found} == {"long"}
    assert (
        found["long/adapter_model.safetensors"]
        == (tmp_path / "half" / "adapters" / "long" / "adapter_model.safetensors").read_bytes()
    )


def test_export_for_serving_folds_the_scale_into_b(summary, run_dir, tmp_path, tasks):
    assert export([f"--run_dir={run_dir}", f"--out={tmp_path}", "--serving"]) == 0
    for name, task in tasks.items():
        plain, served = (d / name for d in (run_dir / "adapters", tmp_path))
        settings = json.loads((served / "adapter_config.json").read_text())
        assert settings["lora_alpha"] == settings["r"] == task.adapter.rank
        plain = load_file(plain / "adapter_model.safetensors")
        for key, tensor in load_file(served / "adapter_model.safetensors").items():
            factor = task.adapter.scale if "lora_B" in key else 1.0
            np.testing.assert_allclose(tensor, factor * plain[key], rtol=1e-6)


@pytest.mark.parametrize(
    ("argument", "culprit"),
    [
        ("--task=stpes", "no task 'stpes'; its tasks are epochs, steps"),
        ("--round=999", "no checkpoint after round 999; there are those after rounds "),
    ],
)
def test_export_of_what_is_not_there_is_refused(
    argument, culprit, summary, run_dir, tmp_path, capsys
):
    assert export([f"--run_dir={run_dir}", f"--out={tmp_path}", argument]) == 2
    assert culprit in capsys.readouterr().err


def test_a_missing_checkpoint_is_answered_with_the_rounds_that_there_are(
    summary, run_dir, tmp_path, capsys
):
    (tmp_path / "file").write_text("precious")
    assert export([f"--run_dir={run_dir}", f"--out={tmp_path / 'file'}"]) == 2
    assert "file: is no folder" in capsys.readouterr().err
    assert export([f"--run_dir={run_dir}", f"--out={tmp_path}", "--round=999"]) == 2
    named = capsys.readouterr().err.split("after rounds ")[1].strip().split(", ")
    folders = [path for path in (run_dir / "checkpoints").iterdir() if path.is_dir()]
    assert {*named} == {path.name for path in folders}
    for folder in folders:
        record = json.loads((folder / "run" / "metadata").read_text())
        assert record["position"]["rounds"] == int(folder.name)


def foreign_folder(kind: str, folder: Path, elsewhere: Path) -> None:
    """Something at the place of an adapter's folder that no export has written."""
    match kind:
        case "link":
            elsewhere.mkdir()
            folder.symlink_to(elsewhere)
        case "file":
            folder.write_text("precious")
        case "backbone":
            folder.mkdir()
            (folder / "adapter_config.json").write_text("{}")
            (folder / "adapter_model.safetensors").write_text("precious")
            (folder / "config.json").write_text("{}")
        case "linked card":
            folder.mkdir()
            for name in ("adapter_config.json", "adapter_model.safetensors"):
                (folder / name).write_text("precious")
            elsewhere.write_text("precious")
            (folder / "README.md").symlink_to(elsewhere)
        case name:
            folder.mkdir()
            (folder / name).write_text("precious")


@pytest.mark.parametrize("option", ["--overwrite", "--merge", "--serving"])
@pytest.mark.parametrize(
    ("kind", "culprit"),
    [
        ("link", "is a symbolic link"),
        ("file", "is no folder"),
        ("backbone", "holds a backbone beside an adapter"),
        ("linked card", "README.md: is a symbolic link"),
        ("adapter_config.json", "holds adapter_config.json but no adapter"),
        ("README.md", "holds README.md but no adapter"),
        ("adapter_model.safetensors", "holds adapter_model.safetensors but no adapter"),
        ("notes.txt", "holds notes.txt but no adapter"),
    ],
)
def test_export_never_writes_over_what_is_not_its_own(
    kind, culprit, option, summary, run_dir, tmp_path, capsys
):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    foreign_folder(kind, out / "steps", elsewhere)

    def contents() -> dict[Path, tuple[int, ...]]:
        stats = {path: path.lstat() for path in tmp_path.rglob("*")}
        return {path: (s.st_ino, s.st_mode, s.st_size, s.st_mtime_ns) for path, s in stats.items()}

    before = contents()
    arguments = [f"--run_dir={run_dir}", f"--out={out}", "--task=steps", option]
    assert export(arguments) == 2
    error = capsys.readouterr().err
    # Without --overwrite, an adapter is enough to be refused.
    assert culprit in error or (option != "--overwrite" and "already" in error)
    assert contents() == before


def test_a_merge_for_which_the_disk_is_too_small_leaves_nothing(summary, run_dir, tmp_path, capsys):
    """A limit of the size of files stands for the disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        code = export([f"--run_dir={run_dir}", f"--out={tmp_path}", "--task=steps", "--merge"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = capsys.readouterr().err
    assert code == 3 and error.startswith("error: ") and str(tmp_path) in error
    assert not list(tmp_path.iterdir())


def test_export_warns_of_a_task_of_epochs_that_is_not_finished(train, make_task, tmp_path, capsys):
    """Its number of steps is known from the summary of the finished run."""
    train(tmp_path / "run", make_task(epochs=1), checkpoint_every=2)
    arguments = [f"--run_dir={tmp_path / 'run'}", "--round=2", "--overwrite"]
    assert export([*arguments, f"--out={tmp_path / 'out'}"]) == 0
    assert capsys.readouterr().err == "task tiny: warning: not finished (2 of 4 steps)\n"
    (tmp_path / "run" / "summary.json").unlink()
    assert export([*arguments, f"--out={tmp_path / 'out'}"]) == 0
    assert capsys.readouterr().err == "task tiny: warning: not finished (2 steps)\n"


def test_export_of_a_folder_without_training_says_so(summary, run_dir, tmp_path, capsys):
    def error_of(folder: Path) -> str:
        assert export([f"--run_dir={folder}", f"--out={tmp_path / 'out'}"]) == 2
        return capsys.readouterr().err

    nowhere, begun = tmp_path / "nowhere", tmp_path / "begun"
    assert f"run directory {nowhere}: no such folder" in error_of(nowhere)
    assert f"run directory {tmp_path}: nothing was trained in it" in error_of(tmp_path)
    (tmp_path / "server.json").touch()
    assert f"a server's folder; its adapters are the folders {tmp_path}" in error_of(tmp_path)
    begun.mkdir()
    shutil.copy(run_dir / "run.json", begun)
    assert f"{begun / 'checkpoints'}: no checkpoint; nothing was trained yet" in error_of(begun)
    (begun / "checkpoints").mkdir()
    assert f"{begun / 'checkpoints'}: no checkpoint; nothing was trained yet" in error_of(begun)


def test_generation_with_a_run_directory_names_its_adapters(summary, run_dir, backbone, capsys):
    arguments = [f"--backbone={backbone}", f"--adapter={run_dir}", "--prompt=fig"]
    assert run_command("generate", arguments, prog="jaxmux generate") == 2
    message = capsys.readouterr().err
    adapters = f"{run_dir}/adapters/epochs, {run_dir}/adapters/steps"
    assert f"{run_dir}: is a run directory; --run_dir={run_dir}" in message
    assert adapters in message


def test_loss_plot_is_a_picture(summary, run_dir, drawn, tmp_path):
    assert imread(run_dir / "loss.png").size
    plot_losses(run_dir / "metrics.jsonl", tmp_path / "loss.png")
    picture = imread(tmp_path / "loss.png")
    height, width, _ = picture.shape
    assert width >= 800 and height >= 400 and len(np.unique(picture)) > 10


def test_tensorboard_shows_what_the_metrics_say(metrics, run_dir):
    found = {}
    for path in (run_dir / "tensorboard").rglob("events.out.tfevents.*"):
        for event in read_events(path):
            for value in event.summary.value:
                found[value.tag, event.step] = value.simple_value
    for line in metrics:
        for field in ("loss", "lr", "grad_norm"):
            value = found[f"{field}/{line['task']}", line["step"]]
            assert value == pytest.approx(line[field], rel=1e-6)


def read_events(path: Path):
    """The records of a TFRecord file: length, checksum, bytes, checksum."""
    content, at = path.read_bytes(), 0
    while at < len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        yield Event.FromString(content[at + 12 : at + 12 + length])
        at += length + 16


def test_finished_run_returns_its_summary_without_training(
    summary, train, tasks, run_dir, adapter_bytes, capsys
):
    before = adapter_bytes(run_dir)
    assert train(run_dir, *tasks.values()) == summary
    assert adapter_bytes(run_dir) == before
    assert "finished" in capsys.readouterr().out


def test_another_configuration_is_refused_by_key(summary, train, tasks, run_dir, adapter_bytes):
    before = adapter_bytes(run_dir / "adapters")
    with pytest.raises(RunDirectoryError, match=r"two_tasks.*chunk_len: 64 there, 128 here"):
        train(run_dir, *tasks.values(), chunk_len=128)
    assert adapter_bytes(run_dir / "adapters") == before


def test_restart_begins_anew(train, make_task, tmp_path, adapter_bytes, capsys):
    train(tmp_path, make_task(steps=4, seed=1))
    assert "restart deletes" not in capsys.readouterr().out
    first = adapter_bytes(tmp_path / "adapters")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunDirectoryError, match="seed: 1 there, 2 here"):
        train(tmp_path, make_task(steps=2, seed=2))
    again = train(tmp_path, make_task(steps=2, seed=2), restart=True)
    notice = f"{tmp_path}: restart deletes the earlier training of tiny (4 steps)"
    assert notice in capsys.readouterr().out.splitlines()
    assert again.tasks["tiny"]["steps"] == 2
    assert [m["task_step"] for m in read_metrics(tmp_path)] == [1, 2]
    assert adapter_bytes(tmp_path / "adapters") != first
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_refused_run_directory_is_free_again_at_once(train, make_task, tmp_path):
    """Also where the exception lives on, as in a notebook."""
    train(tmp_path, make_task(steps=2))
    with pytest.raises(RunDirectoryError) as refused:
        train(tmp_path, make_task(steps=1))
    assert train(tmp_path, make_task(steps=1), restart=True).succeeded
    assert "belongs to another config" in str(refused.value)


@pytest.fixture(scope="module")
def with_failing_task(train, make_task, data, tmp_path_factory):
    """One task that diverges beside one that does not."""
    folder = tmp_path_factory.mktemp("failing")
    bad = make_task("bad", **DESTRUCTIVE, eval_data=data["short.eval"], steps=8)
    good = make_task("good", eval_data=data["short.eval"], steps=6)
    return folder, train(folder, bad, good, max_bad_steps=2)


def test_failing_task_is_named_and_the_others_succeed(with_failing_task, adapter_bytes):
    folder, summary = with_failing_task
    assert not summary.succeeded
    bad, good = summary.tasks["bad"], summary.tasks["good"]
    assert bad["status"] == "failed"
    assert "not finite in 2 consecutive updates" in bad["error"]
    assert bad["steps"] == 3 and bad["eval_loss"] is None
    assert good["status"] == "succeeded" and good["error"] is None and good["steps"] == 6
    assert {path.split("/")[0] for path in adapter_bytes(folder / "adapters")} == {"good"}
    assert strict_json((folder / "summary.json").read_text())["tasks"]["bad"]["status"] == "failed"


def test_skipped_updates_are_null_in_the_metrics(with_failing_task):
    folder, _ = with_failing_task
    bad = [m for m in read_metrics(folder) if m["task"] == "bad"]
    assert [m["skipped"] for m in bad] == [False, True, True]
    assert all(m["loss"] is None or m["grad_norm"] is None for m in bad[1:])


def test_failing_task_does_not_change_a_bit_of_another(
    with_failing_task, train, make_task, data, tmp_path, adapter_bytes
):
    folder, _ = with_failing_task
    # Of the failing task's rank and targets, so that both runs have the same pool.
    calm = make_task("bad", adapter=DESTRUCTIVE["adapter"], eval_data=data["short.eval"], steps=8)
    good = make_task("good", eval_data=data["short.eval"], steps=6)
    assert train(tmp_path, calm, good).succeeded
    found = adapter_bytes(folder / "adapters" / "good")
    assert found == adapter_bytes(tmp_path / "adapters" / "good")


def test_summary_is_json_where_a_loss_is_not_finite(train, make_task, data, tmp_path):
    """The last update may ruin an adapter: no training loss shows it, the evaluation does."""
    destructive = DESTRUCTIVE | {"adapter": LoRA(rank=4, alpha=64.0)}
    ruined = make_task("ruined", **destructive, eval_data=data["short.eval"], steps=1)
    summary = train(tmp_path, ruined)
    task = strict_json((tmp_path / "summary.json").read_text())["tasks"]["ruined"]
    assert task["eval_loss"] is None
    assert task["status"] == "failed" and not summary.succeeded


def test_training_goes_on_from_a_peft_folder(train, make_task, tmp_path):
    """A resumed task repeats, on the same batches, what an undivided one trains after it."""
    spec = LoRA(rank=3, alpha=6.0, target_modules=("down_proj", "q_proj"))
    steady = {"adapter": spec, "optimizer": SGD(0.1, momentum=0.0), "batch_size": 64}
    train(tmp_path / "whole", make_task(steps=5, **steady))
    train(tmp_path / "first", make_task(steps=3, **steady))
    folder = tmp_path / "first" / "adapters" / "tiny"
    train(tmp_path / "second", make_task(steps=2, resume_from=str(folder), **steady))
    whole = [m["loss"] for m in read_metrics(tmp_path / "whole")]
    second = [m["loss"] for m in read_metrics(tmp_path / "second")]
    assert whole[0] - whole[3] > 1e-3
    assert second == pytest.approx(whole[3:], rel=1e-5)


def test_reserved_sizes_and_given_lengths_keep_a_task_at_the_same_bits_beside_any_others(
    train, make_task, data, tmp_path, adapter_bytes
):
    own = make_task("own", adapter=LoRA(rank=2, alpha=4.0, target_modules=("q_proj",)))
    other = make_task(
        "other",
        data=data["long"],
        adapter=LoRA(rank=4, target_modules=("v_proj", "down_proj"), dropout=0.1),
        optimizer=SGD(1e-2),
    )
    sizes = {
        "max_sequences": 8,
        "reserved_slots": 3,
        "reserved_rank": 4,
        "reserved_targets": ("q_proj", "v_proj", "down_proj"),
        "reserved_dropout": True,
    }
    train(tmp_path / "alone", own, **sizes)
    train(tmp_path / "together", own, other, **sizes)
    found = adapter_bytes(tmp_path / "alone" / "adapters" / "own")
    assert found == adapter_bytes(tmp_path / "together" / "adapters" / "own")
    shapes = [
        json.loads((tmp_path / name / "run.json").read_text())["shape"]
        for name in ("alone", "together")
    ]
    assert shapes[0] == shapes[1]
    assert shapes[0]["max_sequences"] == 8


def test_details_are_recorded_of_as_many_rounds_whenever_their_number_doubles():
    assert all(has_details(index) for index in range(64))
    for power in range(6, 14):
        assert sum(has_details(index) for index in range(2**power, 2 ** (power + 1))) == 32


def test_commands_tell_which_exception_has_ended_training(
    train, make_task, tmp_path, monkeypatch, capsys
):
    run_dir, saved = tmp_path / "run", Recorder.save

    def save_and_fail(recorder):
        saved(recorder)
        recorder.wait()
        raise ZeroDivisionError("broken")

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Recorder, "save", save_and_fail)
        train(run_dir, make_task(steps=4), checkpoint_every=2)
    why = "its training process failed: ZeroDivisionError: broken"
    capsys.readouterr()
    assert export([f"--run_dir={run_dir}", f"--out={tmp_path / 'out'}"]) == 0
    warning = f"task tiny: warning: not finished (2 of 4 steps); {why}\n"
    assert capsys.readouterr().err == warning
    for command in ("eval", "generate"):
        prompt = ["--prompt=a"] if command == "generate" else []
        assert run_command(command, [f"--run_dir={run_dir}", *prompt], prog="") == 2
        assert f"{run_dir}: has no adapter yet; {why}\n" in capsys.readouterr().err
    assert train(run_dir, make_task(steps=4), checkpoint_every=2).succeeded
    assert "the process before failed: ZeroDivisionError: broken\n" in capsys.readouterr().out
    assert str(lock_state(run_dir)) == ""
