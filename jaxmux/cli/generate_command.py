"""The command `jaxmux generate`: completes prompts with a backbone and, if given, an adapter."""

import argparse
from pathlib import Path

from jaxmux.backbone_folder import resolve_backbone
from jaxmux.completion import Request, complete
from jaxmux.data import load_tokenizer
from jaxmux.models import checkpoint_tensors, load_backbone
from jaxmux.peft import import_adapter
from jaxmux.runs import RunDirectoryError


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code, 0. Raises `InputError` for unusable input."""
    folder = resolve_backbone(options.backbone)
    backbone = load_backbone(folder, options.dtype, options.backbone_format)
    tokenizer = load_tokenizer(folder)
    adapter = ()
    if options.adapter:
        _refuse_run_directory(Path(options.adapter))
        adapter = import_adapter(
            options.adapter,
            backbone.config,
            backbone.fingerprint,
            checkpoint_tensors(folder, backbone.compute_dtype, options.backbone_format),
        )
    texts = complete(
        backbone,
        tokenizer,
        [Request(prompt, *adapter) for prompt in options.prompt],
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        seed=options.seed,
    )
    for prompt, text in zip(options.prompt, texts, strict=True):
        print(prompt + text)
    return 0


def _refuse_run_directory(folder: Path) -> None:
    if not (folder / "run.json").is_file():
        return
    adapters = [str(found) for found in sorted(folder.glob("adapters/*")) if found.is_dir()]
    hint = f"name an adapter in it: {', '.join(adapters)}" if adapters else "it has no adapter yet"
    raise RunDirectoryError(f"{folder}: is a run directory; {hint}")
