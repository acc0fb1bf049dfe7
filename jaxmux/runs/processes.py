"""Several processes that train one run: what they decide together."""

import itertools
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import distributed
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmux.errors import InputError, ProcessFailed, first_line, ran_out_of_memory
from jaxmux.sharding.transfers import put, share

from .joined_processes import process_index
from .process_endings import ENDED, ProcessEnd, first_end, tell_end

T = TypeVar("T")

# Seconds between two looks at what another process has said; signals are handled in between.
_PATIENCE = 1.0
# How errors of devices begin that JAX raises as ValueError.
_DEVICE_ERROR = re.compile("UNKNOWN|INTERNAL|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED")
# Decisions of so many rounds are kept. When process 0 has the results of a round, the others have
# dispatched it; so they may still be at the end of the round before.
_KEPT_ROUNDS = 4
# Number of training runs in these processes.
_runs = itertools.count()


class Processes:
    """The processes of a training run. Process 0 reads and writes the run directory and decides
    what depends on it, on the time or on signals; the others follow.

    All methods are called by every process, in the same order. A single process agrees with itself.
    A context manager: an exception that leaves the context is told to the other processes, which
    then raise one too, as soon as they wait for a decision.

    Attributes:
      count: number of processes.
      index: number of this process, from 0.
    """

    def __init__(self):
        """Finds the processes that have joined (see `join_processes`)."""
        # The coordination service of JAX, which Orbax uses in the same way.
        state = distributed.global_state
        self.count, self.index = state.num_processes or 1, process_index()
        self._client: Any = state.client
        self._run = f"jaxmux/{next(_runs)}"
        self._numbers = itertools.count()
        # Keys of decisions, by round.
        self._keys: list[list[str]] = [[]]

    @property
    def is_first(self) -> bool:
        """Whether this is process 0."""
        return self.index == 0

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if error is not None and self.count > 1:
            tell_end(self._client, f"{self._run}/ended/", self.index, error)

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
        return self.together(work if self.is_first else lambda: None)

    def together(self, work: Callable[[], T]) -> T:
        """Does something in every process. If one of them raises an exception, all raise one.

        Args:
          work: function without arguments.

        Returns:
          The result in this process.
        """
        if self.count == 1:
            return work()
        result = error = None
        try:
            result = work()
        except Exception as e:
            error = e
        found = self.gather(error and ProcessEnd.of(error))
        if error:
            raise error
        for i, end in enumerate(found):
            if end:
                raise end.exception(i)
        return result

    def refuse_differences(self, found: Mapping[str, str]) -> None:
        """Checks that all processes have the same.

        Args:
          found: texts, by what they describe ("backbone").

        Raises:
          InputError: a process has another text than process 0.
        """
        first, *others = self.gather(dict(found))
        for i, own in enumerate(others, start=1):
            names = [*first, *(name for name in own if name not in first)]
            if different := [name for name in names if own.get(name) != first.get(name)]:
                raise InputError(
                    f"process {i} differs from process 0 in the {' and the '.join(different)}; all "
                    "processes need the same command, files and versions"
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
        """The arrays of process 0, sent from device to device, one after the other.

        Args:
          arrays: arrays of the host by name; in other processes they are ignored.
          specs: by name, an object with the array's shape and dtype.
        """
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
        """The number of a signal that has arrived in any process; 0 if none has.

        Args:
          number: number of the signal that has arrived in this process, or 0.
        """
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
        """Within this context, an exception of JAX that another process may have caused by its end
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
                found = self._client.blocking_key_value_get_bytes(key, int(1000 * _PATIENCE))
                return pickle.loads(found)
            except jax.errors.JaxRuntimeError as e:
                if "DEADLINE_EXCEEDED" not in str(e):
                    raise ProcessFailed(f"process 0 has ended ({first_line(e)})") from None
            for folder in (f"{self._run}/ended/", ENDED):
                if reason := first_end(self._client, folder, self.index):
                    raise reason
