"""What a server does while it cannot write, or writes slowly."""

import shutil
import threading
import time

import orbax.checkpoint
import pytest

from jaxmux.runs.checkpoints import Checkpoints
from jaxmux.runs.run_directory import RunDirectoryError
from jaxmux.server import saving, store
from jaxmux.server.database import Database

from .server_steps import finish, settle, step
from .test_server_faults import serve, task  # noqa: F401


def until(server, name):
    """Trains until a task has succeeded."""
    while name not in {own.name for own in server.statuses() if own.state == "succeeded"}:
        step(server)


@pytest.fixture
def refuse(monkeypatch):
    """Lets the adapters of some tasks fail, as long as they are in the result."""
    refused, export = {}, store.export_adapter

    def write(folder, *arguments, **keywords):
        if error := refused.get(folder.name):
            raise error
        return export(folder, *arguments, **keywords)

    monkeypatch.setattr(store, "export_adapter", write)
    return refused


def test_an_adapter_that_fails_in_any_way_holds_up_nothing_else(
    serve,  # noqa: F811
    task,  # noqa: F811
    tmp_path,
    refuse,
):
    refuse["bad"], said = ValueError("surrogates not allowed"), []
    with serve(tmp_path / "server", said, checkpoint_every=4, most_ended=1) as server:
        for name in ("bad", "good"):
            server.register(task(name, steps=2))
        until(server, "good")
        assert server.status("bad").state == "running"
        assert server.status("bad").reason == "its end is being written to disk"
        # The end of "bad" is not kept, so it is not forgotten; others are.
        for name, steps in (("lasting", 12), ("last", 1)):
            server.register(task(name, steps=steps))
            until(server, name)
        assert server._store._checkpoints.numbers
        assert {own.name for own in server.statuses()} == {"bad", "last"}
        server.save()
        problem = "adapter bad: cannot be written yet (surrogates not allowed)"
        assert server.problem == problem
        assert said.count(f"{problem}; training goes on") == 1
        refuse.clear()
        server.save()
        assert server.problem is None
        assert server.status("bad").state == "succeeded"


def test_whoever_calls_step_need_not_save(serve, task, tmp_path, refuse, monkeypatch):  # noqa: F811
    monkeypatch.setattr(store, "_FIRST_WAIT", 0.01)
    refuse["a"] = OSError(28, "No space left on device")
    with serve(tmp_path / "server") as server:
        server.register(task("a", steps=1))
        while "a" not in server._tasks.unkept:
            step(server)
        step(server, 3)
        refuse.clear()
        last = time.monotonic() + 20
        while server.status("a").state != "succeeded":
            assert time.monotonic() < last
            step(server)


def test_nothing_is_written_again_while_nothing_happens(
    serve,  # noqa: F811
    task,  # noqa: F811
    tmp_path,
    refuse,
    monkeypatch,
):
    """Neither because a checkpoint takes long, nor because an adapter cannot be written."""
    refuse["a"], begun, may_end = OSError(28, "No space left on device"), [], threading.Event()
    save = Checkpoints.save

    def slow(checkpoints, number, *arguments):
        begun.append(number)
        may_end.wait()
        save(checkpoints, number, *arguments)

    monkeypatch.setattr(Checkpoints, "save", slow)
    with serve(tmp_path / "server") as server:
        server.register(task("a", steps=1))
        server.step()
        while server.status("a").step < 1:
            server.step()
        for _ in range(5):
            server.save(wait=False)
        may_end.set()
        for _ in range(5):
            settle(server)
            step(server)
            server.save(wait=False)
    # The last one is that of the end of the server, if any.
    assert len(begun) <= 2


