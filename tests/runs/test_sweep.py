"""Sweeps in training runs: rungs, tasks that wait for a place, breaks, and reports."""

import dataclasses
import io
import json
import re
from types import SimpleNamespace

import gin
import pytest
from rich.console import Console

from jaxmux import AdamW, PlanningError, RunDirectoryError, Sweep, Task, TaskError
from jaxmux.cli import gin_bindings
from jaxmux.cli.main import run_command
from jaxmux.engine.tasks import prepared_task
from jaxmux.planner.costs.admission import Admission
from jaxmux.runs import checkpoints, read_task
from jaxmux.runs.console import RunConsole
from jaxmux.runs.summary import Summary
from jaxmux.runs.sweep_results import plot_sweeps, sweep_table

RATES = [1e-4, 3e-2, 1e-2, 1e30]
# All runs have room for five tasks, so that they share their programs.
SLOTS = {"reserved_slots": 5}


@pytest.fixture(autouse=True)
def clean_gin():
    """gin's configuration is global."""
    yield
    gin.clear_config()


@pytest.fixture(scope="module")
def sweep(make_task, data):
    """Four configurations, the last of which fails; two go on after two steps, one after four."""
    task = make_task("base", steps=6, eval_data=data["short.eval"], optimizer=AdamW(1e-2))
    return Sweep(task, {"optimizer.learning_rate": RATES}, first_rung=2)


@pytest.fixture(scope="module")
def sweep_run(sweep, train, make_task, data, tmp_path_factory):
    """Trains the sweep beside another task, all in the same pool; returns the run directory and the
    summary."""
    folders = {}

    def run(places=None, folder=None, **keywords):
        folder = folder or tmp_path_factory.mktemp("run")
        other = make_task("other", steps=5, eval_data=data["long.eval"])
        keywords = {"max_bad_steps": 1, "tasks_at_once": places, **SLOTS} | keywords
        return folder, train(folder, other, sweep, **keywords)

    def cached(places=None):
        if places not in folders:
            folders[places] = run(places)
        return folders[places]

    cached.anew = run
    return cached


def held_out(folder):
    lines = map(json.loads, (folder / "held_out.jsonl").read_text().splitlines())
    return {(line["task"], line["task_step"]): line["loss"] for line in lines}


def test_the_worse_stop_at_rungs_and_failed_tasks_rank_last(sweep, sweep_run):
    folder, summary = sweep_run()
    names = [task.name for task in sweep.tasks()]
    losses = held_out(folder)
    results = [summary.tasks[name] for name in names]
    assert results[3]["status"] == "failed" and results[3]["steps"] == 2
    alive = names[:3]
    for rung, step in enumerate((2, 4), start=1):
        ranking = sorted(alive, key=lambda name: losses[name, step])
        kept = ranking[: 4 // 2**rung]
        for place, name in enumerate(ranking[len(kept) :], start=len(kept) + 1):
            task = summary.tasks[name]
            assert (task["status"], task["steps"]) == ("stopped early", step)
            assert task["eval_loss"] == losses[name, step]
            total = 4 if rung == 1 else 2
            assert task["stopped_early"].startswith(f"at rung {rung} (step {step}), ")
            assert f" of {total} by held-out loss" in task["stopped_early"]
            assert re.search(rf"\b{place}(st|nd|rd|th) of", task["stopped_early"])
            assert (folder / "adapters" / name / "adapter_model.safetensors").exists()
        alive = kept
    (best,) = alive
    assert (summary.tasks[best]["steps"], summary.tasks[best]["stopped_early"]) == (6, None)
    assert summary.tasks["other"]["steps"] == 5


def test_tasks_that_wait_for_a_place_get_the_same_bits(sweep_run, adapter_bytes):
    (whole, expected), (waited, found) = sweep_run(), sweep_run(2)
    assert found.tasks == expected.tasks
    assert held_out(waited) == held_out(whole)
    assert adapter_bytes(waited / "adapters") == adapter_bytes(whole / "adapters")
    at_once = {}
    for line in map(json.loads, (waited / "metrics.jsonl").read_text().splitlines()):
        at_once.setdefault(line["step"], set()).add(line["task"])
    assert {len(tasks) for tasks in at_once.values()} <= {1, 2}


def test_a_run_that_is_killed_again_and_again_gets_the_same_bits(
    sweep_run, adapter_bytes, monkeypatch, tmp_path
):
    (whole, expected), saves = sweep_run(), []
    save = checkpoints.Checkpoints.save

    def save_and_die(*arguments):
        save(*arguments)
        saves.append(1)
        if len(saves) % 3 == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints.Checkpoints, "save", save_and_die)
    kills, found, ended = 0, None, {}
    while found is None:
        try:
            _, found = sweep_run.anew(2, tmp_path / "killed", checkpoint_every=1)
        except KeyboardInterrupt:
            kills += 1
            # Also of what was done after the checkpoint, which is done again.
            text = (tmp_path / "killed" / "tasks.json").read_text()
            ended |= json.loads(text)["tasks"]
        if kills == 1 and found is None:
            _, progress, _ = read_task(tmp_path / "killed" / "checkpoints", "other")
            assert progress.step == 3
            with pytest.raises(RunDirectoryError, match="1e30' was still waiting for a place"):
                read_task(tmp_path / "killed" / "checkpoints", "base-learning_rate_1e30")
    assert kills > 2
    assert found.tasks == expected.tasks
    assert any("at rung 1" in (task["stopped_early"] or "") for task in ended.values())
    for name, task in ended.items():
        assert task == {field: expected.tasks[name][field] for field in task}
    assert not (tmp_path / "killed" / "tasks.json").exists()
    assert held_out(tmp_path / "killed") == held_out(whole)
    expected = adapter_bytes(whole / "adapters")
    assert adapter_bytes(tmp_path / "killed" / "adapters") == expected


