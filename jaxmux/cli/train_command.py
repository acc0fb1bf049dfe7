"""The command `jaxmux train`: trains the tasks of a gin config."""

import argparse
from pathlib import Path

from jaxmux.package_files import resolve_path
from jaxmux.runs import fine_tune

from . import gin_bindings
from .arguments import DEMO_CONFIG
from .exit_codes import TASK_FAILED


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code, as `jaxmux train --help` describes it.

    Raises `InputError` for input that cannot be used.
    """
    files = options.gin_file
    if not files:
        print("no --gin_file: running the bundled demo (--help shows how to train your own tasks)")
        files = [DEMO_CONFIG]
    run_dir = options.run_dir or Path("runs") / Path(files[-1]).stem
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
    return 0 if summary.succeeded else TASK_FAILED
