"""Training runs on several devices: the results of one device, and what is refused."""

import contextlib
import dataclasses
import io
import json
import re
import shutil
import signal
from types import SimpleNamespace

import jax
import pytest

from jaxmux import SGD, Interrupted, LoRA, PlanningError, RunOptions, Sweep
from jaxmux.engine.devices import compiled_stages
from jaxmux.errors import OutOfDeviceMemory
from jaxmux.models import Backbone, BackboneConfig, save_backbone
from jaxmux.runs import checkpoints
from jaxmux.server.server import ServerOptions, tuning_server
from jaxmux.server.task import ENDED

from ..conftest import SERVER


@pytest.fixture(scope="module")
def tasks(make_task, data):
    adapter = LoRA(rank=4, target_modules=("down_proj",), dropout=0.1)
    return (
        make_task("a", steps=5, batch_size=14, eval_data=data["short.eval"]),
        make_task("b", steps=3, batch_size=8, adapter=adapter, optimizer=SGD(1e-2)),
    )


OPTIONS = {"tokens_per_microbatch": 64, "max_sequences": 4, "checkpoint_every": 2}
OPTIONS |= {"reserved_dropout": True, "reserved_targets": ("q_proj", "down_proj")}


@pytest.fixture(scope="module")
def prompted(tasks):
    """The tasks, of which one has a prompt to complete at its end."""
    return dataclasses.replace(tasks[0], sample_prompt="red"), tasks[1]


@pytest.fixture(scope="module")
def on_one_device(prompted, train, tmp_path_factory):
    """The folder of a run of the tasks on one device, its results, and what it has printed."""
    folder, text = tmp_path_factory.mktemp("runs") / "one", io.StringIO()
    with contextlib.redirect_stdout(text):
        results = train(folder, *prompted, **OPTIONS)
    return folder, results, text.getvalue()


def losses(run_dir):
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    timed = ("time", "tokens_per_second")
    return [{k: v for k, v in line.items() if k not in timed} for line in lines]


def stop_at_pass(number, monkeypatch):
    """Sends a signal when this forward pass of a part is dispatched, counted from 1."""
    forward, calls = compiled_stages.forward_into, []

    def forward_and_raise(*arguments):
        calls.append(1)
        if len(calls) == number:
            signal.raise_signal(signal.SIGTERM)
        return forward(*arguments)

    forward_and_raise.lower = forward.lower
    monkeypatch.setattr(compiled_stages, "forward_into", forward_and_raise)


def test_a_mesh_gives_the_results_of_one_device(
    prompted, on_one_device, train, tmp_path, adapter_bytes, capsys
):
    """The losses, adapters and completions."""
    folder, one, printed = on_one_device
    two = train(tmp_path / "two", *prompted, mesh="pp2", **OPTIONS)
    printed_by_two = capsys.readouterr().out
    assert "mesh pp2,tp1: stages of 1, 1 layers, 1 data shard\n" in printed_by_two
    assert re.search(r"mesh pp2,tp1: 0\.\d MiB a device for weights and tasks\n", printed_by_two)
    completions = [re.search(r"a: red\n.*\n.*\n", text)[0] for text in (printed, printed_by_two)]
    assert completions[0] == completions[1]
    assert losses(tmp_path / "two") == losses(folder)
    found = adapter_bytes(tmp_path / "two" / "adapters")
    assert found == adapter_bytes(folder / "adapters")
    assert two.tasks == one.tasks


@pytest.mark.parametrize(
    ("schedule", "layers"),
    [("gpipe", 2), pytest.param("interleaved", 4, marks=pytest.mark.slow)],
)
def test_the_schedule_of_the_options_is_the_one_that_runs(
    schedule, layers, tasks, train, backbone, tmp_path, capsys
):
    """With GPipe, all forward passes of a round come before the backward passes; an interleaved
    pipeline has two parts of the backbone on each stage."""
    folder, run_dir = tmp_path / "backbone", tmp_path / "run"
    shutil.copytree(backbone, folder)
    config = dataclasses.replace(BackboneConfig.from_folder(backbone), num_layers=layers)
    save_backbone(Backbone.random(config, seed=7), folder)
    tasks = [dataclasses.replace(task, steps=1, eval_data=None) for task in tasks]
    train(run_dir, *tasks, backbone=folder, mesh="pp2", schedule=schedule, **OPTIONS)
    shown = capsys.readouterr().out
    assert f" layers, 1 data shard, schedule {schedule}\n" in shown
    lines = map(json.loads, (run_dir / "rounds.jsonl").read_text().splitlines())
    first = next(line["passes"] for line in lines if line.get("passes"))
    passes = [(letter, part) for _, _, stage, part, _, _, letter in first if stage == 0]
    if schedule == "gpipe":
        count = len(passes) // 2
        assert count > 1 and passes == [("F", 0)] * count + [("B", 0)] * count
    else:
        assert {part for _, part in passes} == {0, 2}


