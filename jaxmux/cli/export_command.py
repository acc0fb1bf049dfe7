"""The command `jaxmux export`: writes PEFT adapters from the checkpoints of a training run."""

import argparse
import logging
from pathlib import Path

from jaxmux.models import BackboneConfig, BackboneError
from jaxmux.peft import KINDS, adapter_of, export_adapter
from jaxmux.runs import RunDirectoryError, read_identity, read_task

USER_ERRORS = (BackboneError, OSError, RunDirectoryError)


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code, 0. Raises `USER_ERRORS` for unusable input."""
    # Orbax logs a warning for every folder that it may read but not write.
    logging.getLogger("absl").setLevel(logging.ERROR)
    run_dir = Path(options.run_dir)
    run = read_identity(run_dir)
    config = BackboneConfig.from_folder(run["backbone"])
    for name in options.task or run["tasks"]:
        if name not in run["tasks"]:
            known = ", ".join(run["tasks"])
            raise FileNotFoundError(f"{run_dir}: no task {name!r}; its tasks are {known}")
        fields = dict(run["tasks"][name]["adapter"])
        spec = KINDS[fields.pop("kind")].specification(**fields)
        step, arrays = read_task(run_dir / "checkpoints", name, options.step)
        folder = Path(options.out) / name
        adapter = adapter_of(arrays, spec, config)
        export_adapter(folder, adapter, spec, config, run["backbone"], serving=options.serving)
        print(f"{name}: checkpoint {step} -> {folder}")
    return 0
