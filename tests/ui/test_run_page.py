"""The server of a run's page: what it reads, and what it refuses."""

import json
import os
import shutil
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from starlette.testclient import TestClient  # noqa: E402

from jaxmux import Task  # noqa: E402
from jaxmux.runs.run_directory import FolderLock  # noqa: E402
from jaxmux.ui.app import STATIC, run_app  # noqa: E402
from jaxmux.ui.run_reader import RunReader, UIError  # noqa: E402
from jaxmux.ui.run_view import Series  # noqa: E402
from jaxmux.ui.serving import serve_run  # noqa: E402

spec = spec_from_file_location("synthetic_runs", Path(__file__).with_name("synthetic_runs.py"))
synthetic = module_from_spec(spec)
spec.loader.exec_module(synthetic)


@pytest.fixture
def run_dir(tmp_path):
    return synthetic.write_run(tmp_path / "run", tasks=3, rounds=60, stages=2)


def read_all(reader):
    while True:
        reader.poll()
        if not reader.unread:
            return reader.state()


def client(run_dir, host="127.0.0.1:6006"):
    reader = RunReader(run_dir)
    read_all(reader)
    return TestClient(run_app(reader), base_url=f"http://{host}")


def test_state_holds_what_the_files_hold(run_dir):
    state = client(run_dir).get("/api/state").json()
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["name"] for row in state["tasks"]] == ["billing_0", "support_0", "legal_0"]
    assert [row["place"] for row in state["tasks"]] == [0, 1, 2]
    for row in state["tasks"]:
        own = [line for line in lines if line["task"] == row["name"]]
        points = state["loss"][row["name"]]
        assert [point[0] for point in points] == [line["task_step"] for line in own]
        assert [p[1] for p in points] == pytest.approx([line["loss"] for line in own], rel=1e-5)
        assert (row["step"], row["steps"], row["state"]) == (60, 60, "succeeded")
        assert row["tokens"] == sum(line["tokens"] for line in own)
        assert [point[0] for point in state["held_out"][row["name"]]] == [50]
    assert [row[0] for row in state["rounds"]] == list(range(60))
    assert state["details"] == list(range(60))
    assert state["run"]["kind"] == "training" and state["run"]["damaged"] == {}


def test_details_are_the_line_of_the_round(run_dir):
    own = client(run_dir)
    lines = [json.loads(line) for line in (run_dir / "rounds.jsonl").read_text().splitlines()]
    assert own.get("/api/rounds/17").json() == lines[17]
    assert own.get("/api/rounds/60").status_code == 404


def test_changes_add_up_to_the_state(run_dir):
    reader = RunReader(run_dir)
    before = read_all(reader)
    line = synthetic.update(60, "legal_0", 0.125, time.time())
    synthetic.append(run_dir / "metrics.jsonl", line)
    change = reader.poll()
    assert change["loss"] == {"legal_0": [[61, 0.125, 0.125, 0.125]]}
    after = reader.state()
    assert after["loss"]["legal_0"] == before["loss"]["legal_0"] + change["loss"]["legal_0"]
    assert change["tasks"] == [after["tasks"][2]]
    assert reader.poll() is None


def test_line_that_is_being_written_is_read_when_it_is_complete(run_dir):
    reader = RunReader(run_dir)
    read_all(reader)
    text = json.dumps(synthetic.update(60, "legal_0", 0.125, time.time()))
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(text[:40])
        file.flush()
        assert reader.poll() is None and not reader.unread
        file.write(text[40:] + "\n")
    assert reader.poll()["loss"]["legal_0"] == [[61, 0.125, 0.125, 0.125]]


def test_run_that_goes_on_from_a_checkpoint_is_read_anew(run_dir):
    reader = RunReader(run_dir)
    read_all(reader)
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    # Longer than before, but with other lines.
    path.write_text("".join(lines[:90]))
    others = [synthetic.update(i, "legal_0", 9.0, 1.0) for i in range(30, 200)]
    synthetic.append(path, *others)
    assert reader.poll()["reload"]
    points = reader.state()["loss"]["legal_0"]
    assert [point[0] for point in points] == list(range(1, 201))
    assert points[-1][1] == 9.0