@pytest.fixture(scope="module")
def halved(make_task, data):
    """Four configurations, of which one goes on after two of twelve steps."""
    task = make_task("base", steps=12, eval_data=data["short.eval"])
    rates = [1e-4, 1e-3, 1e-2, 3e-4]
    return Sweep(task, {"optimizer.learning_rate": rates}, first_rung=2, factor=4)


def tokens_of_rounds(folder):
    lines = map(json.loads, (folder / "rounds.jsonl").read_text().splitlines())
    return [line["tokens"] for line in lines]


def test_the_last_of_a_sweep_trains_in_fewer_rows_to_the_bits_of_training_alone(
    halved, train, adapter_bytes, monkeypatch, tmp_path, capsys
):
    whole = tmp_path / "whole"
    summary = train(whole, halved, **SLOTS)
    assert "1 of 4 tasks left: microbatches of 1 row of 128 tokens\n" in capsys.readouterr().out
    assert tokens_of_rounds(whole) == 2 * [256] + 10 * [128]
    (best,) = (name for name, task in summary.tasks.items() if task["steps"] == 12)
    (alone,) = (task for task in halved.tasks() if task.name == best)
    train(tmp_path / "alone", alone, **SLOTS)
    assert tokens_of_rounds(tmp_path / "alone") == 12 * [256]
    expected = adapter_bytes(tmp_path / "alone" / "adapters")
    found = adapter_bytes(whole / "adapters")
    assert {path: found[path] for path in expected} == expected

    save, saves = checkpoints.Checkpoints.save, []

    def save_and_die(*arguments):
        save(*arguments)
        saves.append(1)
        if len(saves) in (1, 3):
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints.Checkpoints, "save", save_and_die)
    for _ in range(2):
        # First between the rung and the decision there, and then in the last five rounds.
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "killed", halved, checkpoint_every=2 if not saves else 5, **SLOTS)
    assert train(tmp_path / "killed", halved, **SLOTS).tasks == summary.tasks
    assert tokens_of_rounds(tmp_path / "killed") == tokens_of_rounds(whole)
    assert adapter_bytes(tmp_path / "killed" / "adapters") == found


def test_tasks_that_end_early_leave_smaller_microbatches_and_places_to_the_others(
    make_task, data, train, adapter_bytes, tmp_path
):
    """One of four tasks has more steps than the others; one place of two is enough for it."""
    tasks = [make_task(f"short{i}", steps=2) for i in range(3)]
    tasks.append(make_task("long", steps=12, eval_data=data["short.eval"]))
    train(tmp_path / "together", *tasks, **SLOTS)
    assert tokens_of_rounds(tmp_path / "together") == 2 * [256] + 10 * [128]
    train(tmp_path / "waiting", *tasks, tasks_at_once=2, **SLOTS)
    train(tmp_path / "alone", tasks[-1], **SLOTS)
    expected = adapter_bytes(tmp_path / "alone" / "adapters")
    for name in ("together", "waiting"):
        found = adapter_bytes(tmp_path / name / "adapters")
        assert {path: found[path] for path in expected} == expected
    # As few steps as are left here are not worth a compilation.
    train(tmp_path / "brief", *tasks[:-1], dataclasses.replace(tasks[-1], steps=9), **SLOTS)
    assert tokens_of_rounds(tmp_path / "brief") == 9 * [256]


