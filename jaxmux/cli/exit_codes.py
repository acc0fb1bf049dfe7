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

from jaxmux.errors import InputError, Interrupted, OutOfDeviceMemory, ProcessFailed
from jaxmux.printable import escaped

TASK_FAILED, REFUSED, BROKE = 1, 2, 3


def exit_code_of(run: Callable[[], int]) -> int:
    """Runs a command. Turns an exception into one line on standard error and an exit code; an
    exception that is a fault of jaxmux keeps its traceback.

    Args:
      run: function without arguments that runs the command and returns its exit code.
    """
    # Text that the terminal cannot show is replaced, not an error.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        code = run()
        sys.stdout.flush()
        return code
    except InputError as e:
        return _fail(REFUSED, f"error: {e}")
    except Interrupted as e:
        return _fail(128 + e.signal_number, str(e))
    except KeyboardInterrupt:
        return _fail(128 + signal.SIGINT, "stopped by SIGINT")
    except BrokenPipeError:
        # The reader of the output is gone. Python would complain once more when it flushes.
        sys.stdout = open(os.devnull, "w")
        return 128 + signal.SIGPIPE
    except OSError as e:
        # The second file is the one to which a copy goes.
        where = e.filename2 or e.filename or "input or output"
        return _fail(BROKE, f"error: {where}: {e.strerror or e}")
    except MemoryError:
        return _fail(BROKE, "error: the host has no memory left")
    except (OutOfDeviceMemory, ProcessFailed) as e:
        return _fail(BROKE, f"error: {e}")
    except Exception as e:
        if isinstance(e, ModuleNotFoundError) and not (e.name or "jaxmux").startswith("jaxmux"):
            return _fail(
                REFUSED,
                f"error: the package {e.name} is missing; install jaxmux with all that it needs: "
                "pip install . (on a GPU: pip install '.[cuda13]')",
            )
        if "RESOURCE_EXHAUSTED" in str(e) and isinstance(e, ValueError):
            # The library that writes checkpoints says so of a full disk.
            return _fail(BROKE, f"error: a checkpoint cannot be written: {str(e).splitlines()[0]}")
        if "RESOURCE_EXHAUSTED" in str(e):
            return _fail(
                BROKE,
                "error: the device ran out of memory; the same command continues from the last "
                "checkpoint, with --gin.fine_tune.memory_gib=… below what it has, or a smaller "
                "tokens_per_microbatch in another run_dir",
            )
        traceback.print_exc()
        return BROKE


def exit_at_once(code: int) -> NoReturn:
    """Ends the process without waiting for threads or other processes.

    Args:
      code: the exit code.
    """
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)


def _fail(code: int, message: str) -> int:
    # Messages quote what others have written: templates, records, names of files.
    print(escaped(message, keep="\n"), file=sys.stderr)
    return code
