"""rounds.jsonl of a server: each round once, also after a crash, in files of bounded size."""

import json
import shutil
from collections import defaultdict

import pytest

from jaxmux.server import store
from jaxmux.server.server import ServerOptions, tuning_server

from .server_steps import finish, step
from .simulated_tasks import OPTIONS


@pytest.fixture(scope="module")
def serve(backbone):
    """Opens a server on the tiny backbone."""

    def open_server(folder, **options):
        return tuning_server(backbone, folder, ServerOptions(**OPTIONS | options), say=[].append)

    return open_server


def lines_of(folder, name):
    """The lines of a log, from the oldest file on."""
    older = sorted(folder.glob(f"{name}.*.jsonl"), key=lambda p: int(p.name.split(".")[1]))
    paths = (*older, folder / f"{name}.jsonl")
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_rounds_of_a_server_are_counted_once_also_after_a_crash(serve, make_task, tmp_path):
    folder, crashed = tmp_path / "server", tmp_path / "crashed"
    with serve(folder, checkpoint_every=4) as server:
        for name, steps in (("a", 9), ("b", 8)):
            server.register(make_task(name, steps=steps))
        step(server, 7)
        shutil.copytree(folder, crashed)
    with (crashed / "rounds.jsonl").open("a") as file:
        file.write('{"round": 9')
    before = lines_of(folder, "rounds")[-1]["round"]
    with serve(crashed) as server:
        finish(server)
        meters = {own.name: own.meter for own in server.statuses()}
    text = (crashed / "rounds.jsonl").read_text().replace('{"round": 9\n', "")
    (crashed / "rounds.jsonl").write_text(text)
    rounds = lines_of(crashed, "rounds")
    assert [line["round"] for line in rounds] == list(range(len(rounds)))
    assert len(rounds) > before + 1 and all(line["seconds"] > 0 for line in rounds)
    updates = [event for event in lines_of(crashed, "events") if event["kind"] == "update"]
    by_round = {(event["step"], event["task"]) for event in updates}
    assert len(by_round) == len(updates)
    # What the devices have computed, that of the rounds since the checkpoint twice. Nobody has seen
    # the result of the round during which the process ended.
    held = defaultdict(int)
    for line in rounds:
        assert line["host_bytes"] > 0 and len(line["held"]) == line["microbatches"]
        for _, _, tasks in line["held"]:
            for name, (chunks, _) in tasks.items():
                held[name] += chunks * ((line["round"], name) in by_round)
    for name, meter in meters.items():
        assert meter.recomputed_tokens > 0
        assert held[name] == meter.computed_tokens + meter.recomputed_tokens
    for event in updates:
        found = [own[event["task"]] for _, _, own in rounds[event["step"]]["held"]]
        assert [sum(n) for n in zip(*found, strict=True)] == [
            event["computed_tokens"],
            event["tokens"],
        ]


def test_rounds_are_set_aside_by_size_and_have_details_now_and_then(
    serve, make_task, tmp_path, monkeypatch
):
    folder = tmp_path / "server"
    monkeypatch.setattr(store, "has_details", lambda index: False)
    with serve(folder, events_bytes=1000) as server:
        server.register(make_task("a", steps=30))
        step(server, 25)
        server._store._detailed_at -= 61
        step(server, 1)
    rounds = lines_of(folder, "rounds")
    assert len(list(folder.glob("rounds.*"))) == 4 and len(rounds) < 25
    assert all(path.stat().st_size < 1600 for path in folder.glob("rounds.*"))
    assert ["held" in line for line in rounds[-3:]] == [False, False, True]
    with serve(folder, events_bytes=1000) as server:
        finish(server)
    assert lines_of(folder, "rounds")[-1]["round"] >= 29
