"""What tasks have used, how they were extended and what happened to them survives crashes, and the
files of a server stay bounded."""

import dataclasses
import errno
import json
import math
import os
import shutil

import pytest

from jaxmux.optimizers import AdamW, Schedule
from jaxmux.runs.metrics import LineLog
from jaxmux.runs.run_directory import RunDirectoryError
from jaxmux.server import saving
from jaxmux.server.server import ServerOptions, tuning_server

from .server_steps import finish, settle, step, step_until
from .simulated_tasks import OPTIONS
from .simulated_tasks import make_task as make_kind


@pytest.fixture(scope="module")
def serve(backbone):
    """Opens a server on the tiny backbone."""

    def open_server(folder, said=None, **options):
        say = [].append if said is None else said.append
        return tuning_server(backbone, folder, ServerOptions(**OPTIONS | options), say=say)

    return open_server


@pytest.fixture(scope="module")
def cosine(make_task):
    """A task whose learning rate decays along half a cosine wave."""
    return make_task("a", steps=6, optimizer=AdamW(1e-2, schedule=Schedule("cosine")))


def crashed(folder, tmp_path):
    """A copy of the folder, as a process leaves it that is killed now."""
    return shutil.copytree(folder, tmp_path / f"crashed{len(list(tmp_path.iterdir()))}")


def events_of(folder):
    """All events that the files of a server's folder hold, from the oldest on."""
    numbered = sorted(folder.glob("events.*.jsonl"), key=lambda p: int(p.name.split(".")[1]))
    lines = [line for p in (*numbered, folder / "events.jsonl") for line in p.open()]
    return [json.loads(line) for line in lines]


def updates_of(folder, name):
    return [e for e in events_of(folder) if e["kind"] == "update" and e["task"] == name]


def assert_totals(server):
    totals, parts = server.totals(), [status.meter for status in server.statuses()]
    for field in dataclasses.fields(totals):
        total = math.fsum(getattr(meter, field.name) for meter in parts)
        assert getattr(totals, field.name) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "damaged"),
    [pytest.param("adamw", False, marks=pytest.mark.slow), ("large", True)],
)
def test_a_cancelled_task_has_used_the_same_after_a_crash(kind, damaged, serve, data, tmp_path):
    """With the round that was on its way when it was cancelled, and a batch without an update."""
    folder, said = tmp_path / "server", []
    with serve(folder, checkpoint_every=1000) as server:
        server.register(make_kind(kind, "a", 30, data))
        server.register(make_kind("adamw", "b", 30, data))
        step(server, 3)
        server.save()
        step(server, 5)
        server.save()
        settle(server)
        saved = server.status("a").meter
        step(server, 8)
        server.cancel("a")
        server._runner.carry_out()
        early, cancelled = crashed(folder, tmp_path), server.status("a").meter
        step(server, 2)
        used = server.status("a").meter
        late = crashed(folder, tmp_path)
    assert saved.computed_tokens < cancelled.computed_tokens < used.computed_tokens
    for copy, expected in ((early, cancelled), (late, used)):
        if damaged:
            (copy / "checkpoints" / "2" / "run" / "metadata").write_text("{")
        with serve(copy, said) as server:
            assert server.status("a").state == "cancelled"
            assert server.status("a").meter == expected
            assert_totals(server)
            step(server, 4)
            server.save()
        with serve(copy) as server:
            assert server.status("a").meter == expected
            assert_totals(server)
    assert len(said) == 2 * damaged


def test_turns_of_a_saved_batch_that_begins_again_count_once(serve, data, tmp_path):
    calm, folder = tmp_path / "calm", tmp_path / "server"
    task = make_kind("large", "a", 3, data)
    with serve(calm) as server:
        server.register(task)
        finish(server)
        expected = server.status("a").meter
    with serve(folder, checkpoint_every=1000) as server:
        server.register(task)
        step_until(server, "a", 1)
        step(server, 2)
        server.save()
        saved = server.status("a").meter
    (whole,) = [event["computed_tokens"] for event in updates_of(folder, "a")]
    assert saved.computed_tokens > whole
    with serve(folder) as server:
        finish(server)
        meter = server.status("a").meter
        assert_totals(server)
    again = {"recomputed_tokens": saved.computed_tokens - whole, "device_seconds": 0.0}
    assert dataclasses.replace(meter, device_seconds=0.0) == dataclasses.replace(expected, **again)


