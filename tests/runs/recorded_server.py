"""A server whose folder is copied before every system call that changes it.

    LD_PRELOAD=LIBRARY python -m tests.runs.recorded_server LIBRARY BACKBONE SHORT FOLDER COPIES

LIBRARY is compiled from crash_points.c. Recording begins when there is a second checkpoint. From
then on a task succeeds, commands are given, events.jsonl is set aside and files before it are
deleted, and a third checkpoint takes the place of the first.
The commands that were acknowledged are printed as JSON lines, with the number of the next copy.
"""

import ctypes
import json
import sys
from pathlib import Path

from jaxmux.server.server import ServerOptions, tuning_server

from .simulated_tasks import OPTIONS, make_task

# By name of the task, its kind and number of steps.
TASKS = {"one": ("adamw", 5), "two": ("lion", 7), "late": ("adamw", 3)}


def main(library: str, backbone: str, short: str, folder: str, copies: str) -> None:
    """Runs the server."""
    shim = ctypes.CDLL(library)

    def register(name):
        kind, steps = TASKS[name]
        return server.register(make_task(kind, name, steps, {"short": short}))

    def acknowledged(kind, name, future):
        server.step()
        future.result(timeout=0)
        print(json.dumps([shim.recorded(), kind, name]), flush=True)

    def checkpoints():
        server._store._writer.submit(lambda: None).result()
        return len(list(Path(folder, "checkpoints").glob("[0-9]*")))

    Path(copies).mkdir()
    sizes = {"checkpoint_every": 1000, "keep_checkpoints": 2, "events_bytes": 700}
    options = ServerOptions(**OPTIONS | sizes)
    with tuning_server(backbone, folder, options, say=print) as server:
        # Preparing "two" may take longer than training "one" does.
        acknowledged("register", "one", register("one"))
        acknowledged("pause", "one", server.pause("one"))
        acknowledged("register", "two", register("two"))
        while server.status("two").step < 1:
            server.step()
        acknowledged("resume", "one", server.resume("one"))
        server.save()
        server.step()
        server.save()
        assert checkpoints() == 2
        shim.record(folder.encode(), copies.encode())
        acknowledged("register", "late", register("late"))
        acknowledged("pause", "two", server.pause("two"))
        while server.status("one").state != "succeeded":
            server.step()
        server.save()
        acknowledged("resume", "two", server.resume("two"))
        assert checkpoints() == 2
        # The last copies are of a checkpoint that is complete.
        acknowledged("set_priority", "two", server.set_priority("two", 1))
        shim.record(None, None)


if __name__ == "__main__":
    main(*sys.argv[1:])
