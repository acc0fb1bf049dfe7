"""What trackers are told: by a fake one, in the order of the rounds, also after a break."""

import json
import math
import shutil
import threading
import time
from collections import defaultdict

import pytest

from jaxmux import PlanningError, RunOptions, ServerOptions
from jaxmux.engine import TaskUpdate
from jaxmux.runs import checkpoints
from jaxmux.runs.checkpoints import RunPosition
from jaxmux.runs.metrics import MetricsWriter
from jaxmux.runs.trackers import (
    TRACKERS,
    RunTrackers,
    TrackedRun,
    TrackerKind,
    records,
    refuse_missing,
    run_trackers,
)
from jaxmux.server.server import tuning_server
from jaxmux.server.task import ENDED

from .server_steps import finish, settle, step
from .simulated_tasks import OPTIONS

FIELDS = {name: name for name in ("loss", "lr", "grad_norm")}


class Fake:
    """Remembers what it is told. `failing` names the method that fails."""

    failing = ""

    def __init__(self):
        self.opened, self.points, self.closed = [], [], []

    def open(self, run, id, keep):
        self.opened.append((run, id))
        if self.failing == "open":
            raise RuntimeError("no network\nand more")
        if id is None:
            keep("the id")
        return self

    def log(self, point):
        if self.failing == "log" and point.step:
            raise OSError("no space left")
        self.points.append(point)

    def close(self, finished):
        if self.failing == "close":
            raise ValueError()
        self.closed.append(finished)


@pytest.fixture
def fake(monkeypatch):
    own = Fake()

    class Kind(TrackerKind):
        open = property(lambda self: own.open)

    monkeypatch.setitem(TRACKERS, "fake", Kind("Fake", "", "json"))
    monkeypatch.setitem(TRACKERS, "forgetful", Kind("Forgetful", "", "json", forgets=True))
    return own


@pytest.fixture
def interrupted(make_task, train, data, tmp_path, monkeypatch):
    """A run that ends behind a checkpoint, as if it was killed; `between` is called before it goes
    on. Returns what the files say by series, and the rounds after which it has gone on."""

    def run(tracker: str, between=lambda: None):
        tasks = [make_task("a", steps=7, eval_data=data["short.eval"], eval_every=2)]
        tasks.append(make_task("b"))
        save = checkpoints.Checkpoints.save

        def save_and_die(*arguments):
            if arguments[1] > 6:
                raise KeyboardInterrupt
            save(*arguments)

        options = {"checkpoint_every": 2, "trackers": tracker, "tokens_per_microbatch": 256}
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints.Checkpoints, "save", save_and_die)
            with pytest.raises(KeyboardInterrupt):
                train(tmp_path / "run", *tasks, **options)
        between()
        train(tmp_path / "run", *tasks, **options)
        expected = defaultdict(list)
        for line in read_lines(tmp_path / "run" / "metrics.jsonl"):
            for name in FIELDS:
                expected[f"{name}/{line['task']}"].append((line["step"], line[name]))
        for line in read_lines(tmp_path / "run" / "held_out.jsonl"):
            expected[f"held_out_loss/{line['task']}"].append((line["step"], line["loss"]))
        return expected

    return run


def series(points) -> dict[str, list[tuple[int, float]]]:
    found = defaultdict(list)
    for point in points:
        for name, value in point.values.items():
            found[name].append((point.step, value))
    return found


def read_lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_tracker_is_told_what_the_files_say_also_after_a_break(fake, interrupted, tmp_path):
    expected = interrupted("fake")
    assert not (tmp_path / "run" / "tensorboard").exists()
    (run, id), (later, kept) = fake.opened
    assert (run.name, run.rounds, id) == ("run", 0, None)
    assert later.rounds > 0 and (kept, fake.closed) == ("the id", [False, True])
    assert run.config["tasks"]["a"]["adapter"]["rank"] == 2
    assert run.config["options"]["checkpoint_every"] == 2
    assert series(fake.points) == expected


def test_a_tracker_that_failed_is_told_what_it_lacks_when_the_run_goes_on(fake, interrupted):
    fake.failing = "log"
    expected = interrupted("fake", between=lambda: setattr(fake, "failing", ""))
    told = fake.opened[1][0].rounds
    assert any(0 < point.step < told and point.repeated for point in fake.points)
    assert series(fake.points) == expected


def test_a_tracker_that_forgets_is_told_again_what_was_measured_at_the_checkpoint(
    fake, interrupted
):
    first = []
    expected = interrupted("forgetful", between=lambda: first.extend(fake.points))
    rounds = fake.opened[1][0].rounds
    # As TensorBoard does.
    kept = [point for point in first if point.step < rounds]
    again = fake.points[len(first) :]
    assert series([*kept, *again]) == expected
    assert any(point.held_out and point.step == rounds for point in again)


def test_a_tracker_of_an_earlier_version_is_told_of_no_round_again(fake, interrupted, tmp_path):
    path = tmp_path / "run" / "trackers.json"
    expected = interrupted("fake", between=lambda: path.write_text('{"fake": "the id"}'))
    found = series(fake.points)
    assert {name: sorted(own) for name, own in found.items()} == expected


@pytest.mark.parametrize("failing", ["open", "log", "close"])
def test_a_tracker_that_fails_does_not_end_training(
    fake, failing, make_task, train, tmp_path, capsys
):
    fake.failing = failing
    assert train(tmp_path, make_task(), trackers=("tensorboard", "fake")).succeeded
    printed = capsys.readouterr().out
    reason = {"open": "no network", "log": "no space left", "close": "ValueError"}[failing]
    assert printed.count(f"Fake: {reason}; training goes on without it") == 1
    assert printed.count("training goes on") == 1 and "and more" not in printed
    assert list((tmp_path / "tensorboard").iterdir())