def test_damaged_lines_are_skipped_and_counted(run_dir):
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 60, "ta\n\0\0\0\n[1]\n{"task": "legal_0"}\n' + b"[" * 100_000 + b"\n")
        line = synthetic.update(60, "legal_0", 0.125, time.time())
        file.write(json.dumps(line).encode() + b"\n")
    state = client(run_dir).get("/api/state").json()
    assert state["run"]["damaged"] == {"metrics.jsonl": 5}
    assert state["tasks"][2]["step"] == 61


def test_numbers_that_are_not_finite_are_damage(run_dir):
    line = synthetic.update(60, "legal_0", 0.125, time.time())
    fields = [line | {"loss": float("nan")}, line | {"time": float("inf")}]
    texts = [*map(json.dumps, fields), json.dumps(line).replace("0.125", "1e999")]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("".join(f"{text}\n" for text in texts))
    state = client(run_dir).get("/api/state").json()
    assert state["run"]["damaged"] == {"metrics.jsonl": 3}
    assert state["tasks"][2]["step"] == 60


def test_files_that_cannot_be_read_for_a_while_are_read_later(run_dir, monkeypatch):
    calls = []

    def poll(reader):
        calls.append(len(calls))
        if len(calls) == 1:
            raise OSError("stale file handle")

    monkeypatch.setattr(RunReader, "poll", poll)
    with TestClient(run_app(RunReader(run_dir)), base_url="http://127.0.0.1"):
        until = time.monotonic() + 10
        while len(calls) < 2 and time.monotonic() < until:
            time.sleep(0.05)
    assert len(calls) > 1


def test_skipped_update_is_an_event_without_a_loss(run_dir):
    line = synthetic.update(60, "legal_0", None, synthetic.BEGUN + 1e6)
    synthetic.append(run_dir / "metrics.jsonl", line)
    state = client(run_dir).get("/api/state").json()
    assert state["events"][-1]["text"] == "the update of step 61 was skipped"
    assert len(state["loss"]["legal_0"]) == 60 and state["tasks"][2]["skipped"] == 1


def test_task_whose_last_update_was_skipped_shows_no_older_loss(run_dir):
    fields = synthetic.update(60, "legal_0", 0.5, synthetic.BEGUN + 1e6) | {"skipped": True}
    synthetic.append(run_dir / "metrics.jsonl", fields)
    row = client(run_dir).get("/api/state").json()["tasks"][2]
    assert (row["loss"], row["nan"], row["skipped"]) == (None, True, 1)
    synthetic.append(
        run_dir / "metrics.jsonl", synthetic.update(61, "legal_0", 0.25, synthetic.BEGUN + 1e6)
    )
    row = client(run_dir).get("/api/state").json()["tasks"][2]
    assert (row["loss"], row["nan"], row["skipped"]) == (0.25, False, 1)


def test_tasks_with_metrics_of_their_objective_are_shown_by_their_losses(run_dir):
    metrics = {"metrics": {"rewards/accuracies": 0.75, "rewards/margins": None}}
    time = synthetic.BEGUN + 1e6
    update = synthetic.update(60, "legal_0", -0.25, time) | metrics
    synthetic.append(run_dir / "metrics.jsonl", update)
    measured = synthetic.evaluation(60, "legal_0", -0.5, time) | metrics
    synthetic.append(run_dir / "held_out.jsonl", measured)
    state = client(run_dir).get("/api/state").json()
    row = state["tasks"][2]
    assert (row["step"], row["loss"], row["held_out"], row["best"]) == (61, -0.25, -0.5, 61)
    assert state["run"]["damaged"] == {}
    assert state["events"][-1]["text"].startswith("loss -0.5 at step 61")


def test_tasks_that_are_compared_by_a_metric_show_it(run_dir):
    record = json.loads((run_dir / "run.json").read_text())
    record["tasks"]["legal_0"]["best_metric"] = "rewards/accuracies"
    (run_dir / "run.json").write_text(json.dumps(record))
    measured = synthetic.evaluation(60, "legal_0", -0.5, synthetic.BEGUN + 1e6)
    measured |= {"metrics": {"rewards/accuracies": 0.75}, "best": False}
    synthetic.append(run_dir / "held_out.jsonl", measured)
    result = {"status": "succeeded", "eval_loss": -0.75, "eval_metrics": {"rewards/accuracies": 1}}
    summary = {"tasks": {"legal_0": result}, "wall_seconds": 1}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    state = client(run_dir).get("/api/state").json()
    first, _, row = state["tasks"]
    assert (row["metric"], row["higher"], row["held_out"], row["value"]) == (
        "rewards/accuracies",
        True,
        -0.5,
        0.75,
    )
    assert (row["final"], row["final_value"]) == (-0.75, 1)
    assert first["value"] == first["held_out"]
    assert state["events"][-1]["text"] == "loss -0.5, rewards/accuracies 0.75 at step 61"


def test_page_of_a_task_holds_its_specification_and_its_curves(run_dir):
    fields = {"lr": 0.5, "grad_norm": None, "skipped": True}
    line = synthetic.update(60, "legal_0", 0.5, synthetic.BEGUN + 1e6) | fields
    without = synthetic.update(61, "legal_0", None, synthetic.BEGUN + 1e6)
    synthetic.append(run_dir / "metrics.jsonl", line, without)
    own = client(run_dir)
    found = own.get("/api/task", params={"name": "legal_0"}).json()
    record = json.loads((run_dir / "run.json").read_text())
    assert found["specification"] == record["tasks"]["legal_0"]
    assert [point[:2] for point in found["rate"]] == [
        *([step, 1e-3] for step in range(1, 61)),
        [61, 0.5],
        [62, 1e-3],
    ]
    assert [point[0] for point in found["norm"]] == [*range(1, 61), 62]
    assert found["skips"] == [[61, "its gradient is not finite"], [62, "its loss is not finite"]]
    assert found["adapter"] is None
    (run_dir / "adapters" / "legal_0").mkdir(parents=True)
    found = own.get("/api/task", params={"name": "legal_0"}).json()
    assert found["adapter"] == str(run_dir / "adapters" / "legal_0")


def specification(own, name):
    return own.get("/api/task", params={"name": name}).json()["specification"]


def test_page_of_a_watched_task_holds_what_its_tenant_has_specified(tmp_path):
    """Whether or not the server runs. The page creates no files."""
    run = synthetic.write_server(tmp_path / "server", 8, 10)
    own, before = client(run), {*os.listdir(run)}
    assert specification(own, "support_0") is None
    assert {*os.listdir(run)} == before
    database = synthetic.open_database(run, {"support_0": Task("mine", "mine.jsonl", steps=7)})
    with closing(sqlite3.connect(run / "server.db")) as writer:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("UPDATE tasks SET origin = NULL")
        shown = specification(own, "support_0")
        assert (shown["name"], shown["data"]["path"], shown["steps"]) == ("mine", "mine.jsonl", 7)
        assert specification(own, "legal_0") is None
        writer.execute("COMMIT")
        assert specification(own, "support_0") is None
        # What was written last is not in the file itself yet.
        image = shutil.copytree(run, tmp_path / "killed")
    assert specification(client(image), "support_0") is None
    database.close()
    assert {*os.listdir(run)} == before | {"server.db"}
    assert specification(own, "support_0") is None
    assert {*os.listdir(run)} == before | {"server.db"}


def test_a_database_that_cannot_be_read_has_no_specifications(tmp_path):
    run = synthetic.write_server(tmp_path / "server", 8, 10)
    own, path = client(run), run / "server.db"
    for content in (b"", b"no database" * 1000):
        path.write_bytes(content)
        assert specification(own, "support_0") is None
    path.unlink()
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE tasks (name)")
    assert specification(own, "support_0") is None


def test_pages_of_tasks_read_no_other_files(tmp_path):
    """A name is no path, and links are not followed."""
    run = synthetic.write_server(tmp_path / "server", 8, 10)
    synthetic.open_database(run, {"support_0": Task("mine", "mine.jsonl", steps=7)}).close()
    (tmp_path / "secret.json").write_text("{}")
    (run / "adapters").symlink_to(tmp_path)
    fields = {"kind": "state", "time": 5.0, "state": "queued", "reason": None}
    synthetic.append(
        run / "events.jsonl", fields | {"task": "../../secret"}, fields | {"task": "server"}
    )
    own = client(run)

    def task(name):
        return own.get("/api/task", params={"name": name})

    assert task("support_0").json()["specification"]["steps"] == 7
    assert task("../../secret").json()["specification"] is None
    assert task("server").json()["adapter"] is None
    assert task("nobody").status_code == task("../server").status_code == 404
    (run / "server.db-wal").symlink_to(tmp_path / "secret.json")
    assert specification(own, "support_0") is None
    (run / "server.db-wal").unlink()
    (run / "server.db").rename(tmp_path / "secret.db")
    (run / "server.db").symlink_to(tmp_path / "secret.db")
    assert specification(own, "support_0") is None
    (run / "server.db").unlink()
    os.mkfifo(run / "server.db")
    assert specification(own, "support_0") is None


def test_run_is_what_its_lock_tells(run_dir):
    def state(reader):
        reader.poll()
        return reader.state()["run"]["state"]

    reader = RunReader(run_dir)
    read_all(reader)
    assert state(reader) == "unknown"
    lock = FolderLock(run_dir)
    os.utime(run_dir / ".lock", (synthetic.BEGUN + 1e6,) * 2)
    assert state(reader) == "compiling"
    line = synthetic.update(60, "legal_0", 0.5, synthetic.BEGUN + 1e6 + 1)
    synthetic.append(run_dir / "metrics.jsonl", line)
    assert state(reader) == "training"
    lock.close()
    assert state(reader) == "stopped"
    # A process that is killed leaves its number in the lock.
    (run_dir / ".lock").write_text("1\n")
    assert state(reader) == "lost"
    assert reader.poll() is None


def test_where_a_process_has_ended_no_task_trains(run_dir):
    record = json.loads((run_dir / "run.json").read_text())
    record["tasks"]["legal_0"]["steps"] = 90
    (run_dir / "run.json").write_text(json.dumps(record))
    reader = RunReader(run_dir)
    for error, state in ((None, "stopped"), (MemoryError(), "failed")):
        lock = FolderLock(run_dir)
        tasks = read_all(reader)["tasks"]
        assert [row["state"] for row in tasks] == ["succeeded", "succeeded", "running"]
        lock.close(error=error)
        assert reader.poll()["reload"]
        found = reader.state()
        assert [row["state"] for row in found["tasks"]] == ["succeeded", "succeeded", "stopped"]
        assert found["run"]["state"] == state
        assert found["run"]["failure"] == (error and "the host has no memory left")


def test_server_without_tasks_is_idle(tmp_path):
    (tmp_path / "server.json").write_text(json.dumps({"backbone": "/models/x", "sizes": {}}))
    fields = {"kind": "state", "time": 5.0, "task": "a", "reason": None}
    size = {"steps": 40, "adapter": "lora", "rank": 8}
    running, ended = fields | {"state": "running"} | size, fields | {"state": "cancelled"}
    lock = FolderLock(tmp_path)
    reader = RunReader(tmp_path)
    assert read_all(reader)["run"]["state"] == "idle"
    synthetic.append(tmp_path / "events.jsonl", running)
    state = read_all(reader)
    assert state["run"]["state"] == "compiling"
    (row,) = state["tasks"]
    assert (row["steps"], row["kind"], row["rank"]) == (40, "lora", 8)
    synthetic.append(tmp_path / "events.jsonl", ended)
    assert read_all(reader)["run"]["state"] == "idle"
    lock.close()


def test_refused_specifications_are_listed_with_their_errors(tmp_path):
    run = synthetic.write_server(tmp_path / "server", 8, 10)
    refused = [
        {"task": "acme.one", "error": "one.json: step: unknown", "waits": False},
        {"task": "acme.two", "error": "its data are not there", "waits": True},
        {"task": "support_0", "error": "rank: cannot change", "waits": False},
    ]
    (run / "refused.json").write_text(json.dumps({"count": 3, "refused": refused}))
    reader = RunReader(run)
    state = read_all(reader)
    rows = {row["name"]: (row["state"], row["error"]) for row in state["tasks"]}
    assert rows["acme.one"] == ("refused", "one.json: step: unknown")
    assert rows["acme.two"] == ("waiting", "its data are not there")
    assert rows["support_0"] == ("running", "rank: cannot change")
    assert state["run"]["refused"] == 3 and len(rows) == 10
    (run / "refused.json").write_text(json.dumps({"count": 0, "refused": []}))
    assert reader.poll()["reload"]
    assert {row["error"] for row in reader.state()["tasks"]} == {None}


def test_time_trained_is_that_of_rounds_without_the_time_between_processes(run_dir):
    lines = [json.loads(line) for line in (run_dir / "rounds.jsonl").read_text().splitlines()]
    synthetic.append(
        run_dir / "rounds.jsonl", lines[-1] | {"round": 60, "time": 1e6 + lines[-1]["time"]}
    )
    run = client(run_dir).get("/api/state").json()["run"]
    seconds = sum(line["seconds"] for line in lines) + lines[-1]["seconds"]
    assert run["trained"]["seconds"] == pytest.approx(seconds)


def test_ended_run_has_the_states_of_its_summary(tmp_path):
    state = client(synthetic.write_run(tmp_path / "run", 2, 10, ended=True)).get("/api/state")
    rows = state.json()["tasks"]
    assert [row["state"] for row in rows] == ["succeeded", "failed"]
    assert rows[1]["reason"] == "8 updates in a row were skipped"


def test_run_without_rounds_shows_the_speed_of_its_updates(run_dir):
    (run_dir / "rounds.jsonl").unlink()
    rounds = client(run_dir).get("/api/state").json()["rounds"]
    # The first round has no beginning, and the last one no end.
    assert [row[0] for row in rounds] == list(range(len(rounds))) and len(rounds) > 50
    assert rounds[5][4] == 3 * 128 and rounds[5][5] == 3 * 90


def test_server_shows_states_of_events_also_of_files_set_aside(tmp_path):
    (tmp_path / "server.json").write_text(json.dumps({"backbone": "/models/x", "sizes": {}}))

    def event(task, kind, **fields):
        return {"time": 5.0, "task": task, "kind": kind, **fields}

    def state(task, name):
        return event(task, "state", state=name, reason="no place is free", priority=2)

    update = {k: v for k, v in synthetic.update(0, "a", 1.5, 5.0).items() if k != "task"}
    synthetic.append(tmp_path / "events.1.jsonl", state("a", "queued"), state("b", "queued"))
    lines = (
        state("a", "running"),
        event("a", "update", **update),
        state("a", "succeeded") | {"reason": None},
    )
    synthetic.append(tmp_path / "events.jsonl", *lines)
    reader = RunReader(tmp_path)
    rows = read_all(reader)["tasks"]
    assert [(row["name"], row["state"], row["step"]) for row in rows] == [
        ("a", "succeeded", 1),
        ("b", "queued", 0),
    ]
    assert rows[1]["reason"] == "no place is free" and rows[1]["priority"] == 2
    # Another task of the same name begins without the curve of the first one.
    synthetic.append(tmp_path / "events.jsonl", state("a", "queued"))
    assert reader.poll()["reload"]
    assert reader.state()["loss"]["a"] == []


def test_files_of_a_server_are_read_one_after_another(tmp_path, monkeypatch):
    """Also where they are longer than the pieces in which they are read."""
    (tmp_path / "server.json").write_text(json.dumps({"backbone": "/models/x", "sizes": {}}))
    for number, name in enumerate(("events.2", "events.10", "events")):
        steps = range(10 * number, 10 * number + 10)
        lines = [synthetic.update(i, "a", 1.0 + i, 5.0) | {"kind": "update"} for i in steps]
        synthetic.append(tmp_path / f"{name}.jsonl", *lines[: 10 if number < 2 else 2])
        rounds = [synthetic.round_line(i, ["a"], 5.0, 0) for i in steps]
        synthetic.append(tmp_path / f"{name.replace('events', 'rounds')}.jsonl", *rounds)
    monkeypatch.setattr("jaxmux.ui.line_file._PIECE", 700)
    reader = RunReader(tmp_path)
    state = read_all(reader)
    assert [point[0] for point in state["loss"]["a"]] == list(range(1, 23))
    assert state["tasks"][0]["step"] == 22
    assert [row[0] for row in state["rounds"]] == state["details"] == list(range(30))
    assert [reader.details(n)["round"] for n in (0, 15, 29)] == [0, 15, 29]
    assert state["run"]["damaged"] == {}


def test_files_that_are_set_aside_before_they_are_read_are_not_left_out(tmp_path, monkeypatch):
    (tmp_path / "server.json").write_text(json.dumps({"backbone": "/models/x", "sizes": {}}))
    lines = [synthetic.update(i, "a", 1.0, 5.0) | {"kind": "update"} for i in range(30)]
    synthetic.append(tmp_path / "events.1.jsonl", *lines[:10])
    synthetic.append(tmp_path / "events.jsonl", *lines[10:20])
    monkeypatch.setattr("jaxmux.ui.line_file._PIECE", 700)
    reader = RunReader(tmp_path)
    reader.poll()
    (tmp_path / "events.jsonl").rename(tmp_path / "events.2.jsonl")
    synthetic.append(tmp_path / "events.jsonl", *lines[20:])
    state = read_all(reader)
    assert [point[0] for point in state["loss"]["a"]] == list(range(1, 31))


def test_steps_that_a_killed_server_trains_again_are_shown_once(tmp_path):
    (tmp_path / "server.json").write_text(json.dumps({"backbone": "/models/x", "sizes": {}}))
    fields = {"kind": "update", "time": 5.0}
    steps = [*range(6), *range(3, 9)]
    lines = [synthetic.update(i, "a", 1.0 + i, 5.0) | fields for i in steps]
    held_out = synthetic.evaluation(4, "a", 2.0, 5.0) | {"kind": "evaluation"}
    synthetic.append(tmp_path / "events.jsonl", *lines, held_out, held_out)
    state = read_all(RunReader(tmp_path))
    assert [point[0] for point in state["loss"]["a"]] == list(range(1, 10))
    assert len(state["held_out"]["a"]) == 1
    (row,) = state["tasks"]
    assert (row["step"], row["tokens"]) == (9, 9 * 90)


def test_tasks_of_a_server_that_ended_long_ago_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxmux.ui.run_view._MOST_ENDED", 2)
    (tmp_path / "server.json").write_text(json.dumps({"backbone": "/models/x", "sizes": {}}))

    def append(*states):
        fields = {"kind": "state", "time": 5.0, "reason": None}
        lines = [{**fields, "task": task, "state": state} for task, state in states]
        synthetic.append(tmp_path / "events.jsonl", *lines)

    append(("a", "running"), ("b", "succeeded"), ("c", "failed"), ("c", "failed"))
    reader = RunReader(tmp_path)
    assert [row["name"] for row in read_all(reader)["tasks"]] == ["a", "c"]
    # The name of a task that has ended goes to another one.
    append(("c", "queued"), ("d", "cancelled"), ("e", "succeeded"))
    assert reader.poll()["reload"]
    append(("f", "succeeded"))
    assert reader.poll()["gone"] == ["d"]
    assert [row["name"] for row in reader.state()["tasks"]] == ["a", "c", "e", "f"]
    # Colours are those of before, because each task keeps its place.
    assert [row["place"] for row in reader.state()["tasks"]] == [0, 2, 4, 5]


def test_task_that_stops_before_the_others_is_shown_at_once(run_dir):
    record = json.loads((run_dir / "run.json").read_text())
    for task in record["tasks"].values():
        task["steps"] = 90
    (run_dir / "run.json").write_text(json.dumps(record))
    reader = RunReader(run_dir)
    assert {row["state"] for row in read_all(reader)["tasks"]} == {"running"}
    reason = "at rung 1 (step 60), 3rd of 3 by held-out loss"
    ended = {"status": "succeeded", "error": None, "stopped_early": reason}
    (run_dir / "tasks.json").write_text(json.dumps({"tasks": {"support_0": ended}}))
    assert reader.poll()["reload"]
    found = [(row["state"], row["reason"]) for row in reader.state()["tasks"]]
    assert found == [("running", None), ("stopped early", reason), ("running", None)]


def test_long_series_keeps_its_mean_and_extremes():
    series, count = Series(2, most=64), 100_000
    for i in range(count):
        series.add(i, [float(i % 1000), 1.0])
    points = series.points()
    assert 64 <= len(points) <= 128
    assert points[-1][0] == count - 1
    assert sum(p[1] for p in points[:-1]) / len(points[:-1]) == pytest.approx(499.5, rel=0.02)
    assert min(p[3] for p in points) == 0 and max(p[4] for p in points) == 999
    assert all(point[2] == 1 for point in points)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:6006", "127.0.0.1.evil.example"])
def test_foreign_host_names_are_refused(run_dir, host):
    assert client(run_dir, host).get("/api/state").status_code == 421


@pytest.mark.parametrize("host", ["localhost", "localhost:6006", "[::1]:6006", "192.168.0.7:80"])
def test_this_machine_and_addresses_are_permitted(run_dir, host):
    assert client(run_dir).get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    ("host", "warned"), [("0.0.0.0", True), ("127.0.0.1", False), ("localhost", False)]
)
def test_a_page_that_other_machines_reach_is_warned_of(run_dir, host, warned, monkeypatch):
    monkeypatch.setattr("uvicorn.Server.run", lambda server, sockets: None)
    said = []
    serve_run(run_dir, host, 0, said.append)
    warning = f"warning: --host {host}: everybody who reaches this port can see the run"
    assert [warning in line for line in said] == [False, *[True] * warned, False]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_reading_is_permitted(run_dir, method):
    assert client(run_dir).request(method, "/api/state").status_code == 405


