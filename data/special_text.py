"""Text of records that spells a special token of the tokenizer, such as "<|im_end|>"."""

import re
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from .sources import Record, Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> dict[int, str]:
    """By id, the text of every special token of a tokenizer, also of those that only chat templates
    use, such as the end of a turn.

    Args:
      tokenizer: the tokenizer.
    """
    added = tokenizer.added_tokens_decoder.items()
    found = {token: own.content for token, own in added if own.special}
    return found | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))


def ends_of_turns(tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """The tokens with which a chat template may end what the assistant says: the special ones, and
    others that were added to the tokenizer, because some do not call the end of a turn special.

    Args:
      tokenizer: the tokenizer.
    """
    return special_tokens(tokenizer).keys() | tokenizer.added_tokens_decoder.keys()


class SpecialText:
    """Counts or escapes text that spells a special token, as `Source.special_tokens` says.

    Attributes:
      first: the first special token that was found in a record; empty if there is none.
      records: number of records in which one was found.
    """

    def __init__(self, source: Source, tokenizer: "PreTrainedTokenizerBase"):
        """Finds the special tokens.

        Args:
          source: the source of the records.
          tokenizer: the tokenizer of their text.
        """
        self.first, self.records = "", 0
        self._escape = source.special_tokens == "escape"
        # Of two special tokens, the longer one comes first, because it may begin with the other.
        spelt = sorted(set(special_tokens(tokenizer).values()), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, spelt)) if spelt else r"(?!)")

    def treated(self, record: Record) -> Record:
        """The record, with its special tokens escaped if the source says so.

        Args:
          record: a record that has not been rendered yet.
        """
        if self._escape:
            return record._replace(fields=self._escaped(record.fields))
        if found := self._search(record.fields):
            self.first = self.first or found
            self.records += 1
        return record

    def _search(self, value: Any) -> str:
        match value:
            case str():
                found = self._pattern.search(value)
                return found[0] if found else ""
            case Mapping():
                # Templates render the keys of arguments and of descriptions of tools.
                return next(filter(None, map(self._search, chain(*value.items()))), "")
            case list():
                return next(filter(None, map(self._search, value)), "")
        return ""

    def _escaped(self, value: Any) -> Any:
        match value:
            case str():
                return self._pattern.sub(lambda found: f"{found[0][0]} {found[0][1:]}", value)
            case Mapping():
                return {self._escaped(key): self._escaped(part) for key, part in value.items()}
            case list():
                return [self._escaped(part) for part in value]
        return value
