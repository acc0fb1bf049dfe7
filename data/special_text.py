"""Text of records that spells a special token of the tokenizer, such as "<|im_end|>"."""

import re
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from .sources import Record, Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> dict[int, str]:
    """The text of every special token of a tokenizer, by id, with those that only chat templates
    use, such as the end of a turn."""
    added = tokenizer.added_tokens_decoder.items()
    by_id = {number: token.content for number, token in added if token.special}
    return by_id | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))


def ends_of_turns(tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """The tokens with which a chat template may end a turn of the assistant: special tokens, and
    all other added tokens, because some tokenizers do not mark the end of a turn as special."""
    return special_tokens(tokenizer).keys() | tokenizer.added_tokens_decoder.keys()


class SpecialText:
    """Counts or escapes text that spells a special token, by `Source.special_tokens`.

    Attributes:
      first: the first special token in the text of a record; empty if there is none.
      records: number of records whose text spells a special token.
    """

    def __init__(self, source: Source, tokenizer: "PreTrainedTokenizerBase"):
        self.first, self.records = "", 0
        self._escape = source.special_tokens == "escape"
        # Longer tokens come first, because a token may begin with another one.
        spelt = sorted(set(special_tokens(tokenizer).values()), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, spelt)) if spelt else r"(?!)")

    def treated(self, record: Record) -> Record:
        """Counts and returns a record, which is not rendered yet; escaped if the source says so."""
        if self._escape:
            return record._replace(fields=self._escaped(record.fields))
        if spelt := self._search(record.fields):
            self.first = self.first or spelt
            self.records += 1
        return record

    def _search(self, value: Any) -> str:
        match value:
            case str():
                match = self._pattern.search(value)
                return match[0] if match else ""
            case Mapping():
                # Templates render the keys of arguments and of descriptions of tools.
                return next(filter(None, map(self._search, chain(*value.items()))), "")
            case list():
                return next(filter(None, map(self._search, value)), "")
        return ""

    def _escaped(self, value: Any) -> Any:
        match value:
            case str():
                return self._pattern.sub(lambda match: f"{match[0][0]} {match[0][1:]}", value)
            case Mapping():
                return {self._escaped(key): self._escaped(part) for key, part in value.items()}
            case list():
                return [self._escaped(part) for part in value]
        return value
