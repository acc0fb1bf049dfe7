"""The command `jaxmux train`: trains the tasks of a gin config."""

import argparse
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
from .arguments import DEMO_CONFIG, train_options
from .gin_bindings import ConfigError

# Errors that the user can correct; they are shown as one line, without a traceback.
_USER_ERRORS = (BackboneError, ConfigError, DataError, PlanningError, RunDirectoryError, TaskError)


def main(arguments: Sequence[str]) -> int:
    """Runs the command with these arguments; returns its exit code."""
    return run(train_options(arguments))


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code, as `jaxmux train --help` describes it."""
    files = options.gin_file
    if not files:
        print("no --gin_file: running the bundled demo (--help shows how to train your own tasks)")
        files = [DEMO_CONFIG]
    run_dir = options.run_dir or Path("runs") / Path(files[-1]).stem
    try:
        gin_bindings.parse([resolve_path(file) for file in files], options.bindings)
        config = gin_bindings.run_config()
        summary = fine_tune(
            config.backbone,
            config.tasks,
            run_dir,
            options=config,
            restart=options.restart,
            config_text=gin_bindings.resolved_config(),
        )
    except _USER_ERRORS as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except Interrupted as e:
        print(f"{e}; state saved, the same command continues from here", file=sys.stderr)
        return 128 + e.signal_number
    return 0 if summary.succeeded else 1
