"""The options of `jaxmux generate`. This module does not import JAX, so that `--help` is fast."""

import argparse

from .option_parsing import count, in_range, not_negative, path, seed

_top_p = in_range(float, 1e-9, 1, "a number in (0, 1]")
_top_k = in_range(int, 0, 2**31, "an integer of at least 0")


def add_generate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backbone",
        metavar="DIR",
        help="checkpoint folder; jaxmux:demo/base is the bundled one; default with --run_dir: "
        "that of the run",
    )
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="[NAME=]DIR",
        help="adapter folder, and its label in the output; may be repeated; default: the bare "
        "backbone",
    )
    parser.add_argument("--run_dir", metavar="DIR", help="take all adapters of this run directory")
    parser.add_argument(
        "--with_base", action="store_true", help="let the bare backbone answer, too"
    )
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="passed as it is, without the chat template; may be repeated",
    )
    prompts.add_argument(
        "--prompts",
        action="append",
        default=[],
        metavar="FILE",
        help="a .txt file with a prompt in each line, or a .jsonl file (or another kind that "
        "training reads) whose records have the field prompt, messages or conversations "
        "(ShareGPT); may be repeated",
    )
    prompts.add_argument(
        "--template", action="store_true", help="render each prompt as a user's message of a chat"
    )
    prompts.add_argument(
        "--chat_template",
        metavar="FILE",
        help="chat template in place of that of the backbone's tokenizer, or the name of one of "
        "several templates that it has; adapters that bring one keep it",
    )
    prompts.add_argument("--system", metavar="TEXT", help="the system's message of every chat")
    prompts.add_argument(
        "--chat", action="store_true", help="chat: read messages from the terminal and answer them"
    )
    prompts.add_argument(
        "--out",
        type=path,
        metavar="FILE",
        help="write the completions to this JSON-lines file",
    )
    tokens = parser.add_argument_group("tokens")
    tokens.add_argument("--max_new_tokens", type=count, metavar="N", help="default: 64; chats: 512")
    tokens.add_argument(
        "--temperature",
        type=not_negative,
        default=0.0,
        help="0 always takes the most likely token; default: 0",
    )
    tokens.add_argument(
        "--top_p",
        type=_top_p,
        default=1.0,
        metavar="P",
        help="draw from the most likely tokens whose probabilities add up to P; default: 1, all",
    )
    tokens.add_argument(
        "--top_k",
        type=_top_k,
        default=0,
        metavar="K",
        help="draw from the K most likely tokens; default: 0, all",
    )
    tokens.add_argument(
        "--seed",
        type=seed,
        default=0,
        help="seed of the first completion's draws; the next ones have the next seeds; default: 0",
    )
    tokens.add_argument(
        "--max_batch",
        type=count,
        default=64,
        metavar="N",
        help="most completions that are computed together; default: 64, or as many as fit",
    )


def check_generate_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exits with a message if the options contradict each other, and fills in defaults."""
    if not options.backbone and not options.run_dir:
        parser.error("--backbone is required, or --run_dir, whose backbone is taken")
    has_prompts = bool(options.prompt or options.prompts)
    if options.chat and (has_prompts or options.out):
        parser.error("--chat reads messages from the terminal; leave --prompt, --prompts and --out")
    if not options.chat and not has_prompts:
        parser.error("give --prompt, --prompts or --chat")
    if options.system and options.prompt and not options.template:
        parser.error("--system is a message of a chat; give --template, --prompts or --chat")
    if options.top_k + (options.top_p < 1) and not options.temperature:
        parser.error("--top_p and --top_k draw tokens; give a --temperature above 0")
    if options.max_new_tokens is None:
        options.max_new_tokens = 512 if options.chat else 64
