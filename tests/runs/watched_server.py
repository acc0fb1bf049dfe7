"""A server that watches a directory, for tests: one poll and one round at a time."""

import dataclasses
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxmux.server import ServerOptions
from jaxmux.server.inbox.directory import Place, WatchedDirectory
from jaxmux.server.inbox.watcher import DirectoryWatcher, WatchedTask
from jaxmux.server.server import tuning_server
from jaxmux.specifications import TenantLimits

from .conftest import ROW, SERVER

# Microbatches of one row, as an elastic server of the simulation has.
OPTIONS = ServerOptions(
    **SERVER | {"tokens_per_microbatch": ROW},
    keep_checkpoints=2,
)
ADAPTER = {"kind": "lora", "rank": 2, "target_modules": ["q_proj", "down_proj"]}


class WatchedServer:
    """A server that watches `inbox`, one poll and one round at a time."""

    def __init__(self, live, watcher, inbox: Path, folder: Path, said: list[str]):
        self.live, self.watcher, self.inbox, self.folder = live, watcher, inbox, folder
        self.said = said

    def poll(self, times: int = 1) -> None:
        for _ in range(times):
            self.watcher.poll()
            self.live.step()
            while self.live._preparation.seconds_left is not None:
                time.sleep(0.001)

    def poll_until(self, condition) -> None:
        for _ in range(500):
            if condition():
                return
            self.poll()
            time.sleep(0.005)  # adapters and checkpoints are written meanwhile
        raise AssertionError([self.live.statuses(), self.said])

    def step_until(self, condition) -> None:
        """Trains without a look at the directory."""
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, [self.live.statuses(), self.said]
            self.live.step()

    def status(self, place: str) -> dict:
        return json.loads((self.inbox / f"{place}.status.json").read_text())

    def state(self, place: str) -> str | None:
        path = self.inbox / f"{place}.status.json"
        return self.status(place)["state"] if path.is_file() else None

    def until(self, place: str, *states: str) -> dict:
        self.poll_until(lambda: self.state(place) in states)
        return self.status(place)

    def watched(self, place: str) -> WatchedTask:
        """What the watcher remembers of a specification."""
        return self.watcher._watched[Place(*place.split("/"))]


@contextmanager
def watched_server(
    backbone: Path, tmp: Path, most_ended=10_000, checkpoint_every=2, **limits
) -> Iterator[WatchedServer]:
    """Opens a server that watches `tmp/inbox` with the folder `tmp/server`."""
    said: list[str] = []
    inbox, folder = tmp / "inbox", tmp / "server"
    limits = TenantLimits(**limits)
    options = dataclasses.replace(OPTIONS, most_ended=most_ended, checkpoint_every=checkpoint_every)
    known = folder.exists()
    directory = WatchedDirectory(inbox, limits, known)
    directory.begin()
    try:
        with tuning_server(backbone, folder, options, say=said.append) as live:
            watcher = DirectoryWatcher(directory, live, folder, limits, said.append, every=0)
            yield WatchedServer(live, watcher, inbox, folder, said)
            live.save(wait=True)
    finally:
        directory.close()


def write_specification(path: Path, **fields) -> Path:
    """Writes a small task, with the given fields."""
    defaults = {
        "name": path.stem,
        "data": "data/short.jsonl",
        "batch_size": 4,
        "adapter": ADAPTER,
    }
    if "epochs" not in fields:
        defaults["steps"] = 3
    path.write_text(json.dumps(defaults | fields))
    return path


def known(live) -> dict[str, str]:
    """The states of the tasks that a server knows, by name."""
    return {status.name: status.state for status in live.statuses()}
