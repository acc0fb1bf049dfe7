"""The template that renders the chats of a source: the tokenizer's, or `Source.chat_template`."""

import traceback
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .conversations import Tools
from .errors import DataError
from .sources import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SUFFIX = ".jinja"
_BYTE_ORDER_MARK = "\ufeff"
# By these names transformers takes one of several templates of a tokenizer: for chats with tools,
# and for others.
_FOR_TOOLS, _DEFAULT = "tool_use", "default"


class ChatTemplate(NamedTuple):
    """A chat template.

    Attributes:
      text: the template, in Jinja.
      name: what error messages call it.
    """

    text: str
    name: str


class TemplateClock:
    """Stops the time that chat templates read, as by `strftime_now`, in this thread: the same
    templates then render the same chats alike, whenever that is.

    Attributes:
      date: the time that templates read, without a time zone.
      was_read: whether one has read it since the clock was entered.
    """

    def __init__(self, date: datetime | None = None):
        """Makes a clock that stands.

        Args:
          date: the time; None for that of the clock around this one, or for now.
        """
        around = _CLOCK.get()
        self.date = date or (around.date if around else datetime.now())
        self.was_read = False

    def __enter__(self) -> "TemplateClock":
        # Templates get no other function than that of transformers, which asks this class.
        from transformers.utils import chat_template_utils

        chat_template_utils.datetime = _TemplateTime
        self._token = _CLOCK.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _CLOCK.reset(self._token)


_CLOCK: ContextVar[TemplateClock | None] = ContextVar("chat template clock", default=None)


class _TemplateTime(datetime):
    """The time of the clock that was entered last, or the present time."""

    @classmethod
    def now(cls, tz=None):
        if (clock := _CLOCK.get()) is None:
            return datetime.now(tz)
        clock.was_read = True
        return clock.date


def template_file(source: Source) -> str | None:
    """The file that `Source.chat_template` names; None if it is the text of a template, or None.

    Args:
      source: the source.
    """
    given = source.chat_template
    if given is None or given.endswith(_SUFFIX):
        return given
    try:
        return given if Path(given).is_file() else None
    except (OSError, ValueError):  # too long for a path, as texts are
        return None


def own_template(
    source: Source, tokenizer: "PreTrainedTokenizerBase | None" = None
) -> ChatTemplate | None:
    """The template that a source brings with it, or that it names among several ones of the
    tokenizer; None if the tokenizer's usual one serves.

    Args:
      source: the source; only its `path` and `chat_template` are used.
      tokenizer: the tokenizer; None if it has no templates that a source can name.

    Raises:
      DataError: the file cannot be read, or the text is no Jinja template. The message names the
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
    """The tokenizer's template without the byte order mark at its beginning, which no editor shows
    and transformers would render; None if there is no mark. Like a source's own template, it goes
    with the adapter."""
    text = tokenizer.chat_template
    if not isinstance(text, str) or not text.startswith(_BYTE_ORDER_MARK):
        return None
    return template_of(tokenizer)


def named_template(tokenizer: "PreTrainedTokenizerBase", name: str) -> ChatTemplate | None:
    """One of several templates of a tokenizer; None if it has none of this name.

    Args:
      tokenizer: the tokenizer.
      name: name of the template.
    """
    templates = tokenizer.chat_template
    if not isinstance(templates, dict) or name not in templates:
        return None
    text = templates[name].removeprefix(_BYTE_ORDER_MARK)
    return ChatTemplate(text, f"the chat template {name!r} of {tokenizer.name_or_path}")


def read_template(file: str | Path) -> ChatTemplate:
    """Reads a chat template, without the byte order mark that may be before it.

    Args:
      file: a file with a Jinja template.

    Raises:
      DataError: the file cannot be read, or holds no Jinja template. The message names the line.
    """
    try:
        return compiled(ChatTemplate(Path(file).read_text(encoding="utf-8-sig"), str(file)))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: no chat template can be read: {error}") from error


def compiled(template: ChatTemplate) -> ChatTemplate:
    """The template, if it is a Jinja template that a file can hold. If it is none, DataError, which
    names the line."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        # Adapters bring their template along as a file.
        template.text.encode()
        # Without conversations, the template is only compiled.
        render_jinja_template(conversations=[], chat_template=template.text)
    except Exception as error:  # templates come from anywhere, and Jinja may raise anything
        raise DataError(f"{template.name}: {error}{line_of(error)}") from error
    return template


def template_of(
    tokenizer: "PreTrainedTokenizerBase", tools: Tools | None = None, where: str = ""
) -> ChatTemplate:
    """The chat template of a tokenizer.

    Args:
      tokenizer: the tokenizer.
      tools: the tools of a chat, for which the tokenizer may have a template of its own.
      where: what needs the template, as the message names it; may be empty.

    Raises:
      DataError: the tokenizer has no chat template, or several ones of which none is the usual one.
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
        if found := named_template(tokenizer, name):
            return found
    names = ", ".join(map(repr, sorted(tokenizer.chat_template)))
    raise DataError(
        f"{before}the tokenizer {tokenizer.name_or_path} has several chat templates ({names}), and "
        f"none of them is {_DEFAULT!r}; choose one by its name, or a file with another one, by "
        "Source.chat_template (jaxmux generate: --chat_template)"
    )


def line_of(error: BaseException) -> str:
    """The line of a template in which an error was raised, in words; empty if it is not known.

    Args:
      error: what compiling or rendering the template has raised.
    """
    line = getattr(error, "lineno", None)
    for frame, number in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == "<template>":
            line = number
    return f" (line {line} of the template)" if line else ""