def test_what_is_computed_again_after_a_crash_is_not_paid_again(serve, data, tmp_path):
    """There is no checkpoint, so the task begins anew."""
    folder = tmp_path / "server"
    with serve(folder, checkpoint_every=1000) as server:
        server.register(make_kind("adamw", "a", 7, data))
        step_until(server, "a", 4)
        used, copy = server.status("a").meter, crashed(folder, tmp_path)
    with serve(copy, checkpoint_every=1000) as server:
        assert server.status("a").meter == used
        step_until(server, "a", 2)
        again = server.status("a").meter
        assert again.recomputed_tokens > 0
        assert dataclasses.replace(again, recomputed_tokens=0) == used
        finish(server)
        meter = server.status("a").meter
        assert_totals(server)
    assert meter.device_seconds > used.device_seconds
    with serve(tmp_path / "calm") as server:
        server.register(make_kind("adamw", "a", 7, data))
        finish(server)
        calm = server.status("a").meter
    paid = {"recomputed_tokens": 0, "device_seconds": 0.0}
    assert dataclasses.replace(meter, **paid) == dataclasses.replace(calm, **paid)


def test_the_totals_survive_forgotten_tasks(serve, data, tmp_path):
    folder, used = tmp_path / "server", {}
    with serve(folder, most_ended=1) as server:
        for name in "abc":
            server.register(make_kind("adamw", name, 2, data))
            step(server)
            finish(server)
            used[name] = server.status(name).meter
        server.save()
        totals = server.totals()
    with serve(folder, most_ended=1) as server:
        assert [status.name for status in server.statuses()] == ["c"]
        assert server.totals() == totals
    for field in ("effective_tokens", "computed_tokens", "trained_tokens"):
        assert getattr(totals, field) == sum(getattr(meter, field) for meter in used.values())


def test_a_name_that_was_used_again_since_the_checkpoint_is_that_of_the_new_task(
    serve, data, tmp_path
):
    folder = tmp_path / "server"
    with serve(folder, most_ended=1, checkpoint_every=1000) as server:
        server.register(make_kind("adamw", "a", 2, data))
        finish(server)
        server.save()
        for name, steps in (("b", 1), ("a", 5)):
            server.register(make_kind("adamw", name, steps, data))
            finish(server)
        expected = server.totals().effective_tokens
        copy = crashed(folder, tmp_path)
    with serve(copy, most_ended=1) as server:
        finish(server)
        assert server.status("a").step == 5
        assert server.totals().effective_tokens == expected


def test_the_steps_of_a_forgotten_task_of_the_same_name_are_not_those_of_a_new_one(
    serve, data, tmp_path
):
    folder = tmp_path / "server"
    with serve(folder, most_ended=1) as server:
        for name, steps in (("a", 6), ("b", 1)):
            server.register(make_kind("adamw", name, steps, data))
            step(server)
            finish(server)
        server.save()
        server.register(make_kind("adamw", "a", 5, data))
        step_until(server, "a", 1)
        assert server.status("a").step == 1
        copy = crashed(folder, tmp_path)
    with serve(copy) as server:
        finish(server)
        status = server.status("a")
    # Its first step has been trained twice, by events that came after its registration.
    assert status.step == 5
    first = updates_of(copy, "a")[6]
    assert (first["task_step"], status.meter.recomputed_tokens) == (1, first["computed_tokens"])


class Follower:
    """Reads events.jsonl as docs/tuning_server.md tells."""

    def __init__(self, path):
        self.path, self.file, self.events = path, path.open(), []

    def read(self):
        self.events += [json.loads(line) for line in self.file]
        if os.fstat(self.file.fileno()).st_ino != os.stat(self.path).st_ino:
            self.events += [json.loads(line) for line in self.file]
            self.file.close()
            self.file = self.path.open()
            self.events += [json.loads(line) for line in self.file]


def test_events_stay_bounded_and_can_be_followed(serve, data, tmp_path):
    folder, told = tmp_path / "server", []
    with serve(folder, events_bytes=3000) as server:
        tell = server._store.tell
        server._store.tell = lambda event: (told.append(event), tell(event))
        follower = Follower(folder / "events.jsonl")
        for i in range(9):
            server.register(make_kind("adamw", f"t{i}", 7, data))
        while len(told) < 100:
            step(server)
            follower.read()
    follower.read()
    assert [(e["task"], e["kind"]) for e in follower.events] == [(e.task, e.kind) for e in told]
    kept = events_of(folder)
    assert kept == follower.events[-len(kept) :] and len(kept) < len(told)
    names = {path.name for path in folder.glob("events.*")}
    numbers = sorted(int(name.split(".")[1]) for name in names - {"events.jsonl"})
    assert len(numbers) == 3 and numbers[0] > 1
    # A file is set aside after the events of a round.
    assert all(path.stat().st_size < 5000 for path in folder.glob("events.*"))
    # The next server goes on with them.
    with serve(folder, events_bytes=3000) as server:
        server.register(make_kind("adamw", "t9", 7, data))
        step(server, 3)
    assert "t9" in {event["task"] for event in events_of(folder)}


