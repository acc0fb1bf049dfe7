"""Reads the objects of a JSON array one after another, without the whole array in memory."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from .errors import DataError

# Number of characters that are read at once, and the most characters of one element.
_CHUNK = 2**20
_LONGEST = 2**26
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BLANK = re.compile(r"[ \t\r\n]*")


def begins_array(head: bytes) -> bool:
    """Whether JSON text in UTF-8, perhaps with a byte order mark, begins an array."""
    return head.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"[")


def read_array(text: TextIO, path: Path) -> Iterator[tuple[str, Mapping[str, Any] | DataError]]:
    """Yields the location and the fields of each object of an array, or an error instead of the
    fields if an element is not an object. Messages begin with `path` and the number of the element,
    from 1. Raises DataError if the text is not a JSON array, or an element has more than 64 Mi
    characters."""
    array = _Array(text)
    array.take()
    number, separator = 0, ""
    while True:
        character = array.next_character()
        where = f"{path}:{number + 1}"
        if character == "]" and (number == 0 or separator == ""):
            break
        if number and not separator:
            if character != ",":
                what = f"found {character!r}" if character else "the file ends"
                raise DataError(f"{where}: expected ',' or ']' behind element {number}, {what}")
            separator = array.take()
            continue
        element, separator, number = array.element(where), "", number + 1
        if isinstance(element, dict):
            yield where, element
        else:
            kind = type(element).__name__
            yield where, DataError(f"{where}: expected a JSON object, found {kind}")
    array.take()
    if array.next_character():
        raise DataError(f"{path}: there is more text behind the end of the array")


class _Array:
    """The text of an array, of which a part is in memory."""

    def __init__(self, text: TextIO):
        self._text = text
        self._buffer, self._at = "", 0
        self._decoder = json.JSONDecoder()
        self.next_character()

    def next_character(self) -> str:
        """The next character that is not white space, without advancing; empty at the end of the
        text."""
        while True:
            self._at = _BLANK.match(self._buffer, self._at).end()
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._read_on():
                return ""

    def take(self) -> str:
        """Returns the next character and advances past it."""
        self._at += 1
        return self._buffer[self._at - 1]

    def element(self, where: str) -> Any:
        """Returns the next element and advances past it."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._buffer, self._at)
            except (ValueError, RecursionError) as error:
                problem = f"{where}: malformed JSON: {_shown(error, self._at)}"
                if len(self._buffer) - self._at > _LONGEST:
                    raise DataError(f"{problem}, or longer than {_LONGEST} characters") from error
                if not self._read_on():
                    raise DataError(problem) from error
                continue
            length = end - self._at
            # An element that ends where the buffer ends, such as a number, may continue in the
            # file.
            if end < len(self._buffer) or not self._read_on():
                self._at += length
                return value

    def _read_on(self) -> bool:
        """Reads as much as is already in memory, so that a long element is decoded only a few
        times."""
        rest = self._buffer[self._at :]
        chunk = self._text.read(max(_CHUNK, len(rest)))
        self._buffer, self._at = rest + chunk, 0
        return bool(chunk)


def _shown(error: Exception, begin: int) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at character {error.pos - begin + 1}"
    return str(error)
