"""The exceptions that a command turns into one line and an exit code.

Every package defines its own subclass of `InputError`, so that users of `import jaxmux` can tell
them apart.
"""

import logging
import signal
from collections.abc import Callable
from typing import Any

_log = logging.getLogger("jaxmux")
# Characters of a message that are shown.
LONGEST_LINE = 2000


class InputError(ValueError):
    """The input cannot be used. The message is one line that names what is at fault and says what
    to do."""


class OutOfDeviceMemory(RuntimeError):
    """Training needs more memory than the device has, however much is computed again. The message
    says what would need less."""


class ProcessFailed(RuntimeError):
    """Another process of the same training run has failed. The message says which one and why."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or the name of its type if it has none. Of a line
    with more than 2,000 characters, in which somebody's data are quoted, the first ones."""
    line = str(error).strip().partition("\n")[0].rstrip() or type(error).__name__
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}…"


def message_of(error: Exception) -> str | None:
    """What is told of an exception that has ended a command; None if it is a fault of jaxmux, whose
    traceback is needed."""
    if isinstance(error, InputError | OutOfDeviceMemory | ProcessFailed):
        return str(error)
    if isinstance(error, OSError):
        # The second file is the one to which a copy goes.
        where = error.filename2 or error.filename or "input or output"
        return f"{where}: {error.strerror or error}"
    if isinstance(error, MemoryError):
        return "the host has no memory left"
    if isinstance(error, ModuleNotFoundError) and not (error.name or "jaxmux").startswith("jaxmux"):
        return (
            f"the package {error.name} is missing; install jaxmux with all that it needs: "
            "pip install . (on a GPU: pip install '.[cuda13]')"
        )
    if "RESOURCE_EXHAUSTED" in str(error):
        return (
            "the device ran out of memory; the same command continues from the last checkpoint, "
            "with --gin.fine_tune.memory_gib=… below what it has, or a smaller "
            "tokens_per_microbatch in another run_dir"
        )
    return None


def cause_of(error: BaseException) -> BaseException:
    """The exception that has ended a server's training, if `error` is the one that tells of it, and
    else `error`."""
    return error.__cause__ if type(error) is RuntimeError and error.__cause__ else error


def without_task(message: str, name: str) -> str:
    """A message without the name of its task, with which messages about tasks begin.

    Args:
      message: the message of an exception.
      name: name of the task, which is named already where the message is shown.
    """
    return message.removeprefix(f"task {name!r}: ")


def ran_out_of_memory(error: Exception) -> bool:
    """True if JAX or jaxmux raised this exception because a device's memory did not suffice."""
    return isinstance(error, OutOfDeviceMemory) or "RESOURCE_EXHAUSTED" in str(error)


class Interrupted(BaseException):
    """SIGINT, SIGTERM or SIGHUP stopped a training run. The same call of `fine_tune` continues it.

    Like `KeyboardInterrupt`, it is no `Exception`, so code that handles all errors lets it pass.

    Attributes:
      signal_number: number of the signal, for example `signal.SIGTERM`.
      saved: True if training had begun, and its state was saved.
    """

    def __init__(self, signal_number: int, saved: bool, problem: str | None = None):
        """Makes the exception for a signal.

        Args:
          signal_number: its number.
          saved: whether the state was saved.
          problem: why not all of it was; None if there was nothing to save.
        """
        what = "nothing was trained since the start"
        if saved:
            what = "state saved, the same command continues from here"
        elif problem:
            what = f"not all was saved ({problem}); the same command continues from what was"
        super().__init__(f"stopped by {signal.Signals(signal_number).name}; {what}")
        self.signal_number, self.saved = signal_number, saved


def fits(call: Callable[..., Any], *arguments: Any) -> bool:
    """Whether a call returns without running out of a device's memory.

    Args:
      call: the function; other errors of JAX are raised.
      *arguments: its arguments.
    """
    # Imported here because `jaxmux --help` needs no JAX.
    import jax

    try:
        call(*arguments)
    except jax.errors.JaxRuntimeError as e:
        if not ran_out_of_memory(e):
            raise
        _log.info("%s", str(e).splitlines()[0])
        return False
    return True


def microbatch_too_large(tokens: int) -> OutOfDeviceMemory:
    """The exception for a microbatch that does not fit, however much is computed again.

    Args:
      tokens: tokens of the microbatch.
    """
    return OutOfDeviceMemory(
        f"a microbatch of {tokens} tokens does not fit into the device's memory, even if all "
        f"values are computed again; try tokens_per_microbatch={tokens // 2}, or fewer or smaller "
        "tasks"
    )
