"""Several processes that train one run: how they join, leave and agree on decisions, and the
signals that stop a run."""

import itertools
import json
import math
import os
import pickle
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from signal import SIGINT
from types import FrameType, TracebackType
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax._src import distributed
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmux.errors import InputError, Interrupted, ProcessFailed, first_line, ran_out_of_memory
from jaxmux.sharding.transfers import put, share

# An ending process stores its reason in JAX's coordination service, under a key with this prefix.
ENDED = "jaxmux/ended/"


class ProcessEnd(NamedTuple):
    """The reason why a process ends: the first line of its exception, whether it has refused its
    input, the number of the signal that stopped it (0 for none), and whether a checkpoint was saved
    before the signal ended it."""

    message: str
    refused: bool
    signal: int
    saved: bool

    @classmethod
    def of(cls, error: BaseException) -> "ProcessEnd":
        signal = error.signal_number if isinstance(error, Interrupted) else 0
        if isinstance(error, KeyboardInterrupt):
            signal = SIGINT
        saved = isinstance(error, Interrupted) and error.saved
        return cls(first_line(error), isinstance(error, InputError), signal, saved)

    def exception(self, process: int) -> BaseException:
        """The exception that the other processes raise because process number `process` has
        ended."""
        if self.signal:
            return Interrupted(self.signal, self.saved)
        kind = InputError if self.refused else ProcessFailed
        return kind(f"process {process}: {self.message}")


def tell_end(client: Any, folder: str, index: int, error: BaseException) -> None:
    """Tells the other processes why this process ends. `client` is the client of JAX's coordination
    service, `folder` the prefix of the key of the reason, `index` the number of this process, and
    `error` its exception."""
    # If process 0 has ended, the coordination service is gone and no process can be told.
    with suppress(jax.errors.JaxRuntimeError):
        client.key_value_set(f"{folder}{index}", json.dumps(ProcessEnd.of(error)._asdict()), True)


def first_end(client: Any, folder: str, index: int) -> BaseException | None:
    """The reason why a process other than `index` has ended, as an exception; None if none has
    ended. The arguments are those of `tell_end`."""
    for key, text in client.key_value_dir_get(folder):
        other = int(key.rpartition("/")[2])
        if other != index:
            return ProcessEnd(**json.loads(text)).exception(other)
    return None


# Seconds for which a process waits for the others to begin.
_JOIN_SECONDS = 300
# Seconds for which an ending process waits for the others to end, after success and after an error.
_SHUTDOWN_SECONDS, _LEAVE_SECONDS = 60, 20
# A process that still runs this many seconds after another one has ended is ended too. Process 0
# waits longer, so that the others can store their reasons.
_HANGING_SECONDS = 15
# After this many seconds without a sign of life, JAX considers a process dead and ends the others.
_HEARTBEAT_SECONDS = 30
# Seconds between two lines that report that a process does not answer.
_SECONDS_A_LINE = 30
# Least number of threads in XLA's pool.
_THREADS = 64


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
      InputError: JAX finds no such job, or process 0 does not answer. If another process does not
        join, JAX aborts process 0 after five minutes instead.
    """
    # On CPU, every running collective blocks a thread of XLA's pool, which has one thread per core
    # by default. XLA reads this variable when the devices are first used.
    os.environ.setdefault("NPROC", str(max(_THREADS, os.cpu_count() or 1)))
    if index:
        # Without this, JAX would abort this process with a stack trace if process 0 is missing.
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
    # Starting the devices waits for all processes, which must not be interrupted later. The devices
    # are therefore started here.
    jax.devices()


def process_index() -> int:
    """Number of this process among those that have joined; 0 if there are no others. Unlike
    `jax.process_index`, this function does not start the devices."""
    return distributed.global_state.process_id or 0


def leave(error: BaseException) -> None:
    """Tells the other processes that this one ends with an exception, so that they do not wait for
    it. Process 0 then waits at most 20 seconds until the others have stored their reasons too."""
    state = distributed.global_state
    if state.client is None:
        return
    tell_end(state.client, ENDED, state.process_id, error)
    end = time.monotonic() + _LEAVE_SECONDS
    while state.process_id == 0 and time.monotonic() < end:
        all_know = len(state.client.key_value_dir_get(ENDED)) == state.num_processes
        # When process 0 ends, JAX ends the others, but they may still have to store their reasons.
        time.sleep(_PATIENCE)
        if all_know:
            return


@contextmanager
def watching_others(end: Callable[[BaseException], None]) -> Iterator[None]:
    """Within this context, ends this process if it still runs some seconds after another process
    has ended with an error.

    This process may be waiting for devices of the ended process, and nothing can interrupt this
    wait. If it was doing something else, for example exporting adapters, running the same command
    again repeats the work.

    `end` ends this process at once; a thread calls it with an exception that gives the reason.
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
    """Waits until process 0 can be reached; raises InputError after five minutes."""
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


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STOPPING = "stopping after this microbatch; a second signal stops at once"


