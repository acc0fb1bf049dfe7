"""Several processes that train one run: what they decide together."""

import itertools
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import distributed
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmux.errors import InputError, ProcessFailed, ran_out_of_memory
from jaxmux.sharding.transfers import put, share

T = TypeVar("T")

# A process waits so many seconds for the others to begin.
_JOIN_SECONDS = 300
# A process that ends waits so many seconds for the others to end.
_SHUTDOWN_SECONDS = 60
# Least number of threads in XLA's pool.
_THREADS = 64
# Seconds between two looks at what another process has said; signals are handled in between.
_PATIENCE = 1.0
# Every decision has a number of its own, also of later runs in the same processes.
_numbers = itertools.count()


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
      InputError: there is no such job, or the processes do not find each other.
    """
    # On CPU, every collective that is under way blocks a thread of XLA's pool, which by default has
    # a thread for each core. XLA reads this when the devices are first used.
    os.environ.setdefault("NPROC", str(max(_THREADS, os.cpu_count() or 1)))
    if index:
        # JAX would abort this process, with a stack trace.
        _wait_for(coordinator)
    try:
        jax.distributed.initialize(
            coordinator,
            count,
            index,
            cluster_detection_method=None if coordinator is None else "deactivate",
            initialization_timeout=_JOIN_SECONDS,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
    except (ValueError, RuntimeError) as e:
        if coordinator is None:
            raise InputError(
                "this is no Slurm, Open MPI or Kubernetes job that JAX knows "
                f"({_first_line(e)}); give --coordinator, --processes and --process"
            ) from None
        raise InputError(
            f"process {index} of {count} cannot join the others at {coordinator}: {_first_line(e)}"
        ) from None


def _wait_for(coordinator: str) -> None:
    """Waits until process 0 can be reached. InputError if it cannot for a long time."""
    host, _, port = coordinator.rpartition(":")
    end = time.monotonic() + _JOIN_SECONDS
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
        time.sleep(_PATIENCE)


class Processes:
    """The processes of a training run. Process 0 reads and writes the run directory and decides
    what depends on it, on the time or on signals; the others follow.

    All methods are called by every process, in the same order. A single process agrees with itself.

    Attributes:
      count: number of processes.
      index: number of this process, from 0.
    """

    def __init__(self):
        """Finds the processes that have joined (see `join_processes`)."""
        self.count, self.index = jax.process_count(), jax.process_index()
        # The coordination service of JAX, which Orbax uses in the same way.
        self._client: Any = distributed.global_state.client
        self._told_signal = False
        # Keys of decisions: of the current round, and of the one before it.
        self._keys: list[str] = []
        self._old_keys: list[str] = []

    @property
    def is_first(self) -> bool:
        """Whether this is process 0."""
        return self.index == 0

    def agree(self, value: T) -> T:
        """The value of process 0.

        Args:
          value: any value that can be pickled; in other processes it is ignored.
        """
        if self.count == 1:
            return value
        key = self._next_key()
        if self.is_first:
            self._tell(key, value)
            return value
        return self._hear(key)

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by their number.

        Args:
          value: any value that can be pickled.
        """
        if self.count == 1:
            return [value]
        key = self._next_key()
        self._tell(f"{key}/{self.index}", value)
        return [self._hear(f"{key}/{i}") for i in range(self.count)]

    def on_first(self, work: Callable[[], T]) -> T | None:
        """Does something in process 0. If it raises an exception there, every process raises one.

        Args:
          work: function without arguments.

        Returns:
          The result in process 0, and None in the others.
        """
        return self._all_or_none(work if self.is_first else lambda: None)

    def together(self, work: Callable[[], T]) -> T:
        """Does something in every process. If one of them raises an exception, all raise one.

        Args:
          work: function without arguments.

        Returns:
          The result in this process.
        """
        return self._all_or_none(work)

    def _all_or_none(self, work: Callable[[], T]) -> T:
        if self.count == 1:
            return work()
        result = error = None
        try:
            result = work()
        except Exception as e:
            error = e
        found = self.gather(error and (isinstance(error, InputError), _first_line(error)))
        if error:
            raise error
        for i, problem in enumerate(found):
            if problem:
                refused, message = problem
                raise (InputError if refused else ProcessFailed)(f"process {i}: {message}")
        return result

    def refuse_differences(self, fingerprints: Mapping[str, str]) -> None:
        """Checks that all processes have read the same.

        Args:
          fingerprints: hashes, by what they describe ("backbone").

        Raises:
          InputError: a process has another fingerprint than process 0.
        """
        first, *others = self.gather(dict(fingerprints))
        for i, own in enumerate(others, start=1):
            if different := [what for what in first if own.get(what) != first[what]]:
                raise InputError(
                    f"process {i} reads another {' and another '.join(different)} than process 0; "
                    "all processes need the same files"
                )

    def least(self, value: int | None) -> int | None:
        """The least value of any process; None if one has none.

        Args:
          value: the value of this process.
        """
        values = self.gather(value)
        return None if None in values else min(values)

    def share_arrays(
        self, arrays: Mapping[str, np.ndarray] | None, specs: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """The arrays of process 0, sent from device to device.

        Args:
          arrays: arrays of the host by name; in other processes they are ignored.
          specs: by name, an object with the array's shape and dtype.
        """
        if self.count == 1:
            return dict(arrays)
        sender = next(device for device in jax.devices() if device.process_index == 0)
        mesh = Mesh(np.array([sender]), ("sender",))
        if self.is_first:
            tree = put(dict(arrays), NamedSharding(mesh, P()))
        else:
            tree = {n: jax.ShapeDtypeStruct(s.shape, s.dtype) for n, s in specs.items()}
        return {name: np.asarray(array) for name, array in share(tree, mesh).items()}

    def stop_number(self, number: int) -> int:
        """The number of a signal that has arrived in any process; 0 if none has.

        Args:
          number: number of the signal that has arrived in this process, or 0.
        """
        if self.count == 1:
            return number
        if self.is_first:
            told = [] if number else self._client.key_value_dir_get("jaxmux/signals/")
            return self.agree(int(told[0][1]) if told else number)
        if number and not self._told_signal:
            self._told_signal = True
            self._client.key_value_set(f"jaxmux/signals/{self.index}", str(number))
        return self.agree(number)

    @contextmanager
    def noticing_failures(self) -> Iterator[None]:
        """Within this context, an exception of JAX that another process may have caused by its end
        becomes a `ProcessFailed`."""
        try:
            yield
        except jax.errors.JaxRuntimeError as e:
            if self.count == 1 or ran_out_of_memory(e):
                raise
            raise ProcessFailed(
                f"another process has ended, or the devices failed ({_first_line(e)[:200]}); the "
                "same command in all processes continues from the last checkpoint"
            ) from e

    def end_round(self) -> None:
        """Deletes old decisions. Call it after every round: when process 0 has the results of a
        round, all processes have passed the one before."""
        if self.is_first:
            for key in self._old_keys:
                self._client.key_value_delete(key)
        self._old_keys, self._keys = self._keys, []

    def _next_key(self) -> str:
        key = f"jaxmux/{next(_numbers)}"
        self._keys.append(key)
        return key

    def _tell(self, key: str, value: Any) -> None:
        self._client.key_value_set_bytes(key, pickle.dumps(value))

    def _hear(self, key: str) -> Any:
        while True:
            try:
                found = self._client.blocking_key_value_get_bytes(key, int(1000 * _PATIENCE))
                return pickle.loads(found)
            except jax.errors.JaxRuntimeError as e:
                if "DEADLINE_EXCEEDED" not in str(e):
                    # JAX is about to end this process, with an explanation.
                    time.sleep(_PATIENCE)
                    raise ProcessFailed("another process has ended") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
