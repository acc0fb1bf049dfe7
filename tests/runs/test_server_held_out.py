"""Held-out losses on a server: early ends, and best adapters, also after a crash."""

import json
import shutil
from types import SimpleNamespace

import pytest

from jaxmux import AdamW
from jaxmux.engine.state import slots as slot
from jaxmux.server.server import ServerOptions, tuning_server
from jaxmux.server.task import ENDED

from .server_steps import finish, settle, step
from .simulated_tasks import OPTIONS

STEPS = 7


@pytest.fixture(scope="module")
def serve(backbone):
    """Opens a server on the tiny backbone."""

    def open_server(folder):
        options = ServerOptions(**OPTIONS, checkpoint_every=1)
        return tuning_server(backbone, folder, options, say=[].append)

    return open_server


@pytest.fixture(scope="module")
def tasks(make_task, data):
    """A task that trains all its steps, one that stops early, and one without held-out data."""
    measured = {"eval_data": data["letters.eval"], "eval_every": 1, "optimizer": AdamW(3e-2)}
    return (
        make_task("best", steps=STEPS, keep_best=True, **measured),
        make_task("early", steps=STEPS, keep_best=True, patience=2, **measured),
        make_task("other", steps=STEPS),
        # After as many steps as the best adapters of the others have.
        make_task("one", steps=1, **measured),
    )


def evaluations(folder):
    """By task and step, the held-out losses in events.jsonl."""
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    found = [event for event in events if event["kind"] == "evaluation"]
    return {(event["task"], event["task_step"]): event["loss"] for event in found}


@pytest.fixture(scope="module")
def calm(serve, tasks, tmp_path_factory, adapter_bytes):
    """The folder of a server on which nothing else happened, the statuses of its tasks, and copies
    of the folder after every round."""
    folder = tmp_path_factory.mktemp("calm") / "server"
    copies = []
    with serve(folder) as server:
        for task in tasks:
            server.register(task)
        server._runner.carry_out()
        settle(server)
        while any(status.state not in ENDED for status in server.statuses()):
            step(server)
            copies.append(shutil.copytree(folder, folder.parent / f"copy{len(copies)}"))
        statuses = {task.name: server.status(task.name) for task in tasks}
    return folder, statuses, copies


def test_tasks_stop_early_and_give_their_best_adapters(calm, adapter_bytes):
    folder, statuses, _ = calm
    losses = evaluations(folder)
    steps = {name: [step for own, step in losses if own == name] for name in statuses}
    assert steps == {
        "best": [*range(STEPS + 1)],
        "early": [0, 1, 2, 3],
        "other": [],
        "one": [0, 1],
    }
    lowest = min(range(1, STEPS + 1), key=lambda step: losses["best", step])
    assert (statuses["best"].step, statuses["best"].best_step) == (STEPS, lowest)
    assert lowest < STEPS
    assert (statuses["early"].step, statuses["early"].best_step) == (3, 1)
    assert statuses["early"].reason.startswith("2 measurements of the held-out loss without")
    for name in ("best", "early"):
        assert statuses[name].held_out_loss == losses[name, statuses[name].best_step]
    early, one = (adapter_bytes(folder / "adapters" / name) for name in ("early", "one"))
    assert early == one


def test_a_crash_between_the_best_step_and_the_end_loses_no_best_adapter(
    serve, calm, adapter_bytes
):
    folder, statuses, copies = calm
    expected, between = adapter_bytes(folder / "adapters"), {"best": 0, "early": 0}
    for copy in (copies[2], copies[5]):
        with serve(copy) as server:
            for name in between:
                own = server.status(name)
                between[name] += own.state not in ENDED and own.best_step == (
                    statuses[name].best_step
                )
            finish(server)
            for name, calm_status in statuses.items():
                own = server.status(name)
                assert (own.state, own.reason) == (calm_status.state, calm_status.reason)
                assert (own.step, own.best_step) == (calm_status.step, calm_status.best_step)
                assert own.held_out_loss == calm_status.held_out_loss
        assert adapter_bytes(copy / "adapters") == expected
        assert evaluations(copy) == evaluations(folder)
    assert min(between.values()) > 0


def test_a_task_ends_when_its_time_is_over(serve, make_task, data, tmp_path, monkeypatch):
    """What it had trained before a server was started again counts."""
    folder, seconds = tmp_path / "server", 0
    monkeypatch.setattr(slot, "time", SimpleNamespace(monotonic=lambda: seconds))
    task = make_task("a", steps=1000, max_seconds=10, eval_data=data["letters.eval"])
    with serve(folder) as server:
        server.register(task)
        while not server.statuses() or server.status("a").step < 3:
            step(server)
            seconds += 1
        server.save()
        step(server)
        trained = server._tasks["a"].progress.seconds
    assert 0 < trained < 10
    with serve(folder) as server:
        step(server)
        step(server)
        assert server._tasks["a"].progress.seconds > 0
        while server.status("a").state not in ENDED:
            step(server)
            seconds += 1
        status = server.status("a")
    assert status.state == "stopped early" and 3 < status.step < 20
    assert status.reason.startswith("trained for ")
    assert status.held_out_loss is not None
