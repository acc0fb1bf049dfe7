"""The command `jaxmux export`: writes PEFT adapters from the checkpoints of a training run."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jaxmux.data import Rendering
from jaxmux.engine import TaskProgress
from jaxmux.engine.state.slots import without_kept
from jaxmux.models import BackboneConfig, checkpoint_tensors
from jaxmux.peft import (
    KINDS,
    AdapterError,
    adapter_of,
    export_adapter,
    is_adapter_folder,
    kind_of,
    write_merged,
)
from jaxmux.peft.peft_folder import TEMPLATE
from jaxmux.planner.numbers import numbered
from jaxmux.printable import STOPPED_EARLY
from jaxmux.runs import RunDirectoryError, Summary, notes_of_record, read_record, read_task
from jaxmux.runs.run_directory import LockState, lock_state

# Files of backbones; every checkpoint folder has at least one of these.
_OF_BACKBONES = {"config.json", "model.safetensors", "model.safetensors.index.json"}


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code, 0. Raises InputError for unusable input."""
    run_dir, out = options.run_dir, options.out
    record = read_record(run_dir)
    names = options.task or list(record["tasks"])
    if unknown := [name for name in names if name not in record["tasks"]]:
        known = ", ".join(record["tasks"])
        raise RunDirectoryError(f"{run_dir}: no task {unknown[0]!r}; its tasks are {known}")
    if out.exists() and not out.is_dir():
        raise RunDirectoryError(f"{out}: is no folder; choose another --out")
    _refuse_existing([out / name for name in names], options)
    config = BackboneConfig.from_folder(record["backbone"], record.get("backbone_format"))
    specs = {}
    for name in names:
        fields = dict(record["tasks"][name]["adapter"])
        with _damage(run_dir, f"the adapter of task {name!r}"):
            specs[name] = KINDS[fields.pop("kind")].specification(**fields)
    if options.merge:
        _refuse_unmergeable(specs)
    damaged: set[str] = set()

    def warn_of_damage(line: str) -> None:
        # Each task finds another array of a damaged checkpoint, but one warning is enough.
        if (checkpoint := line.partition(" (")[0]) not in damaged:
            damaged.add(checkpoint)
            _warn(line)

    for name, spec in specs.items():
        rounds, progress, arrays = read_task(
            run_dir / "checkpoints", name, options.round, warn_of_damage
        )
        if progress.status != "succeeded":
            state = _state(progress, _steps(run_dir, record, name), lock_state(run_dir))
            _warn(f"task {name}: warning: {state}")
        last, (best, _) = without_kept(arrays)
        # If a task keeps its best adapter, that is its result.
        is_best = best is not None and options.round is None and progress.status == "succeeded"
        adapter = adapter_of(best() if is_best else last, spec, config)
        samples = record.get("samples", {}).get(name, {})
        with _damage(run_dir, f"task {name!r}"):
            notes = notes_of_record(
                name,
                fields=record["tasks"][name],
                samples=samples,
                fingerprints=record["fingerprints"],
                progress=progress,
                is_best=is_best,
            )
            rendering = _rendering(record, name)
        if options.merge:
            write_merged(out / name, record["backbone"], adapter, spec, config, notes, rendering)
        else:
            export_adapter(
                out / name,
                adapter,
                spec,
                config,
                record["backbone"],
                serving=options.serving,
                base_fingerprint=record["fingerprints"]["backbone"],
                base=checkpoint_tensors(
                    record["backbone"], np.dtype(np.float32), config.backbone_format
                ),
                notes=notes,
                rendering=rendering,
            )
        print(f"{name}: step {progress.step}, round {rounds} -> {out / name}")
    return 0


@contextmanager
def _damage(run_dir: Path, what: str) -> Iterator[None]:
    """Turns errors about missing or wrong entries of run.json into a RunDirectoryError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise RunDirectoryError(f"{run_dir / 'run.json'}: damaged ({what}: {e})") from None


def _rendering(record: Mapping[str, Any], name: str) -> Rendering | None:
    """How the data of a task became text; None if an earlier version of jaxmux wrote the record."""
    if "rendering" in record:
        return Rendering.from_json(record["rendering"][name])
    sources = record["tasks"][name]["data"]
    sources = sources if isinstance(sources, list) else [sources]
    if any(source.get("chat_template") for source in sources):
        _warn(
            f"task {name}: warning: an earlier version of jaxmux trained it, which has not kept "
            f"its chat template; put that into {TEMPLATE} of the adapter's folder"
        )
    return None


def _refuse_existing(folders: Sequence[Path], options: argparse.Namespace) -> None:
    """Raises RunDirectoryError if a folder to write is a link or is not empty. With --overwrite, an
    adapter may be replaced if the folder has none of the files of a backbone."""
    for folder in folders:
        if folder.is_symlink():
            raise RunDirectoryError(
                f"{folder}: is a symbolic link, which is not written through; choose another --out"
            )
        if folder.exists() and not folder.is_dir():
            raise RunDirectoryError(f"{folder}: is no folder; choose another --out")
        present = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        # A killed export leaves this folder behind.
        present = [name for name in present if name != ".partial"]
        if options.merge and folder.exists():
            raise RunDirectoryError(f"{folder}: exists already; choose another --out")
        if not present:
            continue
        if not is_adapter_folder(folder):
            raise RunDirectoryError(
                f"{folder}: holds {', '.join(present[:3])} but no adapter, so it may be somebody "
                "else's; choose another --out"
            )
        if not options.overwrite:
            raise RunDirectoryError(
                f"{folder}: holds an adapter already; choose another --out, or give --overwrite"
            )
        if _OF_BACKBONES & set(present):
            raise RunDirectoryError(
                f"{folder}: holds a backbone beside an adapter; choose another --out"
            )
        if links := [name for name in present if (folder / name).is_symlink()]:
            raise RunDirectoryError(
                f"{folder / links[0]}: is a symbolic link, which is not written through; choose "
                "another --out"
            )


def _refuse_unmergeable(specs: Mapping[str, Any]) -> None:
    """Raises AdapterError if any task's adapter cannot be merged, before any adapter is written."""
    apart = {name: kind.name for name, spec in specs.items() if not (kind := kind_of(spec)).merged}
    if apart:
        which = ", ".join(f"{name!r} (kind {kind!r})" for name, kind in apart.items())
        others = " ".join(f"--task={name}" for name in specs if name not in apart)
        raise AdapterError(
            f"adapters that do more than change weights of the backbone cannot be merged: {which}; "
            "export them without --merge" + (others and f", and the others with {others}")
        )


def _steps(run_dir: Path, record: Mapping[str, Any], name: str) -> int | None:
    """Number of steps that a task trains; None if this is known only when training has ended."""
    if (steps := record["tasks"][name].get("steps")) is not None:
        return steps
    summary = Summary.load(run_dir / "summary.json")
    done = {} if summary is None else summary.tasks.get(name, {})
    return done["steps"] if done.get("status") in ("succeeded", STOPPED_EARLY) else None


def _state(progress: TaskProgress, steps: int | None, process: LockState) -> str:
    done = numbered(progress.step, "step")
    if progress.status == "failed":
        return f"failed after {done} ({progress.error})"
    done = done if steps is None else f"{progress.step} of {steps} steps"
    return f"not finished ({done})" + (str(process) and f"; {process}")


def _warn(line: str) -> None:
    print(line, file=sys.stderr)
