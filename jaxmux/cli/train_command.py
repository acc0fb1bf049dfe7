"""The front door: `python -m jaxmux.train --gin_file=my_tasks.gin`."""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxmux.data import DataError
from jaxmux.models import BackboneError
from jaxmux.package_files import resolve_path
from jaxmux.planner import PlanningError
from jaxmux.runs import Interrupted, RunDirectoryError, fine_tune
from jaxmux.tasks import TaskError

from . import gin_bindings
from .gin_bindings import ConfigError

DEMO_CONFIG = "jaxmux:configs/demo.gin"
# What the user can mend: shown as one line, without a traceback.
_USER_ERRORS = (BackboneError, ConfigError, DataError, PlanningError, RunDirectoryError, TaskError)

_HELP = """\
Trains the tasks of a gin config together on one frozen backbone and exports a Hugging Face PEFT
adapter for each. Without a config it runs the bundled demo.

The same command goes on where an interrupted run stopped. Exit code 0: every task succeeded;
1: a task failed, the others are finished; 2: the config or the data was refused and nothing was
trained.
"""
_EXAMPLE = """\
a config:
  fine_tune.backbone = "/models/Llama-3.2-1B"
  fine_tune.tasks = [@billing/Task(), @support/Task()]

  billing/Task.name = "billing"
  billing/Task.data = "billing.jsonl"
  billing/Task.epochs = 3
  billing/Task.adapter = @billing/LoRA()
  billing/LoRA.rank = 8
  ...

Paths are relative to the working directory. All parameters and their defaults:
`python -c "import jaxmux; help(jaxmux.Task)"`, likewise jaxmux.fine_tune, LoRA, AdamW, SGD, Lion,
Schedule, Source.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options, bindings = _parse_arguments(sys.argv[1:] if arguments is None else arguments)
    files = options.gin_file
    if not files:
        print("no --gin_file: running the bundled demo (--help tells how to train your own tasks)")
        files = [DEMO_CONFIG]
    run_dir = options.run_dir or Path("runs") / Path(files[-1]).stem
    try:
        gin_bindings.parse([resolve_path(file) for file in files], bindings)
        config = gin_bindings.run_config()
        summary = fine_tune(
            config.backbone,
            config.tasks,
            run_dir,
            config.options,
            restart=options.restart,
            config_text=gin_bindings.resolved_config(),
        )
    except _USER_ERRORS as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except Interrupted as e:
        print(f"{e}; state saved, the same command goes on from here", file=sys.stderr)
        return 128 + e.signal_number
    return 0 if summary.succeeded else 1


def _parse_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    width = min(100, shutil.get_terminal_size().columns)
    parser = argparse.ArgumentParser(
        prog="python -m jaxmux.train",
        description=_HELP,
        epilog=_EXAMPLE,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=width),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--gin_file", action="append", metavar="FILE", help="a config; may be repeated"
    )
    parser.add_argument("--run_dir", metavar="DIR", help="default: runs/<name of the last config>")
    parser.add_argument(
        "--restart", action="store_true", help="delete an earlier run's files first"
    )
    parser.add_argument(
        "--gin.NAME",
        dest="_",
        metavar="VALUE",
        help="set one parameter, e.g. --gin.Task.max_length=512",
    )
    options, others = parser.parse_known_args(arguments)
    if unknown := [a for a in others if not a.startswith("--gin.") or "=" not in a]:
        parser.error(f"unknown argument {unknown[0]}; a parameter is set by --gin.NAME=VALUE")
    return options, [other.removeprefix("--gin.") for other in others]


if __name__ == "__main__":
    sys.exit(main())