@pytest.mark.parametrize(
    "path",
    ["/run.json", "/static/../run.json", "/static/%2e%2e/app.py", "/static//etc/passwd"]
    + ["/api/rounds/..%2frun.json", "/static/..%2f..%2fapp.py"],
)
def test_no_path_reaches_other_files(run_dir, path):
    assert client(run_dir).get(path).status_code == 404


def test_links_in_the_run_directory_are_not_followed(run_dir, tmp_path):
    secret = tmp_path / "secret.jsonl"
    (run_dir / "metrics.jsonl").rename(secret)
    os.symlink(secret, run_dir / "metrics.jsonl")
    state = client(run_dir).get("/api/state").json()
    assert state["loss"]["legal_0"] == []


def test_page_takes_everything_from_the_package(run_dir):
    own = client(run_dir)
    page = own.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for path in STATIC.iterdir():
        response = own.get(f"/static/{path.name}")
        assert response.status_code == 200
        addresses = response.text.replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in addresses and "https://" not in addresses


def test_folder_that_holds_no_run_is_named(tmp_path):
    with pytest.raises(UIError, match="there is no such folder"):
        RunReader(tmp_path / "nowhere")
    synthetic.write_run(tmp_path / "first", 1, 1)
    with pytest.raises(UIError, match=r"holds neither run\.json .*it holds the runs first"):
        RunReader(tmp_path)
    (tmp_path / "run.json").write_text('{"name": "of another program"}')
    with pytest.raises(UIError, match=r"run\.json: it is damaged, or none of jaxmux's"):
        RunReader(tmp_path)


