"""Exit codes of the commands, and the one line that tells the reason for a failure.

| code | meaning |
|---|---|
| 0 | done; no task failed |
| 1 | a task failed, and the others are finished |
| 2 | the input was refused; nothing was trained |
| 3 | the command broke, for example on a full disk; training continues from the last checkpoint |
| 128 + n | signal n stopped the command: 130 is Ctrl-C, 143 is SIGTERM |
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from jaxmux.errors import InputError, Interrupted, message_of
from jaxmux.printable import escaped

TASK_FAILED, REFUSED, BROKE = 1, 2, 3


def exit_code_of(run: Callable[[], int]) -> int:
    """Runs a command, a function that returns its exit code. Turns an exception into an exit code
    and one line on standard error; an exception that is a fault of jaxmux keeps its traceback."""
    # Replace characters that the terminal cannot show, instead of raising an error.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        code = run()
        sys.stdout.flush()
        return code
    except Interrupted as e:
        return _fail(128 + e.signal_number, str(e))
    except KeyboardInterrupt:
        return _fail(128 + signal.SIGINT, "stopped by SIGINT")
    except BrokenPipeError:
        # The reader of the output has gone. Python would raise the error again when it flushes.
        sys.stdout = open(os.devnull, "w")
        return 128 + signal.SIGPIPE
    except Exception as e:
        message = message_of(e)
        if message is None:
            traceback.print_exc()
            return BROKE
        refused = isinstance(e, InputError | ModuleNotFoundError)
        return _fail(REFUSED if refused else BROKE, f"error: {message}")


def exit_at_once(code: int) -> NoReturn:
    """Ends the process with this exit code, without waiting for threads or other processes."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)


def _fail(code: int, message: str) -> int:
    # Messages quote texts by others: templates, records, names of files.
    print(escaped(message, keep="\n"), file=sys.stderr)
    return code
