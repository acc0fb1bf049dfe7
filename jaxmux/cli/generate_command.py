"""The command `jaxmux generate`: completes prompts with a backbone and adapters, or chats with
them."""

import argparse
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from jaxmux.backbone_folder import resolve_backbone
from jaxmux.data import load_tokenizer
from jaxmux.generation import Generator, Request, Sampling, end_of_turn
from jaxmux.models import Backbone, BackboneConfig, checkpoint_tensors, load_backbone
from jaxmux.peft import import_adapter, is_adapter_folder
from jaxmux.runs import RunDirectoryError, read_record

from .generate_chat import chat
from .generate_output import CompletionFile, print_completions
from .generate_prompts import read_prompts

BASE = "base"


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code, 0. Raises `InputError` for unusable input."""
    folders = _adapter_folders(options)
    record = read_record(Path(options.run_dir)) if options.run_dir else {}
    folder = resolve_backbone(options.backbone or record["backbone"])
    format = options.backbone_format or record.get("backbone_format")
    BackboneConfig.from_folder(folder)
    tokenizer = load_tokenizer(folder)
    prompts = [] if options.chat else read_prompts(options, tokenizer)
    backbone = load_backbone(folder, options.dtype, format)
    answering = list(_answering(options, folder, format, backbone, folders))
    generator = Generator(backbone, tokenizer, max_batch=options.max_batch, keep_backbone=False)
    given = {
        "max_new_tokens": options.max_new_tokens,
        "sampling": Sampling(options.temperature, options.top_p, options.top_k, options.seed),
        "stops": end_of_turn(tokenizer) if options.chat or prompts[0].is_rendered else [],
    }
    if options.chat:
        chat(generator, tokenizer, options.system, answering, given)
        return 0
    requests = [
        Request(prompt.text, spec, adapter, prompt.is_rendered)
        for prompt in prompts
        for _, spec, adapter in answering
    ]
    labels = [each.label for each in answering]
    with closing(generator.stream(requests, **given)) as pieces:
        if options.out:
            with CompletionFile(Path(options.out), prompts, labels) as file:
                file.write(pieces)
        else:
            print_completions(pieces, prompts, labels)
    return 0


class Answering(NamedTuple):
    """What answers prompts.

    Attributes:
      label: name that is shown beside the answers.
      spec: specification of the adapter; None for the bare backbone.
      adapter: its arrays, or None.
    """

    label: str
    spec: Any = None
    adapter: Any = None


def _answering(
    options: argparse.Namespace,
    folder: str,
    format: str | None,
    backbone: Backbone,
    folders: Mapping[str, Path],
) -> Iterator[Answering]:
    if options.with_base or not folders:
        yield Answering(BASE)
    base = checkpoint_tensors(folder, backbone.compute_dtype, format)
    for label, path in folders.items():
        yield Answering(label, *import_adapter(path, backbone.config, backbone.fingerprint, base))


def _adapter_folders(options: argparse.Namespace) -> dict[str, Path]:
    """By label, the folders of all adapters."""
    found: dict[str, Path] = {}
    for given in options.adapter:
        name, is_named, path = given.partition("=")
        folder = Path(path if is_named else given)
        _refuse_run_directory(folder)
        _add(found, name if is_named else folder.resolve().name, folder)
    if options.run_dir:
        run_dir = Path(options.run_dir)
        read_record(run_dir)
        own = _adapters_of(run_dir)
        if not own:
            raise RunDirectoryError(f"{run_dir}: has no adapter yet")
        for folder in own:
            _add(found, folder.name, folder)
    return found


def _add(found: dict[str, Path], label: str, folder: Path) -> None:
    if label in found or label == BASE:
        other = found.get(label, "the bare backbone")
        raise RunDirectoryError(
            f"{folder}: has the label {label!r}, and so has {other}; "
            f"give it another one: --adapter=NAME={folder}"
        )
    found[label] = folder


def _adapters_of(run_dir: Path) -> list[Path]:
    return [folder for folder in sorted(run_dir.glob("adapters/*")) if is_adapter_folder(folder)]


def _refuse_run_directory(folder: Path) -> None:
    if not (folder / "run.json").is_file():
        return
    adapters = [str(found) for found in _adapters_of(folder)]
    hint = f"name one of them: {', '.join(adapters)}" if adapters else "it has no adapter yet"
    raise RunDirectoryError(
        f"{folder}: is a run directory; --run_dir={folder} takes all of its adapters, or {hint}"
    )
