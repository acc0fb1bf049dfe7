"""How a process tells the others why it ends."""

import json
from contextlib import suppress
from signal import SIGINT
from typing import Any, NamedTuple

import jax

from jaxmux.errors import InputError, Interrupted, ProcessFailed, first_line

# Where processes that end say why, among the keys of JAX's coordinator.
ENDED = "jaxmux/ended/"


class ProcessEnd(NamedTuple):
    """Why a process leaves.

    Attributes:
      message: the first line of its exception.
      refused: whether it has refused its input.
      signal: number of the signal that has stopped it; 0 for none.
      saved: whether the signal came after a checkpoint.
    """

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
        """The exception that another process raises.

        Args:
          process: number of the process that has left.
        """
        if self.signal:
            return Interrupted(self.signal, self.saved)
        kind = InputError if self.refused else ProcessFailed
        return kind(f"process {process}: {self.message}")


def tell_end(client: Any, folder: str, index: int, error: BaseException) -> None:
    """Tells the others why this process leaves.

    Args:
      client: the client of JAX's coordinator.
      folder: where to say it, as beginning of keys.
      index: number of this process.
      error: the exception with which it ends.
    """
    # If process 0 is gone, nobody can be told.
    with suppress(jax.errors.JaxRuntimeError):
        client.key_value_set(f"{folder}{index}", json.dumps(ProcessEnd.of(error)._asdict()), True)


def first_end(client: Any, folder: str, index: int) -> BaseException | None:
    """Why another process than this one has ended, as an exception; None if none has.

    Args:
      client, folder, index: as in `tell_end`.
    """
    for key, text in client.key_value_dir_get(folder):
        other = int(key.rpartition("/")[2])
        if other != index:
            return ProcessEnd(**json.loads(text)).exception(other)
    return None
