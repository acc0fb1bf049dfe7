"""The command `jaxmux train`: trains the tasks of a gin config."""

import argparse
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NoReturn

import jax

from jaxmux.errors import InputError
from jaxmux.installation import cache_folder, resolve_path
from jaxmux.runs import fine_tune, join_processes
from jaxmux.runs.console import RunConsole
from jaxmux.runs.processes import leave, process_index, watching_others
from jaxmux.server.serving import serve
from jaxmux.similar_names import did_you_mean

from . import gin_bindings
from .arguments import DEMO_CONFIG, DEMO_SERVER_CONFIG, is_one_of_several
from .exit_codes import TASK_FAILED, exit_at_once, exit_code_of


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code, as `jaxmux train --help` describes it. Raises
    InputError for unusable input."""
    if options.watch:
        with _page(options):
            _serve(options)
    if not is_one_of_several(options):
        with _page(options):
            return _train(options)
    join_processes(options.coordinator, options.processes, options.process)
    try:
        # Only one process writes the files and serves the page.
        page = _page(options) if process_index() == 0 else nullcontext()
        with watching_others(_end_at_once), page:
            return _train(options)
    except BaseException as e:
        leave(e)
        raise


def _page(options: argparse.Namespace) -> AbstractContextManager[None]:
    """Within this context, serves the page of the run if the options ask for it."""
    if not options.ui:
        return nullcontext()
    from jaxmux.ui.serving import page_beside

    return page_beside(_run_dir(options), options.host, options.port)


def _run_dir(options: argparse.Namespace) -> str | Path:
    default = DEMO_SERVER_CONFIG if options.watch else DEMO_CONFIG
    files = options.gin_file or [default]
    return options.run_dir or Path("runs") / Path(files[-1]).stem


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
    run_dir = _parse(files, options)
    config = gin_bindings.run_config()
    summary = fine_tune(
        config.backbone,
        config.tasks,
        run_dir,
        options=config,
        restart=options.restart,
        config_text=gin_bindings.resolved_config(),
        console=RunConsole(log_every=config.log_every, verbose=options.verbose),
    )
    return 0 if summary.succeeded else TASK_FAILED


def _serve(options: argparse.Namespace) -> NoReturn:
    """Trains the tasks of a watched directory until a signal raises an exception."""
    _keep_compiled_programs()
    files = options.gin_file
    if not files:
        print("no --gin_file: serving the demo's model (--help shows how to serve yours)")
        files = [DEMO_SERVER_CONFIG]
    run_dir = _parse(files, options)
    config, limits = gin_bindings.serve_config()
    _require_folder(Path(options.watch))
    serve(
        config.backbone,
        options.watch,
        run_dir,
        config,
        limits,
        config_text=gin_bindings.resolved_serve_config(),
        end_at_once=_end_at_once,
    )
    raise AssertionError("only a signal ends a server")


def _require_folder(watched: Path) -> None:
    """Raises InputError if the watched directory does not exist, because its name may be
    misspelt."""
    if watched.is_dir():
        return
    siblings = watched.absolute().parent.glob("*/")
    hint = did_you_mean(watched.name, [folder.name for folder in siblings])
    hint = f" {hint}" if hint else ""
    raise InputError(f"--watch={watched}: no such folder;{hint} `mkdir -p {watched}` makes one")


def _parse(files: Sequence[str], options: argparse.Namespace) -> str | Path:
    """Reads configs and parameters; returns the run directory."""
    gin_bindings.parse([resolve_path(file) for file in files], options.bindings)
    return _run_dir(options)


def _keep_compiled_programs() -> None:
    """Makes JAX store compiled programs in the user's cache folder, unless another folder is
    set."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder("jax")))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        # By default, JAX does not store programs that compile in less than a second.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