def test_a_run_that_is_stopped_within_a_round_goes_on_with_other_devices(
    tasks, on_one_device, train, tmp_path, adapter_bytes, monkeypatch
):
    whole, *_ = on_one_device
    stop_at_pass(17, monkeypatch)
    with pytest.raises(Interrupted):
        train(tmp_path / "moved", *tasks, mesh="pp2", **OPTIONS)
    (saved,) = (tmp_path / "moved" / "checkpoints").glob("*/run/metadata")
    saved = json.loads(saved.read_text())
    accumulated = [len(saved["tasks"][task.name]["accumulated"]) for task in tasks]
    assert 0 < sum(accumulated) < 22
    train(tmp_path / "moved", *tasks, **OPTIONS)
    assert losses(tmp_path / "moved") == losses(whole)
    found = adapter_bytes(tmp_path / "moved" / "adapters")
    assert found == adapter_bytes(whole / "adapters")


@pytest.mark.parametrize("mesh", ["pp2", pytest.param("dp2,pp2,tp2", marks=pytest.mark.slow)])
def test_a_run_on_a_mesh_is_close_to_one_device_and_resumes_to_the_same_bits(
    mesh, tasks, on_one_device, train, tmp_path, adapter_bytes, monkeypatch
):
    """The checkpoint is one between two rounds, as after a kill."""
    _, one, _ = on_one_device
    whole = train(tmp_path / "whole", *tasks, mesh=mesh, **OPTIONS)
    expected = one.tasks["a"]["eval_loss"]
    assert whole.tasks["a"]["eval_loss"] == pytest.approx(expected, rel=1e-4)
    for name, task in one.tasks.items():
        assert whole.tasks[name]["train_loss_last"] == pytest.approx(
            task["train_loss_last"], rel=1e-4
        )
    save, calls = checkpoints.Checkpoints.save, []

    def save_and_die(*arguments):
        save(*arguments)
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints.Checkpoints, "save", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "killed", *tasks, mesh=mesh, **OPTIONS)
    monkeypatch.undo()
    # The sum of gradients would be divided otherwise among the devices that add to it.
    for saved in (tmp_path / "killed" / "checkpoints").glob("*/run/metadata"):
        found = json.loads(saved.read_text())["tasks"].values()
        assert not any(task["accumulated"] for task in found)
    train(tmp_path / "killed", *tasks, mesh=mesh, **OPTIONS)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    found = adapter_bytes(tmp_path / "killed" / "adapters")
    assert found == adapter_bytes(tmp_path / "whole" / "adapters")


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("pp3", "3 stages for 2 layers, .* it would fit with pp2"),
        ("pp9", "9 stages for 2 layers"),
        ("tp3", "mesh pp1,tp3: tp3 does not divide num_attention_heads=.* that fits is tp2"),
        ("fsdp5", "mesh pp1,fsdp5: fsdp5 does not divide hidden_size=.* that fits is fsdp4"),
        ("pipeline", "'pipeline' is no axis with its size"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(mesh, message, tasks, train, tmp_path):
    with pytest.raises(PlanningError, match=message):
        train(tmp_path, *tasks, mesh=mesh, **OPTIONS)
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize(
    ("mesh", "devices", "message"),
    [
        ("pp2", 1, "2 devices, but there is 1; it would fit with pp1,tp1"),
        ("pp2 + tp1", 2, r"3 devices, but there are 2; it would fit with 2\*\(pp1,tp1\)"),
    ],
)
def test_too_few_devices_are_named(mesh, devices, message, tasks, train, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [None] * devices)
    with pytest.raises(PlanningError, match=message):
        train(tmp_path, *tasks, mesh=mesh, **OPTIONS)


def test_a_process_without_devices_of_the_mesh_is_refused(tasks, train, tmp_path, monkeypatch):
    devices = [SimpleNamespace(process_index=number // 2) for number in range(4)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    problem = "2 devices, of which process 1 has none; take a mesh of all 4 devices"
    with pytest.raises(PlanningError, match=problem):
        train(tmp_path, *tasks, mesh="pp2", **OPTIONS)


@pytest.fixture
def first_mesh_is_full(monkeypatch):
    """Lets the device run out of memory in the backward pass of the first mesh that is tried."""
    backward, first = compiled_stages.backward, []

    def failing(program, *arguments):
        if not first:
            first.append(program.home.mesh.shape)
        if program.home.mesh.shape == first[0]:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return backward(program, *arguments)

    failing.lower, failing.eval_shape = backward.lower, backward.eval_shape
    monkeypatch.setattr(compiled_stages, "backward", failing)


@pytest.mark.slow
def test_a_chosen_mesh_that_does_not_fit_gives_way_to_the_next_one(
    tasks, train, tmp_path, first_mesh_is_full, monkeypatch, capsys
):
    task = dataclasses.replace(tasks[1], steps=1)
    devices = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    found = train(tmp_path / "auto", task, mesh="auto", remat="full", **OPTIONS)
    printed = capsys.readouterr().out
    full, following = re.findall(r"mesh (\S+) \([\d.e-]+ s a round\) is predicted", printed)
    refusal = f"mesh {full} does not fit into memory after all (a microbatch of "
    assert full != following and refusal in printed
    expected = train(tmp_path / "named", task, mesh=following, remat="full", **OPTIONS)
    assert found.tasks == expected.tasks
    assert losses(tmp_path / "auto") == losses(tmp_path / "named")
    record, other = (json.loads((tmp_path / n / "run.json").read_text()) for n in ("auto", "named"))
    assert record["shape"] == other["shape"]


@pytest.mark.slow
def test_a_named_mesh_that_does_not_fit_is_an_error(tasks, train, tmp_path, first_mesh_is_full):
    with pytest.raises(OutOfDeviceMemory, match="does not fit into the device's memory"):
        train(tmp_path / "named", *tasks, mesh="pp2", remat="full", **OPTIONS)


def test_a_schedule_that_does_not_suit_the_mesh_is_refused(tasks, train, tmp_path):
    with pytest.raises(PlanningError, match="schedule='gpipe' .* at least pp2, found pp1,tp1"):
        train(tmp_path, *tasks, schedule="gpipe", **OPTIONS)
    with pytest.raises(PlanningError, match="needs at least 4 layers; the backbone has 2"):
        train(tmp_path, *tasks, mesh="pp2", schedule="interleaved", **OPTIONS)
    with pytest.raises(PlanningError, match="schedule should be one of 'auto', '1f1b', 'gpipe'"):
        RunOptions(schedule="zigzag")
    assert not (tmp_path / "run.json").exists()


def test_the_mesh_is_read_with_the_options():
    assert str(RunOptions(mesh="pp4").deployment) == "pp4,tp1"
    with pytest.raises(PlanningError, match="mesh should be a string that is not empty or None"):
        RunOptions(mesh=4)


def test_unlike_replicas_are_close_to_one_device_also_after_a_stop_within_a_round(
    tasks, on_one_device, train, tmp_path, monkeypatch, capsys
):
    """When the run is stopped, every replica has gradients of its own."""
    mesh, (_, one, _) = "pp2 + tp1", on_one_device
    whole = train(tmp_path / "whole", *tasks, mesh=mesh, **OPTIONS)
    printed = capsys.readouterr().out
    assert "mesh pp2,tp1: stages of 1, 1 layers, 1 data shard\n" in printed
    assert "mesh pp1,tp1: microbatches of " in printed
    assert whole.tasks["a"]["eval_loss"] == pytest.approx(one.tasks["a"]["eval_loss"], rel=1e-4)
    stop_at_pass(14, monkeypatch)
    with pytest.raises(Interrupted):
        train(tmp_path / "stopped", *tasks, mesh=mesh, **OPTIONS)
    monkeypatch.undo()
    (saved,) = (tmp_path / "stopped" / "checkpoints").glob("*/run/metadata")
    saved = json.loads(saved.read_text())
    assert 0 < sum(len(saved["tasks"][task.name]["accumulated"]) for task in tasks) < 22
    train(tmp_path / "stopped", *tasks, mesh=mesh, **OPTIONS)
    found, expected = (
        {(line["task"], line["task_step"]): line["loss"] for line in losses(tmp_path / folder)}
        for folder in ("stopped", "whole")
    )
    assert found == pytest.approx(expected, rel=1e-5)


def test_tasks_of_a_server_move_between_one_device_and_a_pipeline_and_keep_their_bits(
    backbone, data, make_task, adapter_bytes, tmp_path
):
    """Batches of "large" take several rounds, and servers end in the middle of one."""
    tasks = [
        make_task("large", data=data["long"], batch_size=9, steps=3),
        make_task("short", steps=5),
    ]

    def adapters(folder, *servers):
        """Each server has a mesh and ends after a step of "short"; the last one ends later."""
        for mesh, last in servers:
            options = ServerOptions(mesh=mesh, round_tokens=64, **SERVER | OPTIONS)
            with tuning_server(backbone, folder, options, say=lambda line: None) as server:
                for task in () if server.statuses() else tasks:
                    server.register(task)
                server.step()
                while server.status("short").step < last:
                    server.step()
                if last < 5:
                    assert server.status("short").step == last
                    continue
                while any(status.state not in ENDED for status in server.statuses()):
                    server.step()
        return adapter_bytes(folder / "adapters")

    moved = adapters(tmp_path / "moved", (None, 1), ("pp2", 3), (None, 5))
    assert moved == adapters(tmp_path / "calm", (None, 5))


@pytest.mark.slow
def test_rungs_on_a_mesh_are_those_of_one_device_also_after_a_stop_within_a_round(
    make_task, train, data, tmp_path, adapter_bytes, monkeypatch
):
    """Three of the four configurations have a place at the same time."""
    task = make_task("base", steps=5, batch_size=14, eval_data=data["short.eval"])
    sweep = Sweep(task, {"optimizer.learning_rate": [1e-4, 3e-2, 1e-2, 1e-3]}, first_rung=2)
    options = OPTIONS | {"reserved_slots": 4}
    one = train(tmp_path / "one", sweep, **options)
    stop_at_pass(31, monkeypatch)
    with pytest.raises(Interrupted):
        train(tmp_path / "two", sweep, mesh="pp2", tasks_at_once=3, **options)
    two = train(tmp_path / "two", sweep, mesh="pp2", tasks_at_once=3, **options)
    assert two.tasks == one.tasks
    assert sum(task["stopped_early"] is not None for task in one.tasks.values()) == 3
    expected = adapter_bytes(tmp_path / "one" / "adapters")
    assert adapter_bytes(tmp_path / "two" / "adapters") == expected


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["pp2", "dp2,pp2,tp2"])
def test_the_last_of_a_sweep_trains_in_fewer_rows_on_a_mesh(
    mesh, make_task, data, train, tmp_path, adapter_bytes, monkeypatch
):
    """Close to one device alone, and to the same bits after it was killed behind the rung."""
    task = make_task("base", steps=12, eval_data=data["short.eval"])
    rates = [1e-4, 1e-2, 1e-3, 3e-4, 3e-3, 3e-2]
    sweep = Sweep(task, {"optimizer.learning_rate": rates}, first_rung=2, factor=6)
    keywords = {"tokens_per_microbatch": 384, "mesh": mesh}

    def tokens(run_dir):
        lines = map(json.loads, (run_dir / "rounds.jsonl").read_text().splitlines())
        return [line["tokens"] / line["microbatches"] for line in lines]

    whole = train(tmp_path / "whole", sweep, **keywords)
    found = tokens(tmp_path / "whole")
    assert found[:2] == 2 * [384] and max(found[2:]) < 384
    (best,) = (name for name, task in whole.tasks.items() if task["steps"] == 12)
    (task,) = (task for task in sweep.tasks() if task.name == best)
    alone = train(tmp_path / "alone", task, **keywords | {"mesh": None})
    save, calls = checkpoints.Checkpoints.save, []

    def save_and_die(*arguments):
        save(*arguments)
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints.Checkpoints, "save", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "killed", sweep, checkpoint_every=4, **keywords)
    again = train(tmp_path / "killed", sweep, **keywords)
    assert again.tasks == whole.tasks and tokens(tmp_path / "killed") == found
    adapters = adapter_bytes(tmp_path / "whole" / "adapters")
    assert adapter_bytes(tmp_path / "killed" / "adapters") == adapters
    for field in ("train_loss_last", "eval_loss"):
        assert whole.tasks[best][field] == pytest.approx(alone.tasks[best][field], rel=1e-4)
