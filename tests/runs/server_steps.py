"""Trains tasks on a server step by step, in the thread of the test."""

import time

from jaxmux.server.task import ENDED


def settle(server) -> None:
    """Waits until no data are being read, and nothing is being written."""
    while server._preparation.seconds_left is not None:
        time.sleep(0.001)
    server._store._writer.submit(lambda: None).result()


def step(server, times: int = 1) -> None:
    """Steps, each time until the data of new tasks have been read. A task trains in the step in
    which it was registered if its data are read quickly, and else in the next one: where this
    matters, call `step_until`."""
    for _ in range(times):
        server.step()
        settle(server)


def step_until(server, name: str, steps: int) -> None:
    """Steps until the results of so many of a task's steps have been seen."""
    step(server)
    while server.status(name).step < steps:
        assert server.status(name).state not in ENDED, server.statuses()
        step(server)


def finish(server) -> None:
    """Steps until all tasks have ended."""
    for _ in range(500):
        step(server)
        if all(status.state in ENDED for status in server.statuses()):
            return
    raise AssertionError(server.statuses())