def test_tasks_that_come_as_fast_as_they_are_copied_do_not_stop_checkpoints(
    serve,  # noqa: F811
    task,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    monkeypatch.setattr(saving, "_COPIED_AT_ONCE", 1)
    with serve(tmp_path / "server", checkpoint_every=2) as server:
        slots = server._engine.size.slots
        server.register(task("lasting", steps=1000))
        step(server, 3)
        for i in range(3 * slots):
            server.register(task(f"short{i}", steps=1 + i % 2))
        before = server._store._number
        rounds = 0
        while server._store._number == before:
            # As many arrive as have left.
            running = sum(own.state != "succeeded" for own in server.statuses())
            for i in range(2 * slots - running):
                server.register(task(f"more{rounds}_{i}", steps=1 + i % 2))
            step(server)
            rounds += 1
            assert rounds < 2 * slots


def test_a_checkpoint_that_fails_leaves_nothing(
    serve,  # noqa: F811
    task,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    folder = tmp_path / "server"
    left = folder / "checkpoints" / "1.orbax-checkpoint-tmp"

    def fail(checkpointer, folder, args):
        left.mkdir()
        (left / "array").write_bytes(b"half of it")
        raise ValueError("RESOURCE_EXHAUSTED: Error writing 'q_proj': No space left on device")

    with serve(folder) as server:
        server.register(task("a"))
        step(server, 3)
        with monkeypatch.context() as patch:
            patch.setattr(orbax.checkpoint.Checkpointer, "save", fail)
            server.save()
        assert server.problem == "checkpoint 1: cannot be written (No space left on device)"
        assert not left.exists()


def test_orbax_does_not_begin_what_the_disk_has_no_room_for(
    serve,  # noqa: F811
    task,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    with serve(tmp_path / "server") as server:
        server.register(task("a"))
        step(server, 2)
        with monkeypatch.context() as patch:
            full = shutil.disk_usage(tmp_path)._replace(free=10)
            patch.setattr(store.shutil, "disk_usage", lambda path: full)
            patch.setattr(Checkpoints, "save", None)
            server.save()
            assert server.problem == "checkpoint 1: cannot be written (No space left on device)"
        server.save()
        assert server.problem is None


def test_a_checkpoint_that_should_have_been_deleted_is(serve, task, tmp_path):  # noqa: F811
    folder = tmp_path / "server"
    with serve(folder, keep_checkpoints=1) as server:
        server.register(task("a", steps=1000))
        for _ in range(2):
            step(server, 2)
            server.save()
        (number,) = server._store._checkpoints.numbers
        forgotten = shutil.copytree(
            folder / "checkpoints" / str(number), folder / "checkpoints" / str(number - 1)
        )
        step(server, 2)
        server.save()
        assert not forgotten.exists()
        assert server._store._checkpoints.numbers == [number + 1]


def test_checkpoints_that_are_missing_are_refused(serve, task, tmp_path):  # noqa: F811
    """With one checkpoint, the beginning takes its place; with more, much would be lost."""
    folder = tmp_path / "server"
    with serve(folder, keep_checkpoints=2) as server:
        server.register(task("a", steps=1000))
        for count in (1, 2):
            step(server, 2)
            server.save()
            copy = shutil.copytree(folder, tmp_path / f"copy{count}")
            shutil.rmtree(copy / "checkpoints")
    said = []
    with serve(tmp_path / "copy1", said, keep_checkpoints=2) as server:
        step(server, 2)
        assert server.status("a").step < 4
    assert said == ["task 'a': no intact checkpoint has it, so it begins anew"]
    refused = pytest.raises(RunDirectoryError, match="checkpoint 2 is missing, with which tasks go")
    with refused, serve(tmp_path / "copy2", keep_checkpoints=2):
        pass


def test_a_table_that_is_missing_is_refused(serve, task, tmp_path):  # noqa: F811
    """A new table beside the checkpoints of another one would lose all tasks without a word."""
    folder = tmp_path / "server"
    with serve(folder) as server:
        server.register(task("a"))
        step(server, 3)
    for path in folder.glob("server.db*"):
        path.unlink()
    refused = pytest.raises(RunDirectoryError, match="it is missing, but its checkpoints are not")
    with refused, serve(folder):
        pass


def test_checkpoints_that_no_task_needs_may_be_damaged(serve, task, tmp_path):  # noqa: F811
    folder = tmp_path / "server"
    with serve(folder, keep_checkpoints=1) as server:
        server.register(task("a", steps=4))
        step(server, 3)
        server.save()
        finish(server)
    for path in (folder / "checkpoints").glob("*/run/metadata"):
        path.write_text("{")
    with serve(folder, keep_checkpoints=1) as server:
        assert server.status("a").state == "succeeded"


def test_a_last_checkpoint_that_was_left_out_is_a_problem(
    serve,  # noqa: F811
    task,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    """The table could not be written before it, and could be after it."""
    with serve(tmp_path) as server:
        server.register(task("a", steps=50))
        step(server, 3)
        write, failed = Database.write, []

        def fail_once(database, *arguments):
            if not failed:
                failed.append(True)
                raise OSError(28, "No space left on device")
            write(database, *arguments)

        monkeypatch.setattr(saving.Saving, "write_if_due", lambda *_, **__: None)
        monkeypatch.setattr(Database, "write", fail_once)
        server.save()
        monkeypatch.undo()
        assert not server._store._checkpoints.numbers
        assert "server.db: cannot be written" in server.problem
        server.save()
        assert server.problem is None


def test_a_callback_may_close_a_server_that_is_stepped(serve, task, tmp_path):  # noqa: F811
    folder = tmp_path / "server"
    with serve(folder) as server:
        first, second = (server.register(task(name)) for name in "ab")
        later, events = [], server.events()

        def close(_):
            later.append(server.cancel("b"))
            server.close()

        first.add_done_callback(close)
        step(server)
        assert first.exception() is None and second.exception() is None
        with pytest.raises(RuntimeError, match="training was closed before the command"):
            later[0].result(timeout=0)
        # The iterator ends.
        assert {event.task for event in events} == {"a", "b"}
    with serve(folder) as server:
        assert [own.name for own in server.statuses()] == ["a", "b"]
        finish(server)
