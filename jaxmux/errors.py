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
    """The input cannot be used. The message, of one line, names the fault and says what to do."""


class OutOfDeviceMemory(RuntimeError):
    """Training needs more memory than the device has, even if all values are computed again. The
    message says what would need less."""


class ProcessFailed(RuntimeError):
    """Another process of the same training run has failed. The message says which one and why."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, or the name of its type if it has none. A
    line with more than 2,000 characters, which may quote data, is cut."""
    line = str(error).strip().partition("\n")[0].rstrip() or type(error).__name__
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}…"


def message_of(error: Exception) -> str | None:
    """Returns the message for an exception that has ended a command; None if the exception is a
    fault of jaxmux, whose traceback is needed."""
    if isinstance(error, InputError | OutOfDeviceMemory | ProcessFailed):
        return str(error)
    if isinstance(error, OSError):
        # The second file of a copy is its destination.
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
    """Returns the exception that has ended a server's training if `error` only reports it, else
    `error` itself."""
    return error.__cause__ if type(error) is RuntimeError and error.__cause__ else error


def without_task(message: str, name: str) -> str:
    """Removes the name of a task from the beginning of a message, for places that show the name
    already."""
    return message.removeprefix(f"task {name!r}: ")


def ran_out_of_memory(error: Exception) -> bool:
    """True if JAX or jaxmux raised this exception because a device's memory did not suffice."""
    return isinstance(error, OutOfDeviceMemory) or "RESOURCE_EXHAUSTED" in str(error)


class Interrupted(BaseException):
    """SIGINT, SIGTERM or SIGHUP stopped a training run. The same call of `fine_tune` continues it.

    Like `KeyboardInterrupt`, it is not an `Exception`, so code that handles all errors does not
    catch it.

    Attributes:
      signal_number: number of the signal, for example `signal.SIGTERM`.
      saved: True if training had begun, and its state was saved.
    """

    def __init__(self, signal_number: int, saved: bool, problem: str | None = None):
        """Makes the exception for a signal.

        Args:
          signal_number: as the attribute.
          saved: as the attribute.
          problem: why not all of the state was saved; None if there was nothing to save.
        """
        what = "nothing was trained since the start"
        if saved:
            what = "state saved, the same command continues from here"
        elif problem:
            what = f"not all was saved ({problem}); the same command continues from what was"
        super().__init__(f"stopped by {signal.Signals(signal_number).name}; {what}")
        self.signal_number, self.saved = signal_number, saved


def fits(call: Callable[..., Any], *arguments: Any) -> bool:
    """Whether a function runs without running out of a device's memory. Other errors of JAX are
    raised."""
    # Imported here because `jaxmux --help` needs no JAX.
    import jax

    try:
        call(*arguments)
    except jax.errors.JaxRuntimeError as e:
        raise_unless_full(e)
        return False
    return True


def raise_unless_full(error: Exception) -> None:
    """Raises an error, unless it tells that a device's memory did not suffice."""
    if not ran_out_of_memory(error):
        raise error
    _log.info("%s", str(error).splitlines()[0])


def microbatch_too_large(tokens: int) -> OutOfDeviceMemory:
    """Returns the exception for a microbatch of this many tokens that does not fit, even if all
    values are computed again."""
    return OutOfDeviceMemory(
        f"a microbatch of {tokens} tokens does not fit into the device's memory, even if all "
        f"values are computed again; try tokens_per_microbatch={tokens // 2}, or fewer or smaller "
        "tasks"
    )
