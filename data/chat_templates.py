"""The templates that render chats: the tokenizer's, or `Source.chat_template`. This module also has
the time that templates read, a limit on the time that they take, and a record of how a task's data
was rendered.

The text of records may spell a special token of the tokenizer, such as "<|im_end|>": `SpecialText`
counts or escapes such text.
"""

import ctypes
import re
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from .conversations import Tools
from .errors import DataError
from .sources import Record, Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SUFFIX = ".jinja"
_BYTE_ORDER_MARK = "\ufeff"
# If a tokenizer has several templates, transformers takes the first name for chats with tools, and
# the second name for other chats.
_FOR_TOOLS, _DEFAULT = "tool_use", "default"


class ChatTemplate(NamedTuple):
    """A chat template: its text in Jinja, and its name in error messages."""

    text: str
    name: str


class Rendering(NamedTuple):
    """How records became text. An adapter that was trained on them expects prompts of this kind.

    Attributes:
      texts: whether some of the records are not chats, so that no template rendered them.
      chat_templates: the different templates that rendered chats, in the order of the sources; None
        means the tokenizer's template. Empty if there are no chats.
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
        parts = list(parts)
        templates = dict.fromkeys(template for part in parts for template in part.chat_templates)
        date = next((part.date for part in parts if part.date), "")
        return cls(any(part.texts for part in parts), tuple(templates), date)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Rendering":
        """The inverse of `_asdict`, after JSON has turned the tuple into a list."""
        date = fields.get("date", "")
        return cls(bool(fields["texts"]), tuple(fields["chat_templates"]), date)


class TemplateClock:
    """Stops the time that chat templates read in this thread, for example by `strftime_now`. The
    same templates then always render the same chats in the same way.

    Attributes:
      date: the time that templates read, without a time zone.
      was_read: whether a template has read the time since the clock was entered.
    """

    def __init__(self, date: datetime | None = None):
        """Makes a stopped clock. If `date` is None, it has the time of the clock that was entered
        before it, or the present time if there is none."""
        around = _CLOCK.get()
        self.date = date or (around.date if around else datetime.now())
        self.was_read = False

    def __enter__(self) -> "TemplateClock":
        # transformers gives templates a function that reads the time from this class.
        from transformers.utils import chat_template_utils

        chat_template_utils.datetime = _TemplateTime
        self._token = _CLOCK.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _CLOCK.reset(self._token)


_CLOCK: ContextVar[TemplateClock | None] = ContextVar("chat template clock", default=None)


class _TemplateTime(datetime):
    """Reads the time of the clock that was entered last, or the present time if there is none."""

    @classmethod
    def now(cls, tz=None):
        if (clock := _CLOCK.get()) is None:
            return datetime.now(tz)
        clock.was_read = True
        return clock.date


class TimeLimitExceeded(Exception):
    """Code under a `TimeLimit` took too long."""


class TimeLimit:
    """Raises `TimeLimitExceeded` in the thread that takes too long between two calls of `restart`.

    It can stop only Python code, for example the code that Jinja makes from a template. Use it as a
    context manager, any number of times, in the thread that runs the code.
    """

    def __init__(self, seconds: float):
        """`seconds` is the longest time from one call of `restart` to the next, or to the end."""
        self.seconds = seconds
        self._lock = threading.Lock()

    def __enter__(self) -> "TimeLimit":
        self._thread, self._ended = threading.get_ident(), threading.Event()
        self.restart()
        threading.Thread(target=self._watch, args=(self._ended,), daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: object, trace: TracebackType | None) -> None:
        with self._lock:  # Nothing is raised after this block.
            self._ended.set()

    def restart(self) -> None:
        self._deadline = time.monotonic() + self.seconds

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(max(0.01, self._deadline - time.monotonic())):
            with self._lock:
                if not ended.is_set() and time.monotonic() > self._deadline:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(self._thread), ctypes.py_object(TimeLimitExceeded)
                    )
                    self.restart()


def template_file(source: Source) -> str | None:
    """The file that `Source.chat_template` names; None if it is None or the text of a template."""
    template = source.chat_template
    if template is None or template.endswith(_SUFFIX):
        return template
    try:
        return template if Path(template).is_file() else None
    except (OSError, ValueError):  # too long for a path, as texts are
        return None


def own_template(
    source: Source, tokenizer: "PreTrainedTokenizerBase | None" = None
) -> ChatTemplate | None:
    """The template that `Source.chat_template` gives, or names among several templates of the
    tokenizer; None means the tokenizer's default template.

    Args:
      source: only its `path` and `chat_template` are used.
      tokenizer: the tokenizer; None if it has no templates that a source can name.

    Raises:
      DataError: the file cannot be read, or the text is not a Jinja template. The message names the
        line.
    """
    if source.chat_template is None:
        return _without_mark(tokenizer) if tokenizer else None
    if tokenizer and (named := named_template(tokenizer, source.chat_template)):
        return named
    try:
        if (file := template_file(source)) is not None:
            return read_template(file)
        text = source.chat_template.removeprefix(_BYTE_ORDER_MARK)
        return compiled(ChatTemplate(text, "the chat template of the source"))
    except DataError as error:
        raise DataError(f"{source.path}: chat_template: {error}") from error


def _without_mark(tokenizer: "PreTrainedTokenizerBase") -> ChatTemplate | None:
    """The tokenizer's template without its byte order mark, which editors do not show and
    transformers would render; None if it has no such mark. Like a template of the source, it is
    written beside the adapter."""
    text = tokenizer.chat_template
    if not isinstance(text, str) or not text.startswith(_BYTE_ORDER_MARK):
        return None
    return template_of(tokenizer)


def named_template(tokenizer: "PreTrainedTokenizerBase", name: str) -> ChatTemplate | None:
    """The template of this name, if the tokenizer has several templates; None if there is none."""
    templates = tokenizer.chat_template
    if not isinstance(templates, dict) or name not in templates:
        return None
    text = templates[name].removeprefix(_BYTE_ORDER_MARK)
    return ChatTemplate(text, f"the chat template {name!r} of {tokenizer.name_or_path}")


def read_template(file: str | Path) -> ChatTemplate:
    """Reads a Jinja template from a file, without a byte order mark at its beginning. Raises
    DataError if the file cannot be read or does not hold a Jinja template; the message names the
    line."""
    try:
        return compiled(ChatTemplate(Path(file).read_text(encoding="utf-8-sig"), str(file)))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: no chat template can be read: {error}") from error


def compiled(template: ChatTemplate) -> ChatTemplate:
    """Returns the template if it compiles as Jinja and can be written to a file. Otherwise raises
    DataError; the message names the line."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        # The template must be valid UTF-8, because it is written to a file beside adapters.
        template.text.encode()
        # Without conversations, the template is only compiled.
        render_jinja_template(conversations=[], chat_template=template.text)
    except Exception as error:  # users choose the template, and Jinja may raise anything
        raise DataError(f"{template.name}: {error}{line_of(error)}") from error
    return template