@pytest.mark.parametrize("broken", ["open", "rename"])
def test_a_file_that_cannot_be_set_aside_goes_on(broken, tmp_path, monkeypatch):
    path, said = tmp_path / "events.jsonl", []
    log = LineLog(path, said.append, 50)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os if broken == "open" else type(path), broken, full)
        for number in range(9):
            log.append({"task": f"t{number}"})
            assert not log.set_aside_if_large()
    assert [event["task"] for event in events_of(tmp_path)] == [f"t{n}" for n in range(9)]
    assert len(said) == 1 and "cannot be set aside (No space left on device)" in said[0]
    assert log.set_aside_if_large()
    log.append({"task": "t9"})
    assert len(path.read_text().splitlines()) == 1 and len(events_of(tmp_path)) == 10
    log.close()


@pytest.fixture(scope="module")
def extended(serve, cosine, adapter_bytes, tmp_path_factory):
    """Extends a task to 9 steps when so many updates have been seen, and trains it to its end;
    returns the learning rates and the adapter."""

    def train(seen):
        folder = tmp_path_factory.mktemp("calm") / "server"
        with serve(folder) as server:
            server.register(cosine)
            step_until(server, "a", seen)
            server.extend("a", 9)
            finish(server)
        return rates_of(folder), adapter_bytes(folder / "adapters" / "a")

    return train


def rates_of(folder):
    """By step, the learning rate at which it was trained last."""
    return {event["task_step"]: event["lr"] for event in updates_of(folder, "a")}


@pytest.mark.parametrize("seen", [pytest.param(3, marks=pytest.mark.slow), 5])
def test_an_extension_takes_effect_at_the_same_step_after_a_crash(
    seen, serve, cosine, extended, adapter_bytes, tmp_path
):
    """After 5 updates the last one of the shorter schedule has been dispatched."""
    rates, adapter = extended(seen)
    assert sorted(rates) == list(range(1, 10))
    folder, copies = tmp_path / "server", []
    with serve(folder, checkpoint_every=1000) as server:
        server.register(cosine)
        step_until(server, "a", 1)
        server.save()
        settle(server)
        assert server.status("a").step < seen
        step_until(server, "a", seen)
        server.extend("a", 9)
        step(server)
        copies.append(crashed(folder, tmp_path))
        step(server, 2)
        copies.append(crashed(folder, tmp_path))
    for copy in copies:
        with serve(copy, checkpoint_every=1) as server:
            assert server.status("a").steps == 9
            step(server, 2)
            settle(server)
        # The step of the extension may still be to come, and is kept in checkpoints.
        with serve(copy) as server:
            finish(server)
        assert rates_of(copy) == rates
        assert adapter_bytes(copy / "adapters" / "a") == adapter


def test_an_extension_while_tasks_are_being_saved_keeps_its_step(
    serve, cosine, extended, data, adapter_bytes, tmp_path, monkeypatch
):
    """Task a is copied first, and extended before the checkpoint has been written."""
    monkeypatch.setattr(saving, "_COPIED_AT_ONCE", 1)
    folder = tmp_path / "server"
    with serve(folder, checkpoint_every=3) as server:
        server.register(cosine)
        server.register(make_kind("adamw", "b", 30, data))
        server.register(make_kind("adamw", "c", 30, data))
        # So that they begin in their order.
        server._runner.carry_out()
        settle(server)
        step_until(server, "a", 2)
        while not server._saving._copied:
            step(server)
        seen, key = server.status("a").step, server._tasks["a"].key
        copied = server._saving._copied[key].progress.step
        server.extend("a", 9)
        step(server)
        while server._saving._copied:
            step(server)
        settle(server)
        copy = crashed(folder, tmp_path)
    rates, adapter = extended(seen)
    with serve(copy) as server:
        assert server.status("a").step == copied < seen + 1
        finish(server)
    assert rates_of(copy) == rates
    assert adapter_bytes(copy / "adapters" / "a") == adapter


def test_a_folder_of_an_earlier_version_is_refused(serve, tmp_path):
    with serve(tmp_path):
        pass
    record = json.loads((tmp_path / "server.json").read_text())
    (tmp_path / "server.json").write_text(json.dumps(record | {"format": 1}))
    with pytest.raises(RunDirectoryError, match=r"jaxmux 0\.1\.0 or an earlier .* has written it"):
        serve(tmp_path).__enter__()
