"""The command `jaxmux data`: shows what the tasks of a config train on."""

import argparse
import json
from collections.abc import Sequence

from jaxmux.data import load_tokenizer
from jaxmux.engine.tasks.prepared_task import Loaded, read_data
from jaxmux.installation import resolve_path
from jaxmux.models import BackboneConfig, resolve_backbone
from jaxmux.runs import check_names
from jaxmux.similar_names import did_you_mean
from jaxmux.sweeps import expanded
from jaxmux.tasks import Task

from . import gin_bindings
from .data_report import report_packing, report_task, to_json
from .data_tables import packing_parts, task_parts
from .gin_bindings import ConfigError, RunConfig
from .report_console import report_console, say_if_demo


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code, 0. Raises InputError for unusable input."""
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
    packing = report_packing(
        chosen, data, config.tokens_per_microbatch, config.row_len, config.chunk_len
    )
    if options.json:
        say_if_demo(options, None)
        print(json.dumps(to_json(tasks, packing)))
        return 0
    console = report_console()
    say_if_demo(options, console)
    colours = console.color_system is not None and not console.no_color
    for report in tasks:
        for part in task_parts(report, colours):
            console.print(part)
    for line in packing_parts(packing):
        console.print(line)
    return 0


def _tasks(config: RunConfig, names: Sequence[str] | None) -> list[Task]:
    """The tasks with these names, or all tasks if there are no names. A sweep is replaced by the
    tasks of its configurations."""
    tasks = expanded(config.tasks)
    check_names(tasks)
    known = {task.name: task for task in tasks}
    for name in names or ():
        if name not in known:
            hint = did_you_mean(name, known) or f"the tasks are {', '.join(known)}"
            raise ConfigError(f"--task: no task {name!r}; {hint}")
    return [known[name] for name in dict.fromkeys(names or known)]
