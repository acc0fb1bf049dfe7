"""Changes of a watched directory that meet a task's end, a full disk or another look."""

import shutil
import time
from concurrent.futures import Future
from pathlib import Path

from .crash_images import copy_now
from .watched_server import known

LATE = "has ended (succeeded); give the file and the task another name"


def refuse_disk(*_):
    raise OSError(28, "No space left on device")


def counted(monkeypatch, thing, name: str) -> list:
    """The calls of a method from now on, which are carried out."""
    calls, real = [], getattr(thing, name)

    def call(*arguments):
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(thing, name, call)
    return calls


def try_again(own) -> None:
    """Lets the time pass until something is tried again."""
    assert own.retry_at > time.monotonic()
    own.retry_at = 0.0


def test_an_extension_with_which_a_task_has_ended_is_no_change(watch, put, tmp_path):
    """Also after a kill before the next look, and where the server knows few ended tasks."""
    before = {"acme/one": {"steps": 20}, "acme/two": {"epochs": 5}}
    after = {"acme/one": {"steps": 24, "priority": 3}, "acme/two": {"steps": 23}}
    places = list(before)

    def put_all(fields) -> None:
        for place in places:
            put(place, **fields[place])

    def check(server) -> None:
        server.poll(4)
        shown = [server.status(place) for place in places]
        assert [(own["state"], own["step"]) for own in shown] == [
            ("succeeded", 24),
            ("succeeded", 23),
        ]
        assert [own["error"] for own in shown] == [None, None]

    put_all(before)
    with watch(tmp_path) as server:
        server.poll_until(lambda: [*known(server.live).values()] == ["running", "running"])
        put_all(after)
        for _ in range(2):
            server.watcher.poll()  # the commands wait for the end of a round
        server.step_until(lambda: [*known(server.live).values()] == ["succeeded", "succeeded"])
        killed = copy_now(server.folder, tmp_path / "killed")
        check(server)
        put_all(after)
        check(server)
    shutil.rmtree(tmp_path / "server")
    killed.rename(tmp_path / "server")
    with watch(tmp_path) as server:
        check(server)
    with watch(tmp_path, most_ended=1) as server:
        put_all(after)
        check(server)
        one = after["acme/one"]
        for change in ({"steps": 20}, {"priority": 4}, {"paused": True}, {"epochs": 2}):
            put("acme/one", **(change if "epochs" in change else one | change))
            server.poll_until(lambda: server.status("acme/one")["error"])
            assert server.status("acme/one")["error"] == f"one.json: {LATE}"
            put("acme/one", **one)
            server.poll_until(lambda: server.status("acme/one")["error"] is None)


def test_a_deleted_specification_of_a_task_whose_end_is_not_kept_yet_is_not_refused(
    watch, put, tmp_path, monkeypatch
):
    """As when its adapter cannot be written."""
    path = put("acme/one")
    with watch(tmp_path) as server:
        with monkeypatch.context() as patch:
            patch.setattr(server.live._store, "is_exporting", lambda name: True)
            server.poll_until(lambda: server.live._tasks.unkept)
            cancelled = counted(patch, server.live, "cancel")
            path.unlink()
            server.poll(6)
            assert len(cancelled) == 1
            try_again(server.watched("acme/one"))
            server.poll(6)
            assert len(cancelled) == 2
            status = server.status("acme/one")
            assert (status["state"], status["error"]) == ("running", None)
        assert server.until("acme/one", "succeeded")["error"] is None
        server.poll_until(lambda: server.watcher._watched == {})
    assert not any("refused" in line or "waits" in line for line in server.said)


def test_a_cancel_that_cannot_be_kept_is_told_once_and_tried_again(
    watch, put, tmp_path, monkeypatch
):
    path = put("acme/one", steps=4000)
    with watch(tmp_path) as server:
        server.until("acme/one", "running")
        cancelled = counted(monkeypatch, server.live, "cancel")
        with monkeypatch.context() as patch:
            patch.setattr("jaxmux.server.database.Database.write", refuse_disk)
            path.unlink()
            server.poll(6)
            try_again(server.watched("acme/one"))
            server.poll(6)
            why = "cancel cannot be kept yet (No space left on device)"
            assert len(cancelled) == 2 and server.status("acme/one")["error"] == why
        try_again(server.watched("acme/one"))
        assert server.until("acme/one", "cancelled")["error"] is None
    assert server.said.count(f"acme/one.json: waits: {why}") == 1
    assert sum("acme/one.json" in line for line in server.said) == 1


