"""A server whose tasks come from a watched directory, from start to end."""

import dataclasses
import gc
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager
from pathlib import Path

from jaxmux.atomic_files import write_atomically
from jaxmux.errors import Interrupted, cause_of, first_line, ran_out_of_memory
from jaxmux.models.adapter_ops import LOW_RANK_KIND
from jaxmux.peft import kind_of
from jaxmux.planner.numbers import numbered
from jaxmux.runs.processes import StopSignals
from jaxmux.runs.run_directory import RunDirectoryError
from jaxmux.specifications.limits import TenantLimits

from . import LiveTraining
from .console import ServerConsole
from .inbox.directory import WatchedDirectory
from .inbox.watcher import DirectoryWatcher
from .server import ServerOptions, tuning_server

_STOPPING = "stopping after this round; a second signal stops at once"
_RECORD = "watched.json"
# Seconds between two checks for signals and results.
_TICK = 0.25
# If nothing has been trained that could be lost, the server waits at most this many seconds for the
# end of the first round.
_PATIENCE = 2.0


def serve(
    backbone: str | Path,
    watched: str | Path,
    run_dir: str | Path,
    options: ServerOptions,
    limits: TenantLimits,
    *,
    config_text: str | None = None,
    end_at_once: Callable[[Interrupted], None] | None = None,
    console: ServerConsole | None = None,
    every: float = 1.0,
) -> None:
    """Trains the tasks that are specified in a directory, until a signal comes. A later call with
    the same arguments continues them.

    If the devices run out of memory and the server cannot make room, it begins again from its last
    checkpoint with half of its places. The last tasks then wait.

    Args:
      backbone: Hugging Face checkpoint folder, as for `tuning_server`.
      watched: the directory. It holds a folder for each tenant, and only the operator may write to
        it. It is created if it does not exist.
      run_dir: the folder of the server.
      options: sizes of microbatches and pool, memory, checkpoints and other settings.
      limits: the most that a tenant may ask for.
      config_text: text of a gin config that is kept as `run_dir/config.gin`; None keeps none.
      end_at_once: ends the process; it is called if a signal comes before anything was trained and
        the first round does not end soon. None means that the server waits.
      console: object that prints progress; None prints to standard output.
      every: seconds between two polls of the directory.

    Raises:
      BackboneError, PlanningError, RunDirectoryError, WatchedDirectoryError: the input that the
        message names cannot be used. Nothing has been trained by this call.
      OutOfDeviceMemory: the devices have too little memory for a single task.
      Interrupted: SIGINT or SIGTERM arrived. The state is saved, or the message tells what is not
        saved.
    """
    watched, run_dir = Path(watched).absolute(), Path(run_dir).absolute()
    refuse_nested(watched, run_dir)
    console = console or ServerConsole(log_every=options.log_every)
    limits = within_pool(limits, options)
    known = _recorded_directory(run_dir, watched)
    try:
        with StopSignals() as stop, closing(WatchedDirectory(watched, limits, known)) as directory:
            console.say("loading the model and compiling the training step; this can take a minute")

            def serve_with(options: ServerOptions) -> None:
                with tuning_server(backbone, run_dir, options, say=console.say) as live:
                    watcher = DirectoryWatcher(directory, live, run_dir, limits, console.say, every)
                    if config_text is not None:
                        _write(run_dir / "config.gin", config_text)
                    _write(run_dir / _RECORD, json.dumps({"directory": str(watched)}) + "\n")
                    directory.begin()
                    if watched.stat().st_mode & 0o002:
                        console.say(f"{watched}: anybody can write to it and take tenants' places")
                    created = " (created)" if directory.created else ""
                    console.say(f"watching {watched}{created}")
                    console.say("a task is a file TENANT/NAME.json in it")
                    with stop.deferred(console.say, _STOPPING):
                        _serve(live, watcher, stop, console, str(run_dir / "adapters"), end_at_once)

            with_fewer_places(serve_with, options, console.say)
    except RuntimeError as e:
        raise cause_of(e) from None


