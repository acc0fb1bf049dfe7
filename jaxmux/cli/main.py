"""The command `jaxmux`. Each of its commands also runs as `python -m jaxmux.train` and so on."""

import argparse
import gc
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from types import ModuleType
from typing import Any

from jaxmux.similar_names import did_you_mean

from .arguments import COMMANDS, is_one_of_several
from .exit_codes import REFUSED, TASK_FAILED, exit_at_once, exit_code_of

# If one of these variables is set, jaxmux does not change the GPU's memory settings.
_MEMORY_SETTINGS = {
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
}
# Fraction of a GPU's memory that JAX may use, unless the user has set one of the variables above.
MEMORY_SHARE = 0.92
# The garbage collector runs after this number of new objects.
_NEW_OBJECTS = 20_000


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    if not words:
        parser.exit(REFUSED, parser.format_help())
    # All words after the command are its arguments.
    command = parser.parse_args(words[:1]).command
    if command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS) or f"choose from {', '.join(COMMANDS)}"
        parser.error(f"unknown command {command!r}; {hint}")
    return run_command(command, words[1:], prog=f"jaxmux {command}")


def run_module(command: str) -> int:
    return run_command(command, sys.argv[1:], prog=f"python -m jaxmux.{command}")


def run_command(command: str, arguments: Sequence[str], prog: str) -> int:
    """Parses the arguments and runs the command; returns its exit code.

    The command's module is imported after the arguments are parsed, because it imports JAX, which
    takes seconds.
    """
    _open_standard_streams()
    _, parse_options = COMMANDS[command]
    options = parse_options(arguments, prog)
    # By default, JAX reserves three quarters of a GPU's memory. It reads this variable when it
    # first uses the device.
    if not _MEMORY_SETTINGS & os.environ.keys():
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(MEMORY_SHARE)
    finder = _TransformersWithoutTorch()
    sys.meta_path.insert(0, finder)
    try:
        code = exit_code_of(lambda: _imported(command).run(options))
    finally:
        sys.meta_path.remove(finder)
    if code not in (0, TASK_FAILED) and is_one_of_several(options):
        # Otherwise JAX would wait for the other processes, which may be waiting for this one.
        exit_at_once(code)
    return code


def _open_standard_streams() -> None:
    """Opens the null device for closed standard streams (`>&-`). Otherwise printing would raise an
    error, and the output of libraries would go to the next file that is opened."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The system opens the lowest free descriptor, which is this one.
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w"))


class _TransformersWithoutTorch(MetaPathFinder):
    """Imports transformers as if torch were not installed: importing torch takes eight seconds, and
    no command uses it. Other packages look for torch too, so it is hidden only during this
    import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "transformers" or "torch" in sys.modules:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(self._execute, spec.loader.exec_module)
        return spec

    @staticmethod
    def _execute(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        sys.modules["torch"] = None
        try:
            execute(module)
        finally:
            del sys.modules["torch"]


def _imported(command: str) -> ModuleType:
    """The module of a command.

    Objects created by the first import live as long as the process, so the garbage collector pauses
    during the import and ignores these objects later. Afterwards it runs less often than by
    default, because tracing programs creates many long-lived objects.
    """
    name = f"{__package__}.{command}_command"
    if name in sys.modules or not gc.isenabled():
        return import_module(name)
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        gc.set_threshold(_NEW_OBJECTS)
        gc.enable()


def _parser() -> argparse.ArgumentParser:
    commands = "\n".join(f"  {name:10}{summary}" for name, (summary, _) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="jaxmux",
        usage="jaxmux COMMAND [options]",
        description="Fine-tunes many PEFT tasks at once on one frozen language model.",
        epilog=f"commands:\n{commands}\n\n`jaxmux COMMAND --help` shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("command", metavar="COMMAND", help="one of the commands below")
    parser.add_argument(
        "--version",
        action="version",
        version=f"jaxmux {version('jaxmux')}",
        help="show the version and exit",
    )
    return parser