@pytest.mark.long
def test_a_plan_tells_the_smaller_microbatches_that_training_then_takes(
    write_config, data, tmp_path, capsys
):
    config = write_config(
        "fine_tune.tasks = [@tiny/Sweep()]",
        "tiny/Sweep.task = @tiny/Task()",
        "tiny/Task.steps = 12",
        f"tiny/Task.eval_data = {data['short.eval']!r}",
        "tiny/Sweep.space = {'seed': [1, 2, 3, 4]}",
        "tiny/Sweep.first_rung = 1",
        "tiny/Sweep.factor = 4",
        run=SLOTS,
    )
    assert run_command("plan", [f"--gin_file={config}", "--rounds=2"], prog="jaxmux plan") == 0
    said = r"(\d) of 4 tasks left: microbatches of (\d) rows? of 128 tokens"
    planned = re.findall(r"after step (\d), " + said, capsys.readouterr().out)
    assert planned == [("1", "1", "1")]
    arguments = [f"--gin_file={config}", f"--run_dir={tmp_path / 'run'}"]
    assert run_command("train", arguments, prog="jaxmux train") == 0
    found = re.findall(said, capsys.readouterr().out)
    assert found == [(left, rows) for _, left, rows in planned]


def test_records_tell_the_values_of_each_task(sweep, sweep_run):
    folder, summary = sweep_run()
    names = [task.name for task in sweep.tasks()]
    values = {name: {"optimizer.learning_rate": r} for name, r in zip(names, RATES, strict=True)}
    assert summary.sweeps == {"base": values} == Summary.load(folder / "summary.json").sweeps
    recorded = json.loads((folder / "run.json").read_text())["sweeps"]["base"]
    assert recorded == {"first_rung": 2, "factor": 2, "values": values}
    found = json.loads((folder / "sweep.json").read_text())["base"]["tasks"]
    losses = held_out(folder)
    assert list(found)[-1] == names[3] and found.keys() == values.keys()
    finite = [task["eval_loss"] for task in found.values() if task["status"] != "failed"]
    assert finite == sorted(finite)
    for name, task in found.items():
        assert task["values"] == values[name]
        assert task["held_out"] == [[s, loss] for (n, s), loss in losses.items() if n == name]
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_fits_into_80_columns_and_begins_with_the_best(sweep, sweep_run):
    _, summary = sweep_run()
    text = io.StringIO()
    Console(file=text, width=80).print(sweep_table(sweep, summary))
    lines = [line.split() for line in text.getvalue().splitlines() if line.strip()]
    assert lines[0] == "learning_rate steps train held-out result".split()
    rows = lines[2:6]
    assert [row[-1] for row in rows].count("failed") == 1 and rows[-1][-1] == "failed"
    assert [row[-2:] for row in rows].count(["rung", "2"]) == 1
    shown = [float(row[3]) for row in rows[:-1]]
    assert shown == sorted(shown)


def test_another_sweep_is_another_config(sweep, sweep_run, train, make_task, data):
    folder, _ = sweep_run()
    other = make_task("other", steps=5, eval_data=data["long.eval"])
    later = Sweep(sweep.task, sweep.space, first_rung=3)
    with pytest.raises(RunDirectoryError, match="sweeps.base.first_rung: 2 there, 3 here"):
        train(folder, other, later)
    with pytest.raises(RunDirectoryError, match="sweeps"):
        train(folder, other, *later.tasks())


def test_a_first_rung_that_never_comes_is_refused_and_data_is_read_once(
    sweep, train, tmp_path, monkeypatch
):
    read, load = [], prepared_task.load_samples

    def load_and_note(source, *arguments, **keywords):
        read.append(source.path)
        return load(source, *arguments, **keywords)

    monkeypatch.setattr(prepared_task, "load_samples", load_and_note)
    message = "sweep 'base': first_rung is 6, but its tasks train only 6 steps"
    with pytest.raises(TaskError, match=message):
        Sweep(sweep.task, sweep.space, first_rung=6)
    # How many steps an epoch has is known when the data is read.
    task = dataclasses.replace(sweep.task, steps=None, epochs=1)
    with pytest.raises(TaskError, match="first_rung is 99, but its tasks train only"):
        train(tmp_path, Sweep(task, sweep.space, first_rung=99))
    assert read == [sweep.task.data.path, sweep.task.eval_data.path]


