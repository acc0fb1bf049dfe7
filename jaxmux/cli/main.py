"""The console command `jaxmux`, whose subcommands are the command lines of this folder."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

# By subcommand, one line of help. `jaxmux train` is `python -m jaxmux.train`, and so on.
COMMANDS = {
    "train": "train the tasks of a config together and export their adapters",
    "plan": "show what training a config takes, on devices that need not be there",
    "profile": "measure this machine's devices for the planner's cost models",
    "generate": "complete prompts with a backbone and an adapter",
    "export": "write PEFT adapters from the checkpoints of a run",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns its exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    # Everything behind the subcommand is the subcommand's own to parse.
    command = _parser().parse_args(given[:1]).command
    return import_module(f".{command}_command", __package__).main(given[1:])


def _parser() -> argparse.ArgumentParser:
    commands = "\n".join(f"  {name:10}{text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="jaxmux",
        usage="jaxmux COMMAND [options]",
        description="Fine-tunes many PEFT tasks at once on one frozen language model.",
        epilog=f"commands:\n{commands}\n\n`jaxmux COMMAND --help` tells a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="see below")
    return parser
