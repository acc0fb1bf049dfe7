"""The command `jaxmux data`: shows what the tasks of a config train on."""

import argparse
import json
import sys
from collections.abc import Sequence

from rich.console import Console

from jaxmux.backbone_folder import resolve_backbone
from jaxmux.data import load_tokenizer
from jaxmux.engine.task_data import Loaded, read_data
from jaxmux.models import BackboneConfig
from jaxmux.package_files import resolve_path
from jaxmux.runs import check_names
from jaxmux.similar_names import did_you_mean
from jaxmux.sweeps import expanded
from jaxmux.tasks import Task

from . import gin_bindings
from .data_report import report_packing, report_task, to_json
from .data_tables import packing_parts, task_parts
from .gin_bindings import ConfigError, RunConfig

# Columns of the output where there is no terminal.
_PLAIN_WIDTH = 80


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code, 0. Raises `InputError` for unusable input."""
    gin_bindings.parse([resolve_path(file) for file in options.gin_file], options.bindings)
    config = gin_bindings.run_config()
    chosen = _tasks(config, options.task)
    folder = resolve_backbone(config.backbone)
    backbone, tokenizer = BackboneConfig.from_folder(folder), load_tokenizer(folder)
    loaded = Loaded()
    data = {task.name: read_data(task, backbone, tokenizer, loaded) for task in chosen}
    tasks = [
        report_task(task, data[task.name], backbone, tokenizer, options.samples) for task in chosen
    ]
    packing = report_packing(data, config.tokens_per_microbatch, config.row_len, config.chunk_len)
    if options.json:
        print(json.dumps(to_json(tasks, packing)))
        return 0
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    colours = console.color_system is not None and not console.no_color
    for report in tasks:
        for part in task_parts(report, colours):
            console.print(part, markup=False)
    for line in packing_parts(packing):
        console.print(line, markup=False)
    return 0


def _tasks(config: RunConfig, names: Sequence[str] | None) -> list[Task]:
    """The tasks with these names; all if there are no names. A sweep stands for the tasks of its
    configurations."""
    tasks = expanded(config.tasks)
    check_names(tasks)
    known = {task.name: task for task in tasks}
    for name in names or ():
        if name not in known:
            hint = did_you_mean(name, known) or f"the tasks are {', '.join(known)}"
            raise ConfigError(f"--task: no task {name!r}; {hint}")
    return [known[name] for name in dict.fromkeys(names or known)]
