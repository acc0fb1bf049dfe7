"""A server trains the data that were registered, or none."""

import os
import threading
import time
from pathlib import Path

import pytest

from jaxmux.server import server as server_module
from jaxmux.server.server import ServerOptions, tuning_server
from jaxmux.server.task import ENDED

from .conftest import SERVER

RED, GREEN = ({"prompt": "apple", "completion": f" {colour}"} for colour in ("red", "green"))


@pytest.fixture(scope="module")
def serve(backbone):
    """Opens a server on the tiny backbone."""

    def open_server(folder, **options):
        return tuning_server(backbone, folder, ServerOptions(**SERVER | options), say=print)

    return open_server


@pytest.fixture
def mine(make_task, write_lines):
    """A task with data of its own."""
    return make_task("mine", data=write_lines(RED), steps=2)


@pytest.fixture
def reading(monkeypatch):
    """Calls a function when data begin to be read."""
    prepare, called = server_module.prepare_task, []

    def prepared(task, **keywords):
        for function in called:
            function()
        return prepare(task, **keywords)

    monkeypatch.setattr(server_module, "prepare_task", prepared)
    return called.append


def step_until(server, name, *states):
    for _ in range(2000):
        server.step()
        if server.status(name).state in states:
            return
        time.sleep(0.001)
    raise AssertionError(server.statuses())


def finish(server):
    """The state and the reason with which the task has ended."""
    step_until(server, "mine", *ENDED)
    return server.status("mine").state, server.status("mine").reason


def assert_failed(found, path):
    state, reason = found
    assert state == "failed"
    assert path in reason and "changed after the task was registered" in reason
    assert "register another task" in reason


def test_data_that_change_before_they_are_read_fail_the_task(serve, mine, write_lines, tmp_path):
    with serve(tmp_path / "server") as server:
        server.register(mine)
        write_lines(GREEN)
        assert_failed(finish(server), mine.data.path)


def test_data_that_change_while_they_are_read_fail_the_task(
    serve, mine, write_lines, reading, tmp_path
):
    reading(lambda: write_lines(GREEN))
    with serve(tmp_path / "server") as server:
        server.register(mine)
        assert_failed(finish(server), mine.data.path)


def test_what_was_registered_is_known_after_a_restart(serve, mine, write_lines, reading, tmp_path):
    """The server ends before the data have been read."""
    ends = threading.Event()
    reading(ends.wait)
    with serve(tmp_path / "server") as server:
        server.register(mine)
        server.step()
    write_lines(GREEN)
    ends.set()
    with serve(tmp_path / "server") as server:
        assert_failed(finish(server), mine.data.path)


@pytest.mark.parametrize("content", [RED, GREEN])
def test_data_that_were_read_before_a_restart_are_known_by_their_content(
    content, serve, mine, make_task, write_lines, tmp_path
):
    """The task has waited for a place, so it has not begun."""
    others = [f"other{i}" for i in range(SERVER["reserved_slots"])]
    with serve(tmp_path / "server") as server:
        for name in others:
            server.register(make_task(name, steps=10_000), priority=1)
        for name in others:
            step_until(server, name, "running")
        server.register(mine)
        step_until(server, "mine", "queued")
        server.save()
    path = Path(write_lines(content))
    os.utime(path, ns=(1, 1))
    with serve(tmp_path / "server") as server:
        for name in others:
            server.cancel(name)
        found = finish(server)
    if content == RED:
        assert found == ("succeeded", None)
    else:
        assert_failed(found, mine.data.path)
