"""The command `jaxmux train`: trains the tasks of a gin config."""

import argparse
import logging
import os
from pathlib import Path

import jax

from jaxmux.package_files import resolve_path
from jaxmux.runs import fine_tune, join_processes
from jaxmux.runs.processes import leave, process_index, watching_others

from . import gin_bindings
from .arguments import DEMO_CONFIG, is_one_of_several
from .exit_codes import TASK_FAILED, exit_at_once, exit_code_of


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code, as `jaxmux train --help` describes it.

    Raises `InputError` for input that cannot be used.
    """
    # Orbax logs warnings about its own metadata when training resumes.
    logging.getLogger("absl").setLevel(logging.ERROR)
    if not is_one_of_several(options):
        return _train(options)
    join_processes(options.coordinator, options.processes, options.process)
    try:
        with watching_others(_end_at_once):
            return _train(options)
    except BaseException as e:
        leave(e)
        raise


def _end_at_once(reason: BaseException) -> None:
    def fail() -> int:
        raise reason

    exit_at_once(exit_code_of(fail))


def _train(options: argparse.Namespace) -> int:
    _keep_compiled_programs()
    files = options.gin_file
    if not files:
        if process_index() == 0:
            print("no --gin_file: running the bundled demo (--help shows how to train your own)")
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


def _keep_compiled_programs() -> None:
    """Lets JAX keep compiled programs in the user's cache folder, unless one is chosen already."""
    if jax.config.jax_compilation_cache_dir is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "jaxmux" / "jax"))
