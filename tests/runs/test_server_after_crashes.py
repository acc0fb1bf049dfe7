"""What a crash before the first checkpoint, or within one, leaves of tasks."""

import os
import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from jaxmux.runs.metrics import LineLog, objects
from jaxmux.server import saving
from jaxmux.server.database import Database
from jaxmux.server.task import ENDED

from .crash_images import copy_now
from .server_steps import finish, settle, step
from .test_server_faults import serve, task  # noqa: F401


def test_a_checkpoint_has_the_task_that_has_taken_a_name(
    serve,  # noqa: F811
    task,  # noqa: F811
    data,
    tmp_path,
    monkeypatch,
):
    """One task is copied in a round, so the name is used again while the others are copied."""
    monkeypatch.setattr(saving, "_COPIED_AT_ONCE", 1)
    folder = tmp_path / "server"
    with serve(folder, most_ended=1, checkpoint_every=5, reserved_slots=9) as server:
        for name in "abcdefghi":
            server.register(task(name, steps=1000))
        while not server._saving._copied:
            step(server)
        assert list(server._saving._copied) == [server._tasks["a"].key]
        # The second end lets the first be forgotten.
        for name in ("a", "b"):
            server.cancel(name)
            step(server)
        assert "a" not in {own.name for own in server.statuses()}
        registered = server.register(task("a", data=data["long"], steps=7777))
        step(server)
        assert registered.exception(timeout=0) is None and server._saving._copied
        while server._saving._copied is not None:
            step(server)
        settle(server)
        copy_now(folder, tmp_path / "copy")
        totals = server.totals()
    with serve(tmp_path / "copy", most_ended=1, reserved_slots=9) as server:
        # The arrays are those of the new task, which has trained while the others were copied.
        assert 0 < server.status("a").step
        step(server)
        status = server.status("a")
        assert status.steps == 7777 and server._tasks["a"].specification.data.path == data["long"]
        assert server.totals().effective_tokens <= totals.effective_tokens


def test_a_task_that_has_begun_outlives_a_moment_without_its_data(
    serve,  # noqa: F811
    task,  # noqa: F811
    data,
    tmp_path,
):
    """There is no checkpoint yet. Nor does it matter that the time of a file has changed."""
    folder = tmp_path / "server"
    paths = {
        name: shutil.copy(data["short"], tmp_path / f"{name}.jsonl") for name in ("gone", "touched")
    }
    with serve(folder, checkpoint_every=1000) as server:
        for name, path in paths.items():
            server.register(task(name, data=str(path), steps=12))
        step(server)
        while not all(own.step > 0 for own in server.statuses()):
            step(server)
        copy_now(folder, tmp_path / "copy")
    away = Path(paths["gone"]).rename(tmp_path / "away")
    os.utime(paths["touched"], ns=(1, 1))
    with serve(tmp_path / "copy") as server:
        while server.status("touched").state != "succeeded":
            step(server)
        status = server.status("gone")
        assert status.state == "paused" and "gone" in status.reason
        away.rename(paths["gone"])
        server.resume("gone")
        finish(server)
        assert {own.state for own in server.statuses()} == {"succeeded"}


def ends_of(folder: Path) -> Counter[tuple[str, str]]:
    """How often events tell that a task has ended, by its name and state."""
    events = objects((folder / "events.jsonl").read_bytes())
    return Counter((e["task"], e["state"]) for e in events if e.get("state") in ENDED)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_every_end_is_told_once_wherever_a_server_is_killed(
    every,
    serve,  # noqa: F811
    task,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    """Killed before, within and after one of `every` writes that are about an end, and killed once
    more after the restart."""
    folder, images = tmp_path / "server", []

    def take(cut: Path | None = None, length: int = 0) -> None:
        images.append(copy_now(folder, tmp_path / f"image{len(images)}"))
        if cut:
            os.truncate(images[-1] / cut.relative_to(folder), length)

    def write(database, tasks, *others, real=Database.write):
        ends = {row["state"] for row in tasks.changed.values()} & ENDED
        if ends:
            take()
        real(database, tasks, *others)
        if ends:
            take()

    def append(log, fields, real=LineLog.append):
        if fields.get("state") not in ENDED:
            return real(log, fields)
        path = folder / "events.jsonl"
        take()
        before = path.stat().st_size
        is_written = real(log, fields)
        take(path, (before + path.stat().st_size) // 2)
        take()
        return is_written

    with monkeypatch.context() as patch:
        patch.setattr(Database, "write", write)
        patch.setattr(LineLog, "append", append)
        with serve(folder, checkpoint_every=1000) as server:
            for name, steps in (("saved", 1), ("cancelled", 50)):
                server.register(task(name, steps=steps))
            step(server)
            while server.status("saved").state != "succeeded":
                step(server)
            server.save()
            server.cancel("cancelled")
            finish(server)
            take()
    expected = {("saved", "succeeded"): 1, ("cancelled", "cancelled"): 1}
    assert ends_of(folder) == expected and len(images) > 8

    for image in images[::every]:
        with serve(image) as server:
            step(server)
            copy_now(image, again := Path(f"{image}.again"))
        with serve(again) as server:
            server.step()
            if not ends_of(again)["cancelled", "cancelled"]:
                server.cancel("cancelled")
            finish(server)
        assert ends_of(again) == expected, image


def test_an_end_whose_line_was_lost_is_told_by_the_next_server(
    serve,  # noqa: F811
    task,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    """The disk is full for events.jsonl, and not for the table."""
    folder = tmp_path / "server"
    with serve(folder) as server:
        server.register(task("a", steps=1))
        with monkeypatch.context() as patch:
            patch.setattr(LineLog, "append", lambda *_: False)
            finish(server)
    assert not ends_of(folder)
    for _ in range(2):
        with serve(folder) as server:
            step(server)
        assert ends_of(folder) == {("a", "succeeded"): 1}


def test_two_kills_around_a_log_that_is_set_aside_tell_an_end_once(
    serve,  # noqa: F811
    task,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    """The table has the length of the file before when the first kill comes."""
    folder, images = tmp_path / "server", []

    def set_aside(log, real=LineLog.set_aside_if_large):
        is_new = real(log)
        if is_new and log._path.name == "events.jsonl" and ENDED & states_of(folder):
            images.append(copy_now(folder, tmp_path / f"image{len(images)}"))
        return is_new

    with monkeypatch.context() as patch:
        patch.setattr(LineLog, "set_aside_if_large", set_aside)
        with serve(folder, events_bytes=300) as server:
            server.register(task("a", steps=3))
            finish(server)
            step(server)
    assert images
    with serve(images[0]) as server:
        server.events()
        copy_now(images[0], again := tmp_path / "again")
    with serve(again) as server:
        step(server)
    told = Counter(
        event["state"]
        for path in again.glob("events*.jsonl")
        for event in objects(path.read_bytes())
        if event.get("state") in ENDED
    )
    assert told == {"succeeded": 1}


def states_of(folder: Path) -> set[str]:
    """The states of the tasks in a server's table."""
    with closing(sqlite3.connect(folder / "server.db")) as database:
        return {state for (state,) in database.execute("SELECT state FROM tasks")}
