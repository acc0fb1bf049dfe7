"""The command `jaxmux generate`: completes prompts with a backbone and adapters, or chats with
them."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from jaxmux.atomic_files import require_output
from jaxmux.data import load_tokenizer
from jaxmux.data.chat_templates import TemplateClock, named_template, read_template, template_of
from jaxmux.generation import Generator, Request, Sampling, end_of_turn
from jaxmux.models import (
    Backbone,
    BackboneConfig,
    checkpoint_tensors,
    load_backbone,
    resolve_backbone,
)
from jaxmux.peft import adapter_tokenizer, import_adapter, is_adapter_folder, trained_on
from jaxmux.peft.kind import BaseTensors
from jaxmux.peft.peft_folder import tokenizer_key, with_chat_template
from jaxmux.runs import RunDirectoryError, read_record
from jaxmux.runs.run_directory import begun_of, without_adapter

from .generate_chat import chat
from .generate_output import CompletionFile, holds_completions, print_completions
from .generate_prompts import read_prompts

BASE = "base"
# A hint names at most this many adapters.
_MOST_HINTED = 3


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code, 0. Raises InputError for unusable input."""
    if options.out:
        require_output(options.out, "file of completions", holds_completions)
    folders = _adapter_folders(options)
    record = read_record(Path(options.run_dir)) if options.run_dir else {}
    # Chat templates that write the date use the date of training, the same in all prompts.
    with TemplateClock(begun_of(record)):
        return _answer(options, folders, record)


def _answer(
    options: argparse.Namespace, folders: Mapping[str, Path], record: Mapping[str, Any]
) -> int:
    folder = resolve_backbone(options.backbone or record["backbone"])
    format = options.backbone_format or record.get("backbone_format")
    BackboneConfig.from_folder(folder)
    tokenizers = _tokenizers(options, folder, folders)
    prompts = [] if options.chat else read_prompts(options, list(tokenizers.values()))
    are_chats = options.chat or prompts[0].is_rendered
    if hint := _hint_at_kind(are_chats, folders):
        print(hint, file=sys.stderr)
    backbone = load_backbone(folder, options.dtype, format)
    base = checkpoint_tensors(folder, backbone.compute_dtype, format)
    answering = list(_answering(tokenizers, folders, backbone, base, are_chats))
    tokenizer = answering[0].tokenizer
    generator = Generator(backbone, tokenizer, max_batch=options.max_batch, keep_backbone=False)
    settings = {
        "max_new_tokens": options.max_new_tokens,
        "sampling": Sampling(options.temperature, options.top_p, options.top_k, options.seed),
    }
    if options.chat:
        chat(generator, options.system, answering, settings)
        return 0
    requests = [
        Request(text, each.spec, each.adapter, prompt.is_rendered, each.stops, each.tokenizer)
        for prompt in prompts
        for text, each in zip(prompt.texts, answering, strict=True)
    ]
    with closing(generator.stream(requests, **settings)) as pieces:
        if options.out:
            with CompletionFile(options.out, prompts, list(tokenizers)) as file:
                file.write(pieces)
        else:
            print_completions(pieces, prompts, list(tokenizers))
    return 0


class Answering(NamedTuple):
    """The backbone, or the backbone with an adapter, as it answers prompts.

    Attributes:
      label: name that is shown beside the answers.
      spec: specification of the adapter; None for the bare backbone.
      adapter: the adapter's arrays; None for the bare backbone.
      tokenizer: renders and tokenizes its prompts, and decodes its answers.
      stops: tokens with which its chat template ends an answer; empty for plain prompts.
    """

    label: str
    spec: Any
    adapter: Any
    tokenizer: Any
    stops: Sequence[int]


def _hint_at_kind(are_chats: bool, folders: Mapping[str, Path]) -> str:
    """A line that names the option with which adapters get the kind of prompts on which they were
    trained; empty if they already get this kind, or their folders do not record the kind."""
    expected = "texts" if are_chats else "chats"
    names = [label for label, folder in folders.items() if trained_on(folder) == expected]
    if not names:
        return ""
    shown = ", ".join(names[:_MOST_HINTED])
    if len(names) > _MOST_HINTED:
        shown += f" and {len(names) - _MOST_HINTED} more"
    were = f"{shown} {'was' if len(names) == 1 else 'were'} trained on {expected}"
    if are_chats:
        return f"hint: {were}, not on chats; use --prompt without --template"
    return f"hint: {were}; use --template, or --chat"


def _tokenizers(
    options: argparse.Namespace, backbone: str, folders: Mapping[str, Path]
) -> dict[str, Any]:
    """By label, the tokenizers of the backbone, if it answers, and of the adapters. Tokenizers with
    the same tokens and chat template are one object."""
    tokenizer = load_tokenizer(backbone)
    if name := options.chat_template:
        template = named_template(tokenizer, name) or read_template(name)
        tokenizer = with_chat_template(tokenizer, template)
    by_label = {BASE: tokenizer} if options.with_base or not folders else {}
    known = {tokenizer_key(tokenizer): tokenizer}
    for label, folder in folders.items():
        candidate = adapter_tokenizer(folder, tokenizer)
        by_label[label] = known.setdefault(tokenizer_key(candidate), candidate)
    if options.chat:
        for label, candidate in by_label.items():
            template_of(candidate, where=label)
    return by_label


def _answering(
    tokenizers: Mapping[str, Any],
    folders: Mapping[str, Path],
    backbone: Backbone,
    base: BaseTensors,
    are_chats: bool,
) -> Iterator[Answering]:
    for label, tokenizer in tokenizers.items():
        spec = adapter = None
        if label in folders:
            spec, adapter = import_adapter(
                folders[label],
                backbone.config,
                backbone.fingerprint,
                base,
                base_model=backbone.name_or_path,
            )
        stops = end_of_turn(tokenizer) if are_chats else ()
        yield Answering(label, spec, adapter, tokenizer, stops)


def _adapter_folders(options: argparse.Namespace) -> dict[str, Path]:
    folders: dict[str, Path] = {}
    for option in options.adapter:
        name, is_named, path = option.partition("=")
        folder = Path(path if is_named else option)
        _refuse_run_directory(folder)
        _add(folders, name if is_named else folder.resolve().name, folder)
    if options.run_dir:
        run_dir = Path(options.run_dir)
        read_record(run_dir)
        of_run = _adapters_of(run_dir)
        if not of_run:
            raise without_adapter(run_dir)
        for folder in of_run:
            _add(folders, folder.name, folder)
    return folders


def _add(folders: dict[str, Path], label: str, folder: Path) -> None:
    if label in folders or label == BASE:
        other = folders.get(label, "the bare backbone")
        raise RunDirectoryError(
            f"{folder}: has the label {label!r}, and so has {other}; "
            f"give it another one: --adapter=NAME={folder}"
        )
    folders[label] = folder


def _adapters_of(run_dir: Path) -> list[Path]:
    return [folder for folder in sorted(run_dir.glob("adapters/*")) if is_adapter_folder(folder)]


def _refuse_run_directory(folder: Path) -> None:
    if not (folder / "run.json").is_file():
        return
    adapters = [str(adapter) for adapter in _adapters_of(folder)]
    hint = f"name one of them: {', '.join(adapters)}" if adapters else "it has no adapter yet"
    raise RunDirectoryError(
        f"{folder}: is a run directory; --run_dir={folder} takes all of its adapters, or {hint}"
    )