class StopSignals:
    """Handles SIGINT, SIGTERM and SIGHUP as a context manager.

    A signal raises `Interrupted` at once, but within `deferred` it only sets `arrived`, so that the
    state can be saved. The state counts as saved when `deferred` has ended. After the first signal,
    a second signal takes its usual effect. Only the main thread can handle signals in Python; in
    other threads this class does nothing. `number` is the number of the signal that arrived; 0 if
    none has.
    """

    def __init__(self):
        self.number = 0
        self._deferred = self._saved = False
        self._notice = _STOPPING
        self._previous: dict[int, object] = {}
        # Lines to print; None ends the thread that prints them.
        self._lines: SimpleQueue[str | None] = SimpleQueue()

    @property
    def arrived(self) -> bool:
        return bool(self.number)

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # With nohup, SIGHUP is ignored so that the process continues; keep it ignored.
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                # None means a handler written in C, which Python cannot set again.
                self._previous[number] = signal.signal(number, self._receive) or signal.SIG_DFL
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self, say: Callable[[str], None], notice: str = _STOPPING) -> Iterator[None]:
        """Within this context, a signal only sets `arrived`, so that the state can be saved. When a
        signal arrives, another thread prints the line `notice` with `say`. Raises Interrupted if a
        signal arrived earlier but code of a library swallowed its exception."""
        if self.arrived:
            raise Interrupted(self.number, saved=self._saved)
        # A signal handler may interrupt code that is printing, so another thread does the printing.
        thread = threading.Thread(target=self._say_lines, args=(say,), daemon=True)
        self._deferred, self._notice = True, notice
        thread.start()
        try:
            yield
        finally:
            self._deferred, self._saved = False, True
            self._lines.put(None)
            thread.join()

    def _say_lines(self, say: Callable[[str], None]) -> None:
        for line in iter(self._lines.get, None):
            say(line)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.number = number
        signal.signal(number, self._previous[number])
        if not self._deferred:
            raise Interrupted(number, saved=self._saved)
        self._lines.put(self._notice)


T = TypeVar("T")

# Seconds between two checks for messages of other processes; signals are handled between checks.
_PATIENCE = 1.0
# Beginnings of the messages of those device errors that JAX raises as ValueError.
_DEVICE_ERROR = re.compile("UNKNOWN|INTERNAL|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED")
# Decisions are kept for this many rounds. When process 0 has the results of a round, the others
# have dispatched this round, but may still be at the end of the previous one.
_KEPT_ROUNDS = 4
# The number of training runs so far in these processes.
_runs = itertools.count()


