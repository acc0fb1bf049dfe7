"""Weights & Biases and MLflow themselves keep what the files of a run say, also after a break.

Nothing here needs a network: Weights & Biases writes files in its offline mode, MLflow a database.
`make test-trackers` installs both.
"""

import json
import logging
from collections import defaultdict

import pytest

from jaxmux.runs import checkpoints
from jaxmux.server.server import ServerOptions, tuning_server
from jaxmux.server.task import ENDED

from ..conftest import SERVER


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


@pytest.fixture
def served(backbone, make_task, data, tmp_path):
    """The folder of a server that was started twice, and on which two tasks had the same name."""

    def run(tracker: str):
        options = ServerOptions(**SERVER, trackers=tracker, most_ended=1)
        tasks = [make_task("a", steps=2, eval_data=data["short.eval"]), make_task("b", steps=9)]
        with tuning_server(backbone, tmp_path / "server", options) as server:
            for task in tasks:
                server.register(task)
            server.register(make_task("c", steps=4))
            server.step()
            while "a" in [status.name for status in server.statuses()]:
                server.step()
            server.register(make_task("a", steps=3, seed=4))
            server.step()
            server.save()
        with tuning_server(backbone, tmp_path / "server", options) as server:
            while server.status("a").state not in ENDED:
                server.step()
        return tmp_path / "server"

    return run


def expected_of_server(folder) -> dict[str, list[tuple[int, float]]]:
    found, count, ended = defaultdict(list), defaultdict(int), defaultdict(bool)
    for event in map(json.loads, (folder / "events.jsonl").read_text().splitlines()):
        name = event["task"]
        if event["kind"] == "state":
            # Another task has got the name.
            count[name] += ended[name] and event["state"] not in ENDED
            ended[name] = event["state"] in ENDED
            continue
        series = f"_{count[name] + 1}_{name}" if count[name] else name
        if event["kind"] == "evaluation":
            found[f"held_out_loss/{series}"].append((event["step"], event["loss"]))
        else:
            for field in ("loss", "lr", "grad_norm"):
                found[f"{field}/{series}"].append((event["step"], event[field]))
    assert "loss/_2_a" in found
    return found


def expected(run_dir) -> dict[str, list[tuple[int, float]]]:
    found = defaultdict(list)
    for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()):
        for name in ("loss", "lr", "grad_norm"):
            found[f"{name}/{line['task']}"].append((line["step"], line[name]))
    for line in map(json.loads, (run_dir / "held_out.jsonl").read_text().splitlines()):
        found[f"held_out_loss/{line['task']}"].append((line["step"], line["loss"]))
    return found


@pytest.fixture
def mlflow_run(tmp_path, monkeypatch):
    """Reads the only run of MLflow: the run, and its metrics by name."""
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    logging.getLogger("alembic").setLevel(logging.WARNING)

    def read():
        client = MlflowClient()
        experiment = client.get_experiment_by_name("jaxmux")
        (run,) = client.search_runs([experiment.experiment_id])
        metrics = {n: client.get_metric_history(run.info.run_id, n) for n in run.data.metrics}
        return run, {n: sorted((own.step, own.value) for own in m) for n, m in metrics.items()}

    return read


def test_mlflow_has_one_run_with_every_round_once(interrupted, mlflow_run, capsys):
    run_dir = interrupted("mlflow")
    assert "training goes on without" not in capsys.readouterr().out
    run, found = mlflow_run()
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["tasks/a/adapter/rank"] == "2"
    assert found == expected(run_dir)


def test_mlflow_has_one_run_of_a_server(served, mlflow_run, capsys):
    folder = served("mlflow")
    assert "training goes on without" not in capsys.readouterr().out
    run, found = mlflow_run()
    assert (run.info.run_name, run.info.status) == ("server", "KILLED")
    assert found == expected_of_server(folder)


def wandb_metrics(folder):
    """The metrics by name, and the configuration, in the two files of a run."""
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    # Each call writes a file; `wandb sync` joins those with the same id.
    id = json.loads((folder / "trackers.json").read_text())["wandb"]
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
    return found, config


def test_wandb_has_one_run_with_every_round_once(interrupted, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_dir = interrupted("wandb")
    assert "training goes on without" not in capsys.readouterr().out
    found, config = wandb_metrics(run_dir)
    assert found == expected(run_dir)
    assert json.loads(config["tasks"])["a"]["adapter"]["rank"] == 2


def test_wandb_has_one_run_of_a_server(served, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = served("wandb")
    assert "training goes on without" not in capsys.readouterr().out
    found, _ = wandb_metrics(folder)
    assert found == expected_of_server(folder)


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