def template_of(
    tokenizer: "PreTrainedTokenizerBase", tools: Tools | None = None, where: str = ""
) -> ChatTemplate:
    """The chat template of a tokenizer.

    Args:
      tools: the tools of a chat, for which the tokenizer may have a separate template.
      where: the record or file that needs the template, for error messages; may be empty.

    Raises:
      DataError: the tokenizer has no chat template, or has several templates without a default one.
    """
    before = where and f"{where}: "
    if tokenizer.chat_template is None:
        raise DataError(
            f"{before}a chat needs a chat template, and the tokenizer "
            f"{tokenizer.name_or_path} has none; name one by Source.chat_template (jaxmux "
            'generate: --chat_template), add "chat_template" to its tokenizer_config.json, or '
            "write prompts (with completions, for training) in place of messages"
        )
    if not isinstance(tokenizer.chat_template, dict):
        text = tokenizer.chat_template.removeprefix(_BYTE_ORDER_MARK)
        return ChatTemplate(text, f"the chat template of {tokenizer.name_or_path}")
    for name in (_FOR_TOOLS,) * (tools is not None) + (_DEFAULT,):
        if named := named_template(tokenizer, name):
            return named
    names = ", ".join(map(repr, sorted(tokenizer.chat_template)))
    raise DataError(
        f"{before}the tokenizer {tokenizer.name_or_path} has several chat templates ({names}), and "
        f"none of them is {_DEFAULT!r}; choose one by its name, or a file with another one, by "
        "Source.chat_template (jaxmux generate: --chat_template)"
    )


def line_of(error: BaseException) -> str:
    """The line of a template in which compiling or rendering it raised an error, in words; empty if
    unknown."""
    line = getattr(error, "lineno", None)
    for frame, number in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == "<template>":
            line = number
    return f" (line {line} of the template)" if line else ""


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> dict[int, str]:
    """The text of every special token of a tokenizer, by id, including tokens that only chat
    templates use, such as the end of a turn."""
    added = tokenizer.added_tokens_decoder.items()
    by_id = {number: token.content for number, token in added if token.special}
    return by_id | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))


def ends_of_turns(tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """The tokens with which a chat template may end a turn of the assistant: special tokens, and
    all other added tokens, because some tokenizers do not mark the end of a turn as special."""
    return special_tokens(tokenizer).keys() | tokenizer.added_tokens_decoder.keys()


class SpecialText:
    """Counts or escapes text that spells a special token, depending on `Source.special_tokens`.

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
        """Counts and returns a record that is not rendered yet; the record is escaped if the source
        says so."""
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
