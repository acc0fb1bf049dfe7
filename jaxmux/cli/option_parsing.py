"""Parsers of options, with hints for misspelt options, and types of options. This module does not
import JAX, so that `--help` is fast."""

import argparse
import math
import re
import shutil
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from jaxmux.similar_names import did_you_mean


def command_parser(
    prog: str, description: str, epilog: str | None = None
) -> argparse.ArgumentParser:
    """A parser without options. Its help shows `prog`, the description before the options and
    `epilog` after them."""
    width = min(100, shutil.get_terminal_size().columns)
    return argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=lambda prog: _HelpFormatter(prog, width=width),
        allow_abbrev=False,
    )


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Breaks lines only at spaces, never within an option such as --gin.NAME."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gin_file", action="append", metavar="FILE", help="a config; may be repeated"
    )
    parser.add_argument(
        "--gin.NAME",
        dest="_",
        metavar="VALUE",
        help="set one parameter, e.g. --gin.Task.max_length=512; a string needs quotes of its own: "
        "'--gin.Task.data=\"a.jsonl\"'",
    )
    # Another form of --gin.NAME=VALUE, used by programs of other projects.
    parser.add_argument("--gin_param", action="append", default=[], help=argparse.SUPPRESS)


def parse_options(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command without a config. Exits with a message if an option is unknown."""
    options, others = parser.parse_known_args(arguments)
    if others:
        _refuse(parser, others[0], "--help lists the options")
    return options


def parse_with_bindings(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> argparse.Namespace:
    """The options of a command with a config; `bindings` has the config's parameters as NAME=VALUE.
    Exits with a message if an option is unknown."""
    options, others = parser.parse_known_args(arguments)
    if unknown := [a for a in others if not a.startswith("--gin.") or "=" not in a]:
        _refuse(parser, unknown[0], "a parameter is set by --gin.NAME=VALUE")
    options.bindings = options.gin_param + [other.removeprefix("--gin.") for other in others]
    return options


def _refuse(parser: argparse.ArgumentParser, argument: str, hint: str) -> NoReturn:
    """Exits with a message that names a similar option, or with `hint` if there is none."""
    options = re.findall(r"--([a-z_]+)", parser.format_usage())
    # Dashes are removed because they would make all options look alike.
    name = argument.partition("=")[0].removeprefix("--")
    similar = did_you_mean(name, options).replace("mean ", "mean --", 1)
    parser.error(f"unknown argument {argument}; {similar or hint}")


def in_range(kind: type, least: float, most: float, expected: str) -> Callable[[str], int | float]:
    """An argparse type for numbers in [least, most]. The error message describes these numbers by
    `expected`."""

    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"should be {expected}, found {text!r}")
        return value

    return parse


count = in_range(int, 1, 2**31, "an integer of at least 1")
not_negative_integer = in_range(int, 0, 2**31, "an integer of at least 0")
port = in_range(int, 0, 2**16 - 1, "a port in [0, 65535]")
seed = in_range(int, 0, 2**32 - 1, "an integer in [0, 4294967295]")
not_negative = in_range(float, 0, 1e9, "a number of at least 0")


def path(text: str) -> Path:
    """The path of a file or folder. An empty text, for example from an unset shell variable, is
    refused because it would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("should be a path, found nothing")
    return Path(text)
