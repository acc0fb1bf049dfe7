"""The command `jaxmux generate`: completes prompts with a backbone and, if given, an adapter."""

import argparse

from jaxmux.completion import Request, complete
from jaxmux.data import load_tokenizer
from jaxmux.models import load_backbone
from jaxmux.package_files import resolve_path
from jaxmux.peft import import_adapter


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code, 0. Raises `InputError` for unusable input."""
    folder = resolve_path(options.backbone)
    backbone, tokenizer = load_backbone(folder, options.dtype), load_tokenizer(folder)
    adapter = ()
    if options.adapter:
        adapter = import_adapter(options.adapter, backbone.config, backbone.fingerprint)
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
