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
    settings: Mapping[str, Any],
) -> None:
    """Reads messages of the user, and prints the answers of each adapter in turn. Every adapter has
    a separate conversation with its own answers.

    Messages that do not come from a terminal are also printed, so that the output is complete.

    Args:
      system: the system's message; None for none.
      answering: objects with the fields of `Answering`. Their tokenizers have chat templates.
      settings: keyword arguments of `Generator.stream`.
    """

    def begun() -> list[Conversation]:
        return [Conversation(each.tokenizer, (), system) for each in answering]

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
            answers = _answer(generator, conversations, answering, settings)
        except DataError as error:
            # The conversation is too long, or the template refuses the message.
            print(f"error: {escaped(str(error), keep='\n')}", file=sys.stderr)
            conversations = begun()
            continue
        for conversation, answer in zip(conversations, answers, strict=True):
            # The template puts white space around each message, so the answer is stored without it.
            conversation.add("assistant", answer.strip())


def _answer(generator, conversations, answering, settings) -> list[str]:
    """Prints the answers to the last messages and returns them. If the user stops them, returns the
    parts that were printed."""
    requests = [
        Request(conversation.prompt(), each.spec, each.adapter, True, each.stops, each.tokenizer)
        for conversation, each in zip(conversations, answering, strict=True)
    ]
    answers, started = [""] * len(requests), -1
    try:
        with closing(generator.stream(requests, **settings)) as pieces:
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
        # Only LF and CRLF end a line, and a file may begin with a byte order mark.
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
