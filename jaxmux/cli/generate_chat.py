"""`jaxmux generate --chat`: a conversation in the terminal, with one or several adapters."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from io import TextIOWrapper
from typing import Any

from jaxmux.data import DataError
from jaxmux.generation import Conversation, Generator, Request
from jaxmux.printable import escaped

from .generate_output import in_order

HINT = "/new begins another conversation; Ctrl-C stops an answer, Ctrl-D ends the chat"
_NEW = "/new"
_PROMPT = "> "


def chat(
    generator: Generator,
    system: str | None,
    answering: Sequence[Any],
    given: Mapping[str, Any],
) -> None:
    """Reads messages of the user, and prints the answers of each adapter in turn. Every adapter has
    a conversation of its own, with its own answers.

    Messages that do not come from a terminal are printed too, so that the output can be read.

    Args:
      generator: what generates.
      system: the system's message, or None.
      answering: what answers, with the fields of `Answering`. Their tokenizers have chat templates.
      given: keyword arguments of `Generator.stream`.
    """

    def begun() -> list[Conversation]:
        return [Conversation(own.tokenizer, (), system) for own in answering]

    conversations = begun()
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(HINT)
    for text in _lines():
        if not is_terminal:
            print(f"{_PROMPT}{text}", flush=True)
        if text == _NEW:
            conversations = begun()
            continue
        for conversation in conversations:
            conversation.add("user", text)
        try:
            answers = _answer(generator, conversations, answering, given)
        except DataError as error:
            # The conversation is too long, or the template refuses the message.
            print(f"error: {escaped(str(error), keep='\n')}", file=sys.stderr)
            conversations = begun()
            continue
        for conversation, answer in zip(conversations, answers, strict=True):
            # White space around answers is the template's, which puts it around each message.
            conversation.add("assistant", answer.strip())


def _answer(generator, conversations, answering, given) -> list[str]:
    """Prints the answers to the last messages; returns those that have been printed if the user
    stops them."""
    requests = [
        Request(conversation.prompt(), own.spec, own.adapter, True, own.stops, own.tokenizer)
        for conversation, own in zip(conversations, answering, strict=True)
    ]
    answers, started = [""] * len(requests), -1
    try:
        with closing(generator.stream(requests, **given)) as pieces:
            for piece in in_order(pieces, len(requests)):
                if piece.request != started and len(requests) > 1:
                    print(f"[{answering[piece.request].label}]")
                started = piece.request
                answers[piece.request] += piece.text
                print(piece.text, end="\n" if piece.is_last else "", flush=True)
    except KeyboardInterrupt:
        print("\n(stopped)")
    return answers


def _lines() -> Iterator[str]:
    """The messages of the user, until the input ends."""
    is_terminal = sys.stdin.isatty()
    if isinstance(sys.stdin, TextIOWrapper) and not is_terminal:
        # Only LF and CRLF end lines, and a file may begin with a byte order mark.
        sys.stdin.reconfigure(encoding="utf-8-sig", newline="\n")
    while True:
        try:
            text = input(_PROMPT if is_terminal else "").strip()
        except EOFError:
            if is_terminal:
                print()
            return
        if text:
            yield text
