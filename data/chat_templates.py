"""The template that renders the chats of a source: the tokenizer's, or `Source.chat_template`."""

import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .conversations import Tools
from .errors import DataError
from .sources import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SUFFIX = ".jinja"


class ChatTemplate(NamedTuple):
    """A chat template.

    Attributes:
      text: the template, in Jinja.
      name: what error messages call it.
    """

    text: str
    name: str


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


def own_template(source: Source) -> ChatTemplate | None:
    """The template that a source brings with it; None if it has none.

    Args:
      source: the source; only its `path` and `chat_template` are used.

    Raises:
      DataError: the file cannot be read, or the text is no Jinja template. The message names the
        line.
    """
    if source.chat_template is None:
        return None
    try:
        if (file := template_file(source)) is not None:
            return read_template(file)
        return compiled(ChatTemplate(source.chat_template, "the chat template of the source"))
    except DataError as error:
        raise DataError(f"{source.path}: chat_template: {error}") from error


def read_template(file: str | Path) -> ChatTemplate:
    """Reads a chat template.

    Args:
      file: a file with a Jinja template.

    Raises:
      DataError: the file cannot be read, or holds no Jinja template. The message names the line.
    """
    try:
        return compiled(ChatTemplate(Path(file).read_text(encoding="utf-8"), str(file)))
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
      DataError: the tokenizer has no chat template.
    """
    if tokenizer.chat_template is None:
        raise DataError(
            f"{where and f'{where}: '}a chat needs a chat template, and the tokenizer "
            f"{tokenizer.name_or_path} has none; name one by Source.chat_template (jaxmux "
            'generate: --chat_template), add "chat_template" to its tokenizer_config.json, or '
            "write prompts (with completions, for training) in place of messages"
        )
    name = f"the chat template of {tokenizer.name_or_path}"
    return ChatTemplate(tokenizer.get_chat_template(tools=tools), name)


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
