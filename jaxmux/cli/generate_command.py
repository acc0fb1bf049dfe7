"""The command `jaxmux generate`: completes prompts with a backbone and, if given, an adapter."""

import argparse
import sys
from collections.abc import Sequence

from jaxmux.completion import Request, complete
from jaxmux.data import DataError, load_tokenizer
from jaxmux.models import BackboneError, load_backbone
from jaxmux.package_files import resolve_path
from jaxmux.peft import AdapterError, import_adapter

from .arguments import generate_options


def main(arguments: Sequence[str]) -> int:
    """Runs the command with these arguments; returns its exit code."""
    return run(generate_options(arguments))


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code: 0, or 2 for input that cannot be used."""
    try:
        folder = resolve_path(options.backbone)
        backbone, tokenizer = load_backbone(folder, options.dtype), load_tokenizer(folder)
        adapter = ()
        if options.adapter:
            adapter = import_adapter(options.adapter, backbone.config)
        requests = [Request(prompt, *adapter) for prompt in options.prompt]
        texts = complete(
            backbone,
            tokenizer,
            requests,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            seed=options.seed,
        )
    except (AdapterError, BackboneError, DataError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    for prompt, text in zip(options.prompt, texts, strict=True):
        print(prompt + text)
    return 0
