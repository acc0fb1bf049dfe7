"""How processes that train together join each other and leave."""

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
from jax._src import distributed

from jaxmux.errors import InputError, ProcessFailed, first_line

from .process_endings import ENDED, first_end, tell_end

# A process waits so many seconds for the others to begin.
_JOIN_SECONDS = 300
# A process that ends waits so many seconds for the others to end: after success, and after an
# error.
_SHUTDOWN_SECONDS, _LEAVE_SECONDS = 60, 20
# A process is ended if it still runs so many seconds after another one has ended. Process 0 waits
# longer, so that the others can say why they end.
_HANGING_SECONDS = 15
# A process of which nothing is heard for so many seconds has died: JAX ends the others.
_HEARTBEAT_SECONDS = 30
# Seconds from one line about a process that does not answer to the next.
_SECONDS_A_LINE = 30
# Least number of threads in XLA's pool.
_THREADS = 64
# Seconds between two looks at what another process has said; signals are handled in between.
_PATIENCE = 1.0


def join_processes(
    coordinator: str | None = None, count: int | None = None, index: int | None = None
) -> None:
    """Joins the other processes of a training run. Call it before JAX is used.

    Args:
      coordinator: "HOST:PORT" of process 0; None lets JAX find the processes of a Slurm, Open MPI
        or Kubernetes job.
      count: number of processes.
      index: number of this process, from 0.

    Raises:
      InputError: there is no such job, or process 0 does not answer. If another process does not
        come, JAX aborts process 0 after five minutes.
    """
    # On CPU, every collective that is under way blocks a thread of XLA's pool, which by default has
    # a thread for each core. XLA reads this when the devices are first used.
    os.environ.setdefault("NPROC", str(max(_THREADS, os.cpu_count() or 1)))
    if index:
        # JAX would abort this process, with a stack trace.
        _wait_for(coordinator)
    # Signals are handled by `StopSignals`.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator,
            count,
            index,
            cluster_detection_method=None if coordinator is None else "deactivate",
            initialization_timeout=_JOIN_SECONDS,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
    except (ValueError, RuntimeError) as e:
        if coordinator is None and isinstance(e, ValueError):
            raise InputError(
                "this is no Slurm, Open MPI or Kubernetes job that JAX knows; give --coordinator, "
                "--processes and --process"
            ) from None
        raise InputError(f"this process cannot join the others: {first_line(e)}") from None
    # Starting the devices waits for all processes, which nothing should interrupt later.
    jax.devices()


def process_index() -> int:
    """Number of this process among those that have joined; 0 if there are no others. Unlike JAX's
    own function, it does not start the devices."""
    return distributed.global_state.process_id or 0


def leave(error: BaseException) -> None:
    """Tells the other processes that this one ends with an exception, so that none waits for it,
    and waits for the others to say the same, but not long.

    Args:
      error: the exception.
    """
    state = distributed.global_state
    if state.client is None:
        return
    tell_end(state.client, ENDED, state.process_id, error)
    end = time.monotonic() + _LEAVE_SECONDS
    while state.process_id == 0 and time.monotonic() < end:
        all_know = len(state.client.key_value_dir_get(ENDED)) == state.num_processes
        # When process 0 ends, JAX ends the others, which may still have to say why they end.
        time.sleep(_PATIENCE)
        if all_know:
            return


@contextmanager
def watching_others(end: Callable[[BaseException], None]) -> Iterator[None]:
    """Within this context, ends this process if it still runs some seconds after another one has
    ended with an error.

    It may wait for the devices of the other one, which nothing can interrupt. If it does something
    else, for example export adapters, the same command does that again.

    Args:
      end: function that ends this process at once; a thread calls it with the exception that tells
        why.
    """
    state, over = distributed.global_state, threading.Event()

    def watch() -> None:
        while not over.wait(_PATIENCE):
            try:
                reason = first_end(state.client, ENDED, state.process_id)
            except jax.errors.JaxRuntimeError as e:
                reason = ProcessFailed(f"process 0 has ended ({first_line(e)})")
            if reason:
                if not over.wait(_HANGING_SECONDS):
                    tell_end(state.client, ENDED, state.process_id, reason)
                    end(reason)
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _wait_for(coordinator: str) -> None:
    """Waits until process 0 can be reached. InputError if it cannot for a long time."""
    host, _, port = coordinator.rpartition(":")
    end = time.monotonic() + _JOIN_SECONDS
    said_at = -math.inf
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
            return
        except (OSError, OverflowError) as e:
            if time.monotonic() > end:
                raise InputError(
                    f"process 0 does not answer at {coordinator} ({e}); is it running, and is this "
                    "its address?"
                ) from None
            if time.monotonic() - said_at > _SECONDS_A_LINE:
                said_at = time.monotonic()
                left = math.ceil(end - said_at)
                line = f"waiting for process 0 at {coordinator}, {left} s at most ({e})"
                print(line, flush=True)
        time.sleep(_PATIENCE)
