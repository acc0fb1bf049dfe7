"""Held-out losses during a training run: their file, early stopping, and the best adapter."""

import json
from functools import partial
from pathlib import Path

import pytest

from jaxmux import AdamW
from jaxmux.cli.main import run_command
from jaxmux.data import SplitPart
from jaxmux.runs import checkpoints

export = partial(run_command, "export", prog="jaxmux export")


def lines(run_dir):
    found = [json.loads(line) for line in (run_dir / "held_out.jsonl").read_text().splitlines()]
    for line in found:
        assert line.pop("time") > 0
    return found


@pytest.fixture
def measured(make_task, data):
    """A task whose held-out loss soon rises."""
    return make_task(
        "measured",
        steps=40,
        eval_data=data["short.eval"],
        eval_every=2,
        keep_best=True,
        patience=3,
        optimizer=AdamW(0.05),
    )


def test_a_run_that_was_killed_keeps_the_best_adapter(
    measured, make_task, train, tmp_path, adapter_bytes, monkeypatch, capsys
):
    tasks = [measured, make_task("other", steps=8)]
    whole = train(tmp_path / "whole", *tasks, checkpoint_every=5)
    found, printed = whole.tasks["measured"], capsys.readouterr().out
    assert found["status"] == "stopped early" and found["steps"] < 40
    assert found["best_step"] == found["steps"] - 6
    assert f"measured step {found['best_step']}/40 held-out loss " in printed
    assert "task measured: stopped early, 3 measurements of the held-out loss" in printed
    losses = {line["task_step"]: line["loss"] for line in lines(tmp_path / "whole")}
    assert list(losses) == list(range(0, found["steps"] + 1, 2))
    best = min((step for step in losses if step), key=losses.get)
    assert (found["best_step"], found["eval_loss"]) == (best, losses[best])
    assert found["eval_loss_first"] == losses[0]
    save, calls = checkpoints.Checkpoints.save, []

    def save_and_die(*arguments):
        save(*arguments)
        calls.append(1)
        # The best adapter is known by now, and training goes on.
        if arguments[1] > best + 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints.Checkpoints, "save", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "killed", *tasks, checkpoint_every=1)
    monkeypatch.undo()
    again = train(tmp_path / "killed", *tasks, checkpoint_every=5)
    assert again.tasks == whole.tasks
    assert lines(tmp_path / "killed") == lines(tmp_path / "whole")
    expected = adapter_bytes(tmp_path / "whole" / "adapters")
    assert adapter_bytes(tmp_path / "killed" / "adapters") == expected
    assert export([f"--run_dir={tmp_path / 'whole'}", f"--out={tmp_path / 'out'}"]) == 0
    assert adapter_bytes(tmp_path / "out") == expected


def test_a_task_whose_patience_ended_with_its_last_step_is_not_extended_beyond_it(
    make_task, train, tmp_path, data
):
    fields = {"eval_data": data["letters.eval"], "eval_every": 1, "patience": 2}
    for steps, why in ((3, None), (7, "without a lower one than after step 1")):
        found = train(tmp_path, make_task("a", steps=steps, optimizer=AdamW(3e-2), **fields)).tasks[
            "a"
        ]
        how = "succeeded" if why is None else "stopped early"
        assert (found["status"], found["steps"], found["best_step"]) == (how, 3, 1)
        assert found["stopped_early"] is None if why is None else why in found["stopped_early"]


def test_a_run_of_a_version_without_these_settings_goes_on(make_task, train, tmp_path):
    train(tmp_path, make_task("a", steps=2))
    record = json.loads((tmp_path / "run.json").read_text())
    fields = "eval_every", "keep_best", "patience", "max_seconds", "objective", "best_metric"
    for field in fields:
        del record["tasks"]["a"][field]
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert train(tmp_path, make_task("a", steps=3)).tasks["a"]["steps"] == 3


def test_held_out_records_of_a_fraction_train_like_files_with_them(
    make_task, train, data, tmp_path, adapter_bytes
):
    rows = Path(data["short"]).read_text().splitlines(keepends=True)
    for held_out in (False, True):
        part = SplitPart(0.3, 5, held_out)
        own = [row for number, row in enumerate(rows) if part.has(number)]
        (tmp_path / f"{held_out}.jsonl").write_text("".join(own))
    files = {"data": str(tmp_path / "False.jsonl"), "eval_data": str(tmp_path / "True.jsonl")}
    tasks = [
        make_task("files", seed=5, eval_every=1, **files),
        make_task("fraction", seed=5, eval_every=1, validation_fraction=0.3),
    ]
    assert train(tmp_path / "run", *tasks).succeeded
    one, other = (
        [line | {"task": None} for line in lines(tmp_path / "run") if line["task"] == task.name]
        for task in tasks
    )
    assert len(one) == 4 and one == other
    adapters = [adapter_bytes(tmp_path / "run" / "adapters" / task.name) for task in tasks]
    weights = [own["adapter_model.safetensors"] for own in adapters]
    assert weights[0] == weights[1]