def test_page_may_wait_for_its_run(tmp_path):
    reader = RunReader(tmp_path / "run", wait=True)
    reader.poll()
    assert reader.state()["run"]["kind"] == "waiting"
    synthetic.write_run(tmp_path / "run", 2, 4)
    assert reader.poll()["reload"]
    assert len(reader.state()["tasks"]) == 2


def test_missing_package_is_named_with_the_command(run_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(UIError, match=r"uvicorn is missing; pip install 'jaxmux\[ui\]'"):
        serve_run(run_dir, "127.0.0.1", 0, print)


@pytest.mark.long
def test_stream_of_a_real_server(run_dir):
    """The command serves, sends a change, and ends with the process that has started it."""
    command = [sys.executable, "-m", "jaxmux.ui", "--child", "--port=0", str(run_dir)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    from http.client import HTTPConnection

    with subprocess.Popen(command, **pipes) as process:
        address = process.stdout.readline().split("http://")[1].strip().strip("/")
        connection = HTTPConnection(address, timeout=20)
        connection.request("GET", "/api/stream?since=0")
        response = connection.getresponse()
        while not (line := response.readline()).startswith(b"data: "):
            pass
        assert json.loads(line[6:])["version"] >= 1
        process.stdin.close()
        assert process.wait(timeout=20) == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "end", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_server_ends_quietly_while_pages_are_open(run_dir, end):
    """Also one that does not read what it has asked for."""
    command = [sys.executable, "-m", "jaxmux.ui", str(run_dir), "--port=0"]
    synthetic.append(
        run_dir / "metrics.jsonl",
        *(synthetic.update(i, f"{'long' * 20}-{i}", 0.5, 5.0) for i in range(5000)),
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process, ExitStack() as stack:
        port = int(process.stdout.readline().strip().rpartition(":")[2].strip("/"))
        for path in ("/api/stream?since=0", "/api/stream?since=99999", "/api/state"):
            page = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            page.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            page.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert page.recv(15) == b"HTTP/1.1 200 OK"
        process.send_signal(end)
        error = process.communicate(timeout=20)[1]
    assert "Traceback" not in error and "Error" not in error and len(error.splitlines()) <= 1


def test_time_of_earlier_rounds_is_shared_by_tokens_and_what_is_unusual_is_told(run_dir):
    lines = [json.loads(line) for line in (run_dir / "rounds.jsonl").read_text().splitlines()]
    # As an earlier version wrote them. One round takes ten seconds more, as with a checkpoint.
    for line in lines:
        del line["spent"]
    lines[30]["seconds"] += 10
    (run_dir / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:50]))
    reader = RunReader(run_dir)
    read_all(reader)
    # The lines of these rounds come after those of their updates.
    synthetic.append(run_dir / "rounds.jsonl", *lines[50:])
    state = read_all(reader)
    updates = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for row in state["tasks"]:
        own = [line for line in updates if line["task"] == row["name"]]
        share = [lines[u["step"]]["seconds"] / lines[u["step"]]["tokens"] for u in own]
        seconds = sum(u["computed_tokens"] * s for u, s in zip(own, share, strict=True))
        assert row["seconds"] == pytest.approx(seconds)
    parts = state["run"]["parts"]
    assert sum(parts.values()) == pytest.approx(sum(line["seconds"] for line in lines))
    per_token = statistics.median(line["seconds"] / line["tokens"] for line in lines)
    usual = [min(line["seconds"], per_token * line["tokens"]) for line in lines]
    assert parts["first"] == pytest.approx(lines[0]["seconds"] - usual[0])
    beyond = sum(line["seconds"] for line in lines[1:]) - sum(usual[1:])
    assert parts["beyond"] == pytest.approx(beyond) and beyond > 10
    tokens, chunks, read = (
        sum(line[n] for line in lines) for n in ("tokens", "chunk_tokens", "read_tokens")
    )
    assert parts["unused"] == pytest.approx(sum(usual) * (tokens - chunks) / tokens)
    assert parts["read"] == pytest.approx(sum(usual) * read / tokens)
    (run_dir / "rounds.jsonl").unlink()
    assert read_all(RunReader(run_dir))["run"]["parts"] is None


def test_time_left_is_that_of_the_last_rounds_while_the_task_trains(tmp_path):
    run = synthetic.write_server(tmp_path / "server", 8, 60)
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    lock = FolderLock(run)
    os.utime(run / ".lock", (0, 0))
    change = {"kind": "state", "time": synthetic.BEGUN, "reason": None, "steps": 100, "rank": 8}
    # It was told of before its updates, which do not tell of steps.
    text = (run / "events.1.jsonl").read_text()
    (run / "events.1.jsonl").write_text("")
    synthetic.append(
        run / "events.1.jsonl",
        *(change | {"task": name, "state": "running"} for name in ("support_0", "legal_0")),
    )
    with (run / "events.1.jsonl").open("a") as file:
        file.write(text)
    reader = RunReader(run)
    rows = {row["name"]: row for row in read_all(reader)["tasks"]}
    seconds = statistics.mean(line["seconds"] for line in lines[-31:])
    assert rows["support_0"]["left"] == pytest.approx(40 * seconds)
    assert (rows["support_0"]["steps"], rows["support_0"]["rank"]) == (100, 8)
    assert rows["billing_0"]["left"] is None  # It has ended.
    # Rounds in which it was paused do not count.
    synthetic.append(
        run / "events.jsonl",
        change | {"task": "legal_0", "state": "paused"},
        change | {"task": "legal_0", "state": "running"},
        *(
            synthetic.update(60 + i, "legal_0", 1.0, 0.0) | {"task_step": step, "kind": "update"}
            for i, step in enumerate((61, 62))
        ),
    )
    synthetic.append(run / "rounds.jsonl", *(lines[1] | {"round": n} for n in (60, 61)))
    rows = {row["name"]: row for row in read_all(reader)["tasks"]}
    assert rows["legal_0"]["left"] == pytest.approx(38 * lines[1]["seconds"])
    lock.close()
    assert {row["left"] for row in read_all(reader)["tasks"]} == {None}


def test_time_is_divided_as_the_lines_of_rounds_tell(run_dir):
    path = run_dir / "rounds.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = ("training", "evaluation", "checkpoints", "compiling", "idle")
    for i, line in enumerate(lines):
        line["spent"] = {
            kind: line["seconds"] * (n + i % 3) / sum(n + i % 3 for n in range(5))
            for n, kind in enumerate(kinds)
        }
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    parts = client(run_dir).get("/api/state").json()["run"]["parts"]
    whole = {kind: sum(line["spent"][kind] for line in lines) for kind in kinds}
    for kind in kinds[1:]:
        assert parts.pop(kind) == pytest.approx(whole[kind])
    assert parts.keys() == {"read", "padding", "unused"}
    assert sum(parts.values()) == pytest.approx(whole["training"])
    # Rounds of an earlier version that the run began with.
    for line in lines[:20]:
        del line["spent"]
    damaged = [lines[-1] | {"spent": own} for own in ([1], 3, {"idle": "x"}, {"idle": 1e999})]
    path.write_text("".join(json.dumps(line) + "\n" for line in (*lines, *damaged)))
    run = client(run_dir).get("/api/state").json()["run"]
    assert sum(run["parts"].values()) == pytest.approx(sum(line["seconds"] for line in lines))
    assert {"first", "beyond", "idle"} < run["parts"].keys()
    assert run["damaged"] == {"rounds.jsonl": 4}


def test_page_of_a_task_holds_its_sample_answers(run_dir):
    reader = RunReader(run_dir)
    read_all(reader)
    assert reader.task("legal_0")["samples"] == []
    fields = {"task": "legal_0", "prompt": "a\nb", "time": synthetic.BEGUN}
    lines = [
        fields | {"task_step": step, "completion": f"{step} <b>"} for step in (0, 60, 0, 90, 60)
    ]
    synthetic.append(run_dir / "samples.jsonl", *lines, fields)
    change = reader.poll()
    assert [row["name"] for row in change["tasks"]] == ["legal_0"]
    samples = [(step, "a\nb", f"{step} <b>") for step in (0, 60, 90)]
    assert reader.task("legal_0")["samples"] == samples
    assert reader.task("support_0")["samples"] == []
    assert change["run"]["damaged"] == {"samples.jsonl": 1}