def test_configurations_wait_if_memory_has_no_room_for_all(
    sweep, train, tmp_path, monkeypatch, capsys
):
    """Here the memory is an invention: two slots fit."""
    require = Admission.require

    def two_fit(self, tasks, live=None):
        require(self, tasks, live)
        if len(tasks) + len(live or {}) > 2:
            raise PlanningError("task 'x' does not fit beside 'y'")

    monkeypatch.setattr(Admission, "require", two_fit)
    options = {"memory_gib": 1, **SLOTS}
    with pytest.raises(PlanningError, match="so that the others wait for a place, tasks_at_once=2"):
        train(tmp_path / "tasks", *sweep.tasks(), **options)
    train(tmp_path / "sweep", Sweep(sweep.task, {"seed": [0, 1, 2]}), **options)
    assert "2 of 3 tasks train at the same time; the others wait" in capsys.readouterr().out


def test_a_config_has_sweeps(write_config, data, tmp_path):
    config = write_config(
        "fine_tune.tasks = [@tiny/Sweep(), @other/Task()]",
        "tiny/Sweep.task = @tiny/Task()",
        "tiny/Sweep.space = {'adapter': [@tiny/LoRA(), @IA3()], 'seed': @seeds/Integers()}",
        "tiny/Sweep.samples = 3",
        "tiny/Sweep.first_rung = 1",
        "seeds/Integers.low = 1",
        "seeds/Integers.high = 9",
        f"tiny/Task.eval_data = {data['short.eval']!r}",
        "other/Task.name = 'other'",
        f"other/Task.data = {data['short']!r}",
        "other/Task.steps = 2",
    )
    gin_bindings.parse([config], [])
    sweep, other = gin_bindings.run_config().tasks
    assert len(sweep.tasks()) == 3 and other.name == "other"
    resolved = tmp_path / "resolved.gin"
    resolved.write_text(gin_bindings.resolved_config())
    gin_bindings.parse([str(resolved)], [])
    assert gin_bindings.run_config().tasks == [sweep, other]


def test_mistakes_in_a_config_are_named(write_config, tmp_path, capsys):
    lines = ["fine_tune.tasks = [@tiny/Sweep()]", "tiny/Sweep.task = @tiny/Task()"]
    for line, message in (
        ("tiny/Sweep.space = {'adapter.rnk': [1]}", "sweep 'tiny': space: 'adapter.rnk': "),
        ("tiny/Sweep.spaces = {'seed': [1]}", "did you mean space?"),
        ("tiny/Sweep.space = {'seed': @Integer()}", "did you mean Integers?"),
        ("tiny/Sweep.samples = 3", "tiny/Sweep: not set: space"),
    ):
        arguments = [f"--gin_file={write_config(*lines, line)}", f"--run_dir={tmp_path}"]
        assert run_command("train", arguments, prog="jaxmux train") == 2
        assert message in capsys.readouterr().err


def test_plan_shows_all_configurations(write_config, capsys):
    config = write_config(
        "fine_tune.tasks = [@tiny/Sweep()]",
        "tiny/Sweep.task = @tiny/Task()",
        "tiny/Sweep.space = {'adapter.rank': [2, 4]}",
    )
    assert run_command("plan", [f"--gin_file={config}", "--rounds=2"], prog="jaxmux plan") == 0
    shown = capsys.readouterr().out
    assert "tiny-rank_2" in shown and "tiny-rank_4" in shown
    arguments = [f"--gin_file={config}", "--gin.fine_tune.tasks_at_once=1"]
    assert run_command("plan", arguments, prog="jaxmux plan") == 0
    shown = capsys.readouterr().out
    assert "the plan is of the first 1 of 2 tasks; the others wait" in shown
    assert "tiny-rank_4" not in shown


def test_values_of_any_characters_are_shown(tmp_path, drawn):
    values = ["[qv] from $5 to $6_", "$^$ [/b]", "two\nlines\ud800\0"]
    task = Task("base", "a.jsonl", steps=3, validation_fraction=0.1)
    sweep = Sweep(task, {"sample_prompt": values})
    losses = {"train_loss_first": 2.0, "train_loss_last": 1.0, "eval_loss": 1.0}
    result = {"status": "succeeded", "steps": 3, "skipped": 0, "eval_target_tokens": 5} | losses
    results = {own.name: result for own in sweep.tasks()}
    summary = Summary(results, *[0] * 4, {}, sweeps={"base": dict.fromkeys(results, {})})
    path, text = tmp_path / "sweep.png", io.StringIO()
    plot_sweeps([sweep], summary, {name: {0: 2.0, 3: 1.0} for name in results}, path)
    assert path.stat().st_size > 10_000
    directory = SimpleNamespace(sweep_results="", sweep_plot=path, adapter=str)
    console = RunConsole(Console(file=text, width=80))
    console.summarise(summary, directory, SimpleNamespace(vocab_size=9), [sweep])
    assert all(value in text.getvalue() for value in values[:2])