def test_numbers_that_are_not_finite_are_not_tracked(fake, tmp_path):
    said = []
    trackers = RunTrackers(["fake"], TrackedRun("run", tmp_path, 0, {}), said.append)

    class Directory:
        metrics, held_out = tmp_path / "metrics.jsonl", tmp_path / "held_out.jsonl"
        rounds = tmp_path / "rounds.jsonl"

    writer = MetricsWriter(Directory, RunPosition(), trackers, said.append)
    fields = {"target_tokens": 1, "tokens": 1, "computed_tokens": 1, "skipped": True}
    for i, loss, norm in ((0, math.nan, 1.0), (1, math.inf, math.nan)):
        update = TaskUpdate(i, "a", i + 1, loss=loss, lr=0.5, grad_norm=norm, **fields)
        writer.write([update], [])
    writer.close()
    values = [dict(point.values) for point in fake.points]
    assert values == [{"lr/a": 0.5, "grad_norm/a": 1.0}, {"lr/a": 0.5}]
    assert fake.closed == [False] and not said


def test_a_missing_package_is_named_before_anything_is_read(
    make_task, train, tmp_path, monkeypatch
):
    missing = TrackerKind("W", ".wandb", "jaxmux_has_no_such_package", "wandb")
    monkeypatch.setitem(TRACKERS, "wandb", missing)
    with pytest.raises(PlanningError, match=r"'wandb' needs .*: pip install '\.\[wandb\]'"):
        train(tmp_path / "run", make_task(), trackers=["tensorboard", "wandb"])
    assert not (tmp_path / "run").exists()
    refuse_missing(["tensorboard"])


def test_unknown_trackers_are_refused():
    assert RunOptions(trackers=["mlflow", "mlflow"]).trackers == ("mlflow",)
    with pytest.raises(PlanningError, match="'wandv' is unknown; did you mean wandb"):
        RunOptions(trackers="wandv")
    assert ServerOptions().trackers == ()
    with pytest.raises(PlanningError, match="'wandv' is unknown; did you mean wandb"):
        ServerOptions(trackers="wandv")


@pytest.fixture(scope="module")
def serve(backbone):
    """Opens a server on the tiny backbone."""

    def open_server(folder, **options):
        chosen = ServerOptions(**OPTIONS | {"trackers": "fake"} | options)
        return tuning_server(backbone, folder, chosen, say=print)

    return open_server


def tracked(folder) -> dict[str, list[tuple[int, float]]]:
    """By name, what a server's events say, those of a second task of a name apart."""
    found, count, ended = defaultdict(list), defaultdict(int), defaultdict(bool)
    for event in read_lines(folder / "events.jsonl"):
        name = event["task"]
        if event["kind"] == "state":
            # Another task has got the name.
            count[name] += ended[name] and event["state"] not in ENDED
            ended[name] = event["state"] in ENDED
            continue
        fields = {"held_out_loss": "loss"} if event["kind"] == "evaluation" else FIELDS
        series = f"_{count[name] + 1}_{name}" if count[name] else name
        for metric, field in fields.items():
            found[f"{metric}/{series}"].append((event["step"], event[field]))
    return found


def test_a_server_tells_of_tasks_that_go_return_and_share_a_name(
    fake, serve, make_task, data, tmp_path, monkeypatch
):
    # How far trackers have got is hardly ever written, but names are.
    monkeypatch.setattr(records, "_EVERY", 60.0)
    folder, crashed = tmp_path / "server", tmp_path / "crashed"
    measured = {"eval_data": data["short.eval"], "eval_every": 2}
    with serve(folder, checkpoint_every=3, most_ended=1) as server:
        server.register(make_task("a", steps=3, **measured))
        server.register(make_task("b", steps=20))
        server.register(make_task("gone", steps=90))
        step(server, 4)
        server.cancel("gone")
        while "a" in [status.name for status in server.statuses()]:
            step(server, 1)
        # Another task with the name of one that the server has forgotten.
        server.register(make_task("a", steps=9, seed=4))
        step(server, 4)
        settle(server)
        while not fake.points or fake.points[-1].step < server._engine.rounds - 2:
            time.sleep(0.01)
        shutil.copytree(folder, crashed)
        before = len(fake.points)
        known = {name: own for name, own in tracked(folder).items()}
    assert series(fake.points[:before]).keys() == known.keys() >= {"loss/_2_a", "loss/gone"}
    del fake.points[before:]
    with serve(crashed, most_ended=1) as server:
        while server.status("b").step < 18:
            step(server, 1)
    # The rounds since the checkpoint have numbers of their own, so no curve goes back.
    found = series(fake.points)
    assert found == tracked(crashed)
    assert all([step for step, _ in own] == sorted({s for s, _ in own}) for own in found.values())
    (run, first), (again, id) = fake.opened
    assert (run.rounds, again.rounds, first, id) == (None, None, None, "the id")
    assert not any(point.repeated for point in fake.points)


def test_a_slow_tracker_holds_up_no_training_of_a_server(
    fake, serve, make_task, tmp_path, monkeypatch, capsys
):
    going_on = threading.Event()
    monkeypatch.setattr(fake, "log", lambda point: going_on.wait())
    monkeypatch.setattr(run_trackers, "_MOST_BEHIND", 4)
    with serve(tmp_path / "server") as server:
        server.register(make_task("a", steps=12))
        finish(server)
        assert server.status("a").state == "succeeded"
        going_on.set()
    assert capsys.readouterr().out.count("Fake: is 4 rounds behind; training goes on") == 1
