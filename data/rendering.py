"""How the records of a task became text: by chat templates, or without one."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Rendering(NamedTuple):
    """How records became text. An adapter that was trained on them expects prompts of this kind.

    Attributes:
      texts: whether some of the records are no chats, so that no template rendered them.
      chat_templates: the different templates that rendered chats, in the order of the sources; None
        for that of the tokenizer. Empty if there are no chats.
      date: the time that a template has read, in the form of ISO 8601; empty if none has.
    """

    texts: bool = False
    chat_templates: tuple[str | None, ...] = ()
    date: str = ""

    @property
    def own_template(self) -> str | None:
        """The first template that is not that of the tokenizer; None if there is none."""
        return next(filter(None, self.chat_templates), None)

    @property
    def kinds(self) -> str:
        """The kinds of records: "chats", "texts" or "chats and texts"; empty without records."""
        found = ["chats"] * bool(self.chat_templates) + ["texts"] * self.texts
        return " and ".join(found)

    @classmethod
    def together(cls, parts: Iterable["Rendering"]) -> "Rendering":
        """The rendering of several sources."""
        parts = list(parts)
        templates = dict.fromkeys(own for part in parts for own in part.chat_templates)
        date = next((part.date for part in parts if part.date), "")
        return cls(any(part.texts for part in parts), tuple(templates), date)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Rendering":
        """The inverse of `_asdict`, after JSON has made the tuple a list."""
        date = fields.get("date", "")
        return cls(bool(fields["texts"]), tuple(fields["chat_templates"]), date)
