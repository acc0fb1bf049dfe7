"""The output of `jaxmux generate`: completions on the terminal or in a file."""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxmux.atomic_files import holds_object
from jaxmux.generation import Piece

from .generate_prompts import PromptText


def in_order(pieces: Iterable[Piece], requests: int) -> Iterator[Piece]:
    """Reorders the pieces of `requests` requests so that each request follows the one before.
    Pieces of later requests are held back, and then yielded as a single piece."""
    held: dict[int, Piece] = {}
    current = 0
    for piece in pieces:
        if piece.request != current:
            text = held[piece.request].text if piece.request in held else ""
            held[piece.request] = piece._replace(text=text + piece.text)
            continue
        yield piece
        while piece.is_last and current + 1 < requests:
            current += 1
            if (piece := held.pop(current, None)) is None:
                break
            yield piece


def print_completions(
    pieces: Iterable[Piece], prompts: Sequence[PromptText], labels: Sequence[str]
) -> None:
    """Prints every prompt with its completions while they are generated. `pieces` are those of all
    requests; each prompt has one request per label, in order. `labels` name the backbone and the
    adapters that complete the prompts."""
    try:
        _print_in_order(pieces, prompts, labels)
    except KeyboardInterrupt:
        _say("\n")
        raise


def _print_in_order(
    pieces: Iterable[Piece], prompts: Sequence[PromptText], labels: Sequence[str]
) -> None:
    several, total = len(labels) > 1, len(prompts) * len(labels)
    started = -1
    for piece in in_order(pieces, total):
        if piece.request != started:
            started = piece.request
            prompt = prompts[started // len(labels)]
            if several and not started % len(labels):
                _say(f"{prompt.shown}\n")
            if several:
                _say(f"[{labels[started % len(labels)]}]\n")
            elif not prompt.is_rendered:
                _say(prompt.shown)
            elif len(prompts) > 1:
                _say(f"{prompt.shown}\n")
        _say(piece.text)
        if piece.is_last:
            _say("\n")
            if (started + 1) % len(labels) == 0 and started + 1 < total:
                _say("\n")


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def holds_completions(path: Path) -> bool:
    """Whether `CompletionFile` has written this file."""
    return holds_object(path, ("adapter", "completion"))


class CompletionFile:
    """A JSON-lines file with the completions, each with its prompt and its label. If the command is
    stopped, the file keeps the complete ones."""

    def __init__(self, path: Path, prompts: Sequence[PromptText], labels: Sequence[str]):
        """Creates the file. `prompts` and `labels` are as for `print_completions`."""
        self._path, self._prompts, self._labels = path, prompts, labels
        self._file = path.open("w", encoding="utf-8")
        self._written = 0

    def __enter__(self) -> "CompletionFile":
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()
        total = len(self._prompts) * len(self._labels)
        some = "" if self._written == total else f" of {total}"
        print(f"{self._written}{some} completions -> {self._path}")

    def write(self, pieces: Iterable[Piece]) -> None:
        text = ""
        for piece in in_order(pieces, len(self._prompts) * len(self._labels)):
            text += piece.text
            if piece.is_last:
                self._add(piece.request, text)
                text = ""

    def _add(self, request: int, text: str) -> None:
        prompt, label = divmod(request, len(self._labels))
        record = {**self._prompts[prompt].fields, "adapter": self._labels[label]}
        line = json.dumps(record | {"completion": text}, ensure_ascii=False)
        self._file.write(line + "\n")
        self._file.flush()
        self._written += 1
