"""The command `jaxmux train`: trains the tasks of a gin config."""

import argparse
import sys
from pathlib import Path

from jaxmux.data import DataError
from jaxmux.models import BackboneError
from jaxmux.package_files import resolve_path
from jaxmux.planner import PlanningError
from jaxmux.runs import Interrupted, RunDirectoryError, fine_tune
from jaxmux.tasks import TaskError

from . import gin_bindings
from .arguments import DEMO_CONFIG
from .gin_bindings import ConfigError

USER_ERRORS = (BackboneError, ConfigError, DataError, PlanningError, RunDirectoryError, TaskError)


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code, as `jaxmux train --help` describes it.

    Raises `USER_ERRORS` for input that cannot be used.
    """
    files = options.gin_file
    if not files:
        print("no --gin_file: running the bundled demo (--help shows how to train your own tasks)")
        files = [DEMO_CONFIG]
    run_dir = options.run_dir or Path("runs") / Path(files[-1]).stem
    gin_bindings.parse([resolve_path(file) for file in files], options.bindings)
    config = gin_bindings.run_config()
    try:
        summary = fine_tune(
            config.backbone,
            config.tasks,
            run_dir,
            options=config,
            restart=options.restart,
            config_text=gin_bindings.resolved_config(),
        )
    except Interrupted as e:
        print(f"{e}; state saved, the same command continues from here", file=sys.stderr)
        return 128 + e.signal_number
    return 0 if summary.succeeded else 1
