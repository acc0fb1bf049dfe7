"""How the records of a task became text: by chat templates, or without one."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Rendering(NamedTuple):
    """How records became text. An adapter that was trained on them expects such prompts.

    Attributes:
      texts: whether some of the records are not chats, so that no template rendered them.
      chat_templates: the different templates that rendered chats, in the order of the sources; None
        stands for the tokenizer's template. Empty if there are no chats.
      date: the time that a template has read, in ISO 8601; empty if no template has read it.
    """

    texts: bool = False
    chat_templates: tuple[str | None, ...] = ()
    date: str = ""

    @property
    def own_template(self) -> str | None:
        """The first template that is not the tokenizer's; None if there is none."""
        return next(filter(None, self.chat_templates), None)

    @property
    def kinds(self) -> str:
        """The kinds of records: "chats", "texts" or "chats and texts"; empty without records."""
        names = ["chats"] * bool(self.chat_templates) + ["texts"] * self.texts
        return " and ".join(names)

    @classmethod
    def together(cls, parts: Iterable["Rendering"]) -> "Rendering":
        """The rendering of several sources together."""
        parts = list(parts)
        templates = dict.fromkeys(template for part in parts for template in part.chat_templates)
        date = next((part.date for part in parts if part.date), "")
        return cls(any(part.texts for part in parts), tuple(templates), date)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Rendering":
        """The inverse of `_asdict`, after JSON has turned the tuple into a list."""
        date = fields.get("date", "")
        return cls(bool(fields["texts"]), tuple(fields["chat_templates"]), date)
