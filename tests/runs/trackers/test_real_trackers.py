"""Weights & Biases and MLflow themselves keep what the files of a run say, also after a break.

Nothing here needs a network: Weights & Biases writes files in its offline mode, MLflow a database.
`make test-trackers` installs both.
"""

import json
import logging
from collections import defaultdict

import pytest

from jaxmux.runs import checkpoints


@pytest.fixture
def interrupted(make_task, train, data, tmp_path, monkeypatch):
    """A run that has ended after a break behind a checkpoint; its folder."""

    def run(tracker: str):
        tasks = [make_task("a", steps=7, eval_data=data["short.eval"], eval_every=2)]
        tasks.append(make_task("b", steps=5))
        save = checkpoints.Checkpoints.save

        def save_and_die(*arguments):
            if arguments[1] > 6:
                raise KeyboardInterrupt
            save(*arguments)

        options = {"checkpoint_every": 2, "trackers": tracker}
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints.Checkpoints, "save", save_and_die)
            with pytest.raises(KeyboardInterrupt):
                train(tmp_path / "run", *tasks, **options)
        assert train(tmp_path / "run", *tasks, **options).succeeded
        return tmp_path / "run"

    return run


def expected(run_dir) -> dict[str, list[tuple[int, float]]]:
    found = defaultdict(list)
    for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()):
        for name in ("loss", "lr", "grad_norm"):
            found[f"{name}/{line['task']}"].append((line["step"], line[name]))
    for line in map(json.loads, (run_dir / "held_out.jsonl").read_text().splitlines()):
        found[f"held_out_loss/{line['task']}"].append((line["step"], line["loss"]))
    return found


def test_mlflow_has_one_run_with_every_round_once(interrupted, tmp_path, monkeypatch, capsys):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    run_dir = interrupted("mlflow")
    assert "training goes on without" not in capsys.readouterr().out
    client = MlflowClient()
    experiment = client.get_experiment_by_name("jaxmux")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["tasks/a/adapter/rank"] == "2"
    found = {
        name: [
            (metric.step, metric.value)
            for metric in client.get_metric_history(run.info.run_id, name)
        ]
        for name in run.data.metrics
    }
    assert {name: sorted(own) for name, own in found.items()} == expected(run_dir)


def test_wandb_has_one_run_with_every_round_once(interrupted, monkeypatch, capsys):
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    run_dir = interrupted("wandb")
    assert "training goes on without" not in capsys.readouterr().out
    files = sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb"))
    # Each call writes a file; `wandb sync` joins those with the same id.
    id = json.loads((run_dir / "trackers.json").read_text())["wandb"]
    assert [path.stem for path in files] == [f"run-{id}"] * 2
    found, config = defaultdict(list), {}
    for path in files:
        for content in records(path.read_bytes()):
            record = Record.FromString(content)
            config |= {own.key: own.value_json for own in record.run.config.update}
            row = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
            for name, value in row.items():
                if "/" in name:
                    found[name].append((json.loads(row["round"]), json.loads(value)))
    assert found == expected(run_dir)
    assert json.loads(config["tasks"])["a"]["adapter"]["rank"] == 2


def test_wandb_without_a_key_is_given_up_and_asks_nothing(
    make_task, train, tmp_path, monkeypatch, capsys
):
    import wandb

    # It has read the variables already.
    wandb.teardown()
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    assert train(tmp_path / "run", make_task(), trackers="wandb").succeeded
    assert capsys.readouterr().out.count("Weights & Biases: no API key; run `wandb login`") == 1


def records(content: bytes):
    """The records of a file of Weights & Biases: a header of 7 bytes, then blocks of 32 KiB with
    parts of records, each behind a checksum, a length and a kind (whole, first, middle, last), as
    LevelDB's logs have them."""
    at, whole = 7, b""
    while at < len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""
