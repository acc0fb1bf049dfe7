"""From the tokens of a sequence to its text, as far as it is known."""

from collections.abc import Sequence
from typing import Any, NamedTuple

# Tokens of the prompt that are decoded together with the first new ones: decoders of some
# tokenizers drop the space before a text.
_CONTEXT = 4
# What stands for bytes that are no whole character.
_INCOMPLETE = "\ufffd"


class Piece(NamedTuple):
    """New text of a sequence.

    Attributes:
      request: index of the request.
      text: the text behind that of the earlier pieces.
      is_last: whether the sequence has ended.
    """

    request: int
    text: str
    is_last: bool


class TextStream:
    """Turns the tokens of one sequence into text, piece by piece.

    A character may consist of bytes of several tokens. It is held back until it is complete, or the
    sequence ends. The pieces joined are the text of all tokens.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]):
        """Begins behind a prompt.

        Args:
          tokenizer: the tokenizer.
          prompt: the tokens of the prompt, without virtual ones.
        """
        self._tokenizer = tokenizer
        self._tokens = list(prompt[-_CONTEXT:])
        # The text before `_read` is out, and `_shown` characters behind it. Decoding begins at
        # `_start`, so that it is not repeated for all of a long text.
        self._start, self._read, self._shown = 0, len(self._tokens), 0

    def add(self, tokens: Sequence[int], is_last: bool) -> str:
        """The text that new tokens complete.

        Args:
          tokens: the new tokens, without one that ends the sequence.
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
        # Without cleaning up spaces, which would change text that is out already.
        return self._tokenizer.decode(
            self._tokens[self._start : end],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
