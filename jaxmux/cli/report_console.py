"""The console to which commands print their reports."""

import argparse
import sys

from rich.console import Console

# Number of columns of the output if there is no terminal.
_PLAIN_WIDTH = 80


def report_console() -> Console:
    """A console for standard output: as wide as the terminal, or 80 columns in a file or a pipe.
    Brackets in texts are not interpreted as markup."""
    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    return Console(highlight=False, markup=False, width=width)


def say_if_demo(options: argparse.Namespace, console: Console | None) -> None:
    """Says that a report is about the bundled demo, if the user has named no config (`is_demo`).
    Prints to standard error if `console` is None."""
    if not options.is_demo:
        return
    line = "no --gin_file: this is the bundled demo; --gin_file=FILE shows your own tasks"
    if console:
        console.print(line)
    else:
        print(line, file=sys.stderr)
