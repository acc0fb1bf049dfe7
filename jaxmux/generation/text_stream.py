"""Turns the tokens of a sequence into text while they are written."""

from collections.abc import Sequence
from typing import Any, NamedTuple

# Number of the prompt's tokens that are decoded together with the first new ones, because decoders
# of some tokenizers drop the space before a text.
_CONTEXT = 4
# The character by which decoders replace bytes that are no whole character.
_INCOMPLETE = "\ufffd"


class Piece(NamedTuple):
    """New text of a sequence.

    Attributes:
      request: index of the request.
      text: the text that follows the earlier pieces.
      is_last: whether the sequence has ended.
    """

    request: int
    text: str
    is_last: bool


class TextStream:
    """Turns the tokens of one sequence into text, piece by piece.

    A character may consist of the bytes of several tokens. It is held back until it is complete or
    the sequence ends. All pieces together are the text of all tokens.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]):
        """Begins behind the tokens of a prompt, without virtual tokens."""
        self._tokenizer = tokenizer
        self._tokens = list(prompt[-_CONTEXT:])
        # The text of the tokens before `_read` has been returned, and `_shown` characters behind
        # it. Decoding begins at `_start`, so that a long text is not decoded again and again.
        self._start, self._read, self._shown = 0, len(self._tokens), 0

    def add(self, tokens: Sequence[int], is_last: bool) -> str:
        """The text that new tokens complete.

        Args:
          tokens: the new tokens, without a token that ends the sequence.
          is_last: whether no tokens follow; incomplete characters are then replaced.
        """
        self._tokens += tokens
        known, text = self._decoded(self._read), self._decoded(len(self._tokens))
        new = text[len(known) :]
        whole = new if is_last else new.rstrip(_INCOMPLETE)
        piece = whole[self._shown :]
        if whole == new:
            self._start, self._read, self._shown = self._read, len(self._tokens), 0
        else:
            self._shown = len(whole)
        return piece

    def _decoded(self, end: int) -> str:
        # Spaces are not cleaned up, because that could change text that was returned before.
        return self._tokenizer.decode(
            self._tokens[self._start : end],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