def test_commands_that_could_not_be_kept_before_the_end_do_not_wait_any_more(
    watch, put, tmp_path, monkeypatch
):
    deleted, _ = put("acme/deleted", steps=20), put("acme/changed", steps=20)
    with watch(tmp_path) as server:
        server.poll_until(lambda: [*known(server.live).values()] == ["running", "running"])
        failed: Future[None] = Future()
        failed.set_exception(OSError(28, "No space left on device"))
        for name in ("cancel", "set_priority"):
            monkeypatch.setattr(server.live, name, lambda *_: failed)
        deleted.unlink()
        put("acme/changed", steps=20, priority=3)
        for _ in range(4):
            server.watcher.poll()
        for place, what in (("acme/deleted", "cancel"), ("acme/changed", "priority")):
            status = server.status(place)
            assert status["state"] == "running"
            assert status["error"].startswith(f"{what} cannot be kept yet (No space left")
        server.step_until(lambda: [*known(server.live).values()] == ["succeeded", "succeeded"])
        server.poll(2)
        assert server.status("acme/deleted")["error"] is None
        assert server.status("acme/changed")["error"] == f"changed.json: {LATE}"
        assert list(server.watcher._watched) == [("acme", "changed")]


def test_steps_that_cannot_be_kept_are_told_once_and_tried_again(watch, put, tmp_path, monkeypatch):
    put("acme/one", steps=4000)
    with watch(tmp_path) as server:
        server.until("acme/one", "running")
        extended = counted(monkeypatch, server.live, "extend")
        with monkeypatch.context() as patch:
            patch.setattr("jaxmux.server.database.Database.write", refuse_disk)
            put("acme/one", steps=5000)
            server.poll(6)
            try_again(server.watched("acme/one"))
            server.poll(3)
            status = server.status("acme/one")
            why = "steps cannot be kept yet (No space left on device)"
            assert len(extended) == 2 and (status["steps"], status["error"]) == (4000, why)
        try_again(server.watched("acme/one"))
        server.poll(3)
        status = server.status("acme/one")
        assert (status["steps"], status["error"]) == (5000, None)
    assert [line for line in server.said if "acme/one" in line] == [f"acme/one.json: waits: {why}"]


def test_an_extension_survives_a_kill(watch, put, tmp_path):
    """Fewer steps than those are refused."""
    put("acme/one", steps=4000)
    fewer = "one.json: steps should be at least 5000, as registered, found 4500"

    def refuse_fewer_steps():
        put("acme/one", steps=4500)
        server.poll_until(lambda: server.status("acme/one")["error"])
        status = server.status("acme/one")
        assert (status["steps"], status["error"]) == (5000, fewer)

    with watch(tmp_path) as server:
        server.until("acme/one", "running")
        put("acme/one", steps=5000)
        server.poll_until(lambda: server.status("acme/one")["steps"] == 5000)
        refuse_fewer_steps()
        image = copy_now(server.folder, tmp_path / "killed")
    shutil.rmtree(server.folder)
    image.rename(server.folder)
    with watch(tmp_path) as server:
        server.poll_until(lambda: known(server.live) == {"acme.one": "running"})
        refuse_fewer_steps()
        put("acme/one", steps=5000)
        server.poll_until(lambda: server.status("acme/one")["error"] is None)


def test_a_command_that_is_carried_out_during_a_look_is_not_given_again(
    watch, put, tmp_path, monkeypatch
):
    put("acme/one", steps=400)
    with watch(tmp_path) as server:
        server.until("acme/one", "running")
        real = server.live.statuses

        def statuses():
            found = real()
            server.live.step()
            return found

        monkeypatch.setattr(server.live, "statuses", statuses)
        for fields in ({"steps": 500}, {"steps": 500, "paused": True}, {"steps": 500}):
            put("acme/one", **fields)
            for _ in range(5):
                server.watcher.poll()
            assert server.status("acme/one")["error"] is None
        assert server.status("acme/one")["steps"] == 500


def change_for_long(server, path: Path) -> None:
    for _ in range(12):
        path.write_text(path.read_text() + " " if path.exists() else "")
        server.poll()


def test_a_file_that_is_missing_again_does_not_change_any_more(watch, put, tmp_path):
    data = put("acme/one", data="data/gone.jsonl").parent / "data" / "gone.jsonl"
    missing = (
        "one.json: data: 'data/gone.jsonl' cannot be opened (No such file or directory)",
        "refused",
    )
    with watch(tmp_path) as server:
        server.poll(4)
        assert (server.status("acme/one")["error"], server.state("acme/one")) == missing
        change_for_long(server, data)
        assert server.state("acme/one") == "waiting"
        data.unlink()
        server.poll(2)
        assert (server.status("acme/one")["error"], server.state("acme/one")) == missing


def test_a_specification_that_is_as_it_was_read_does_not_change_any_more(watch, put, tmp_path):
    """As when a tenant's folder is put back."""
    folder = put("acme/one", steps=400).parent
    with watch(tmp_path) as server:
        server.until("acme/one", "running")
        folder.rename(folder.with_name(".away"))
        change_for_long(server, put("acme/one", steps=400))
        assert "the file still changes" in server.status("acme/one")["error"]
        shutil.rmtree(folder)
        folder.with_name(".away").rename(folder)
        server.poll(3)
        assert server.status("acme/one")["error"] is None
