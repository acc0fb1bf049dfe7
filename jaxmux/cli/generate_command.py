"""`python -m jaxmux.generate`: completes a prompt with a backbone and, if given, an adapter."""

import argparse
import sys
from collections.abc import Sequence

from jaxmux.completion import Request, complete
from jaxmux.data import DataError, load_tokenizer
from jaxmux.models import BackboneError, load_backbone
from jaxmux.package_files import resolve_path
from jaxmux.peft import AdapterError, import_adapter


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, or 2 for input that cannot be used."""
    options = _parse_arguments(arguments)
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


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jaxmux.generate",
        description="Completes prompts with a backbone and a Hugging Face PEFT adapter.",
    )
    parser.add_argument(
        "--backbone",
        required=True,
        metavar="DIR",
        help="checkpoint folder; jaxmux:demo/base is the bundled one",
    )
    parser.add_argument("--adapter", metavar="DIR", help="PEFT adapter folder; default: none")
    parser.add_argument("--prompt", required=True, action="append", help="may be repeated")
    parser.add_argument("--max_new_tokens", type=int, default=64, help="default: 64")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="default: 0, the likeliest token"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sampling; default: 0")
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "bfloat16", "float32"), help="default: auto"
    )
    options = parser.parse_args(arguments)
    if options.max_new_tokens < 1 or options.temperature < 0:
        parser.error("--max_new_tokens should be at least 1, --temperature not negative")
    return options


if __name__ == "__main__":
    sys.exit(main())