class Processes:
    """The processes of a training run. Process 0 reads and writes the run directory, and makes
    every decision that depends on it, on the time or on signals; the others follow.

    Every process calls all methods in the same order. With a single process, the methods do not
    communicate. As a context manager, it tells the other processes of an exception that leaves the
    context; they also raise one when they next wait for a decision.

    Attributes:
      count: number of processes.
      index: number of this process, from 0.
    """

    def __init__(self):
        # JAX's coordination service carries the messages.
        state = distributed.global_state
        self.count, self.index = state.num_processes or 1, process_index()
        self._client: Any = state.client
        self._run = f"jaxmux/{next(_runs)}"
        self._numbers = itertools.count()
        # Keys of the decisions of recent rounds, one list per round.
        self._keys: list[list[str]] = [[]]

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if error is not None and self.count > 1:
            tell_end(self._client, f"{self._run}/ended/", self.index, error)

    def agree(self, value: T) -> T:
        """Returns the value of process 0, which must be picklable, and ignores the values of other
        processes."""
        if self.count == 1:
            return value
        key = self._next_key()
        if self.is_first:
            self._tell(key, value)
            return value
        return self._hear(key)

    def gather(self, value: T) -> list[T]:
        """The values of all processes in the order of their numbers. They must be picklable."""
        if self.count == 1:
            return [value]
        key = self._next_key()
        self._tell(f"{key}/{self.index}", value)
        return [self._hear(f"{key}/{i}") for i in range(self.count)]

    def on_first(self, work: Callable[[], T]) -> T | None:
        """Calls `work` in process 0 and returns its result there, None elsewhere. If `work` raises
        an exception, every process raises one."""
        return self.together(work if self.is_first else lambda: None)

    def together(self, work: Callable[[], T]) -> T:
        """Calls `work` in every process and returns its result. If it raises an exception in one
        process, every process raises one."""
        if self.count == 1:
            return work()
        result = error = None
        try:
            result = work()
        except Exception as e:
            error = e
        ends = self.gather(error and ProcessEnd.of(error))
        if error:
            raise error
        for i, end in enumerate(ends):
            if end:
                raise end.exception(i)
        return result

    def refuse_differences(self, texts: Mapping[str, str]) -> None:
        """Raises InputError if a process has another text than process 0 under some name, such as
        "backbone"."""
        first, *others = self.gather(dict(texts))
        for i, other in enumerate(others, start=1):
            names = [*first, *(name for name in other if name not in first)]
            if different := [name for name in names if other.get(name) != first.get(name)]:
                raise InputError(
                    f"process {i} differs from process 0 in the {' and the '.join(different)}; all "
                    "processes need the same command, files and versions"
                )

    def least(self, value: int | None) -> int | None:
        """The least value of any process; None if a process has None."""
        values = self.gather(value)
        return None if None in values else min(values)

    def share_arrays(
        self, arrays: Mapping[str, np.ndarray] | None, specs: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """The arrays of process 0, sent from device to device one after another. Other processes
        pass None for `arrays`. `specs` has, by name, an object with the array's shape and dtype."""
        if self.count == 1:
            return dict(arrays)
        sender = next(device for device in jax.devices() if device.process_index == 0)
        mesh = Mesh(np.array([sender]), ("sender",))

        def shared(name: str, spec: Any) -> np.ndarray:
            if self.is_first:
                array = put(np.asarray(arrays[name]), NamedSharding(mesh, P()))
            else:
                array = jax.ShapeDtypeStruct(spec.shape, spec.dtype)
            return np.asarray(share(array, mesh))

        return {name: shared(name, spec) for name, spec in specs.items()}

    def stop_number(self, number: int) -> int:
        """The number of a signal that has arrived in any process; 0 if none has. `number` is the
        signal in this process, or 0."""
        if self.count == 1:
            return number
        signals = f"{self._run}/signals/"
        if self.is_first:
            told = [] if number else self._client.key_value_dir_get(signals)
            return self.agree(int(told[0][1]) if told else number)
        if number:
            self._client.key_value_set(f"{signals}{self.index}", str(number), True)
        return self.agree(number)

    @contextmanager
    def noticing_failures(self) -> Iterator[None]:
        """Within this context, an exception of JAX that may be due to the end of another process
        becomes a `ProcessFailed`."""
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError) as e:
            # JAX raises some errors of the devices as ValueError.
            of_devices = isinstance(e, jax.errors.JaxRuntimeError) or _DEVICE_ERROR.match(str(e))
            if self.count == 1 or not of_devices or ran_out_of_memory(e):
                raise
            raise ProcessFailed(
                f"another process has ended, or the devices failed ({first_line(e)[:200]}); the "
                "same command in all processes continues from the last checkpoint"
            ) from e

    def end_round(self) -> None:
        """Deletes the decisions of old rounds. Call it after every round."""
        self._keys.append([])
        if len(self._keys) > _KEPT_ROUNDS:
            old = self._keys.pop(0)
            if self.is_first:
                for key in old:
                    self._client.key_value_delete(key)

    def _next_key(self) -> str:
        key = f"{self._run}/{next(self._numbers)}"
        self._keys[-1].append(key)
        return key

    def _tell(self, key: str, value: Any) -> None:
        self._client.key_value_set_bytes(key, pickle.dumps(value))

    def _hear(self, key: str) -> Any:
        while True:
            try:
                content = self._client.blocking_key_value_get_bytes(key, int(1000 * _PATIENCE))
                return pickle.loads(content)
            except jax.errors.JaxRuntimeError as e:
                if "DEADLINE_EXCEEDED" not in str(e):
                    raise ProcessFailed(f"process 0 has ended ({first_line(e)})") from None
            for folder in (f"{self._run}/ended/", ENDED):
                if reason := first_end(self._client, folder, self.index):
                    raise reason
