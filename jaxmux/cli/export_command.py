"""`python -m jaxmux.export`: writes PEFT adapters from the checkpoints of a run."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxmux.models import BackboneConfig, BackboneError
from jaxmux.peft import LoRA, adapter_of, export_adapter
from jaxmux.runs import RunDirectoryError, read_identity, read_task


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, or 2 for input that cannot be used."""
    options = _parse_arguments(arguments)
    # Orbax remarks on reading a folder that it may not write.
    logging.getLogger("absl").setLevel(logging.ERROR)
    run_dir = Path(options.run_dir)
    try:
        run = read_identity(run_dir)
        config = BackboneConfig.from_folder(run["backbone"])
        for name in options.task or run["tasks"]:
            if name not in run["tasks"]:
                known = ", ".join(run["tasks"])
                raise FileNotFoundError(f"{run_dir}: no task {name!r}; its tasks are {known}")
            spec = LoRA(**run["tasks"][name]["adapter"])
            step, arrays = read_task(run_dir / "checkpoints", name, options.step)
            folder = Path(options.out) / name
            adapter = adapter_of(arrays)
            export_adapter(folder, adapter, spec, config, run["backbone"], serving=options.serving)
            print(f"{name}: checkpoint {step} -> {folder}")
    except (BackboneError, OSError, RunDirectoryError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jaxmux.export",
        description="Writes Hugging Face PEFT adapters from the checkpoints of a run.",
    )
    parser.add_argument("--run_dir", required=True, metavar="DIR", help="of jaxmux.train")
    parser.add_argument("--out", required=True, metavar="DIR", help="one folder per task is made")
    parser.add_argument("--task", action="append", help="may be repeated; default: all tasks")
    parser.add_argument(
        "--step", type=int, help="which checkpoint (a folder of checkpoints/); default: the newest"
    )
    parser.add_argument(
        "--serving",
        action="store_true",
        help="fold the scale into B and set lora_alpha to the rank, for servers without rsLoRA",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