def with_fewer_places(
    serve_with: Callable[[ServerOptions], None], options: ServerOptions, say: Callable[[str], None]
) -> None:
    """Runs a server with `serve_with`, which opens it with the given options and runs it to its
    end. Whenever the devices run out of memory, runs it again with half of its places. Raises
    OutOfDeviceMemory if they run out of memory with a single place."""
    while True:
        try:
            return serve_with(options)
        except RuntimeError as e:
            if options.reserved_slots == 1 or not ran_out_of_memory(cause_of(e)):
                raise
            problem = first_line(cause_of(e))
        # The exception is part of a cycle of references that still holds the server's arrays.
        gc.collect()
        options = dataclasses.replace(options, reserved_slots=options.reserved_slots // 2)
        places = numbered(options.reserved_slots, "place")
        say(f"{problem}; the server goes on from its last checkpoint with {places}")


def refuse_nested(watched: Path, run_dir: Path) -> None:
    """Raises RunDirectoryError if the tenants' directory and the server's folder lie in each
    other."""
    inner, outer = watched.resolve(), run_dir.resolve()
    if inner.is_relative_to(outer) or outer.is_relative_to(inner):
        raise RunDirectoryError(
            f"server folder {run_dir}: should be apart from the watched directory {watched}, "
            "because that is the tenants'; choose another --run_dir"
        )


def _serve(
    live: LiveTraining,
    watcher: DirectoryWatcher,
    stop: StopSignals,
    console: ServerConsole,
    adapters: str,
    end_at_once: Callable[[Interrupted], None] | None,
) -> None:
    """Trains in one thread and watches in another, until a signal comes or training fails."""
    steps = {status.name: status.step for status in live.statuses()}
    console.start(live.statuses())
    stopped_at = None
    try:
        with _in_thread(live.run) as trained, _in_thread(watcher.run):
            try:
                while not trained.done():
                    wait([trained], timeout=_TICK)
                    console.show(live.statuses(), adapters)
                    if stop.arrived and stopped_at is None:
                        stopped_at = time.monotonic()
                        # A second signal ends the process at once.
                        for number in (signal.SIGINT, signal.SIGTERM):
                            signal.signal(number, signal.SIG_DFL)
                        watcher.stop()
                        live.close()
                    if stopped_at and end_at_once and time.monotonic() - stopped_at > _PATIENCE:
                        now = live.statuses()
                        if all(steps.get(status.name, 0) == status.step for status in now):
                            console.stop()
                            end_at_once(Interrupted(stop.number, saved=False))
            finally:
                watcher.stop()
                live.close()
        console.show(live.statuses(), adapters)
    finally:
        console.stop()
    trained.result()
    if stop.arrived:
        raise Interrupted(stop.number, saved=live.problem is None, problem=live.problem)


@contextmanager
def _in_thread(run: Callable[[], None]) -> Iterator[Future[None]]:
    """Calls a function in a thread, and waits for the function at the end of the context. The
    future has the function's exception."""
    future: Future[None] = Future()

    def call() -> None:
        try:
            run()
        except BaseException as e:
            future.set_exception(e)
        else:
            future.set_result(None)

    thread = threading.Thread(target=call, name=getattr(run, "__qualname__", None), daemon=True)
    thread.start()
    try:
        yield future
    finally:
        thread.join()


def within_pool(limits: TenantLimits, options: ServerOptions) -> TenantLimits:
    """Lowers the largest rank in the limits to what some part of a server's pool has room for.
    Whether an adapter fits what is reserved for its kind is checked when its task is prepared."""
    kinds = [(kind_of(adapter), adapter) for adapter in options.reserved_adapters]
    ranks = [
        max(kind.rank(adapter), kind.rank_in(LOW_RANK_KIND, adapter)) for kind, adapter in kinds
    ]
    largest = max([options.reserved_rank, *ranks])
    return dataclasses.replace(limits, rank=min(limits.rank, largest))


def _recorded_directory(run_dir: Path, watched: Path) -> bool:
    """Whether the server in this folder has watched the directory before. Raises RunDirectoryError
    if it has watched another directory, because all of its tasks would then seem to be deleted."""
    try:
        found = json.loads((run_dir / _RECORD).read_text())["directory"]
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise RunDirectoryError(f"server folder {run_dir}: {_RECORD} is damaged ({e!r})") from None
    if Path(found).resolve() != watched.resolve():
        raise RunDirectoryError(
            f"server folder {run_dir}: its tasks come from {found}, not from {watched}; if the "
            f"directory was moved, change it in {run_dir / _RECORD}"
        )
    return True


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text)
    except OSError as e:
        raise RunDirectoryError(f"{path}: cannot be written ({e.strerror})") from None
