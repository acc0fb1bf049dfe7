"""Chat records: rendering by the tokenizer's chat template, and the ranges of assistant turns."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from .errors import DataError
from .record_forms import RenderedText, TextRange, required_field, valid_text
from .sources import LossOn, Record
from .time_limit import TimeLimit, TimeLimitExceeded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]

# The roles that chat templates of public models know. Targets are the messages of the assistant.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_OTHER_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def render_chat(
    record: Record,
    tokenizer: "PreTrainedTokenizerBase",
    loss_on: LossOn,
    limit: TimeLimit | None = None,
) -> RenderedText:
    """Renders a "messages" record; the target ranges are the parts that the assistant generates.

    If the template marks these parts with `{% generation %}`, the marks are used. Without marks,
    the range of an assistant message begins where the rendering of the earlier messages with the
    generation prompt ends, and ends where the rendering of all messages up to and including this
    one ends. Such a range includes the template's end-of-turn token.

    Args:
      record: a record whose field "messages" is a list of {"role", "content"} objects.
      tokenizer: a tokenizer with a chat template.
      loss_on: as in `Source`; "all" makes the whole text one target range.
      limit: time limit of each call of the template; None for no limit.

    Raises:
      DataError: the messages are malformed, the tokenizer has no chat template, the template
        refuses the conversation, or the template has no marks and renders the first messages
        differently when more messages follow.
    """
    messages = _valid_messages(record)
    template = require_chat_template(record, tokenizer)
    if loss_on == "all":
        text = _apply(record, tokenizer, messages, limit)
        ranges = None
    elif _GENERATION_BLOCK.search(template):
        text, ranges = _render_generation_blocks(record, tokenizer, template, messages, limit)
    else:
        text = _apply(record, tokenizer, messages, limit)
        ranges = _ranges_by_prefix(record, tokenizer, messages, text, limit)
    return RenderedText(
        valid_text(record, "the rendered chat", text), ranges, has_special_tokens=True
    )


def _valid_messages(record: Record) -> Messages:
    messages = required_field(record, "messages", "messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise DataError(f"{record.where}: 'messages' must be a non-empty list of messages")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise DataError(
                f"{record.where}: message {number} must be an object with 'role' and 'content', "
                f"found {type(message).__name__}"
            )
        for name in ("role", "content"):
            valid_text(record, f"{name!r} of message {number}", message.get(name))
        if (role := message["role"]) not in ROLES:
            similar = _OTHER_NAMES.get(role) or next(iter(get_close_matches(role, ROLES, 1)), None)
            hint = f"; did you mean {similar!r}?" if similar else ""
            raise DataError(
                f"{record.where}: message {number} has the unknown role {role!r}; the roles are "
                f"{', '.join(ROLES)}{hint}"
            )
    # In columnar files every message has the fields of all messages, with null for absent ones,
    # and some templates would print these nulls.
    return [{k: v for k, v in message.items() if v is not None} for message in messages]


def require_chat_template(record: Record, tokenizer: "PreTrainedTokenizerBase") -> str:
    """The tokenizer's chat template. Raises DataError if it has none.

    Args:
      record: a record that needs the template; the message names it.
      tokenizer: the tokenizer.
    """
    if tokenizer.chat_template is None:
        raise DataError(
            f"{record.where}: 'messages' records need a chat template, and the tokenizer "
            f'{tokenizer.name_or_path} has none; add "chat_template" to its '
            "tokenizer_config.json, or write the records as prompt and completion"
        )
    return tokenizer.get_chat_template()


def _apply(
    record: Record,
    tokenizer: "PreTrainedTokenizerBase",
    messages: Messages,
    limit: TimeLimit | None,
    add_generation_prompt: bool = False,
) -> str:
    with _template_errors(record, tokenizer, limit):
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )


def _render_generation_blocks(
    record: Record,
    tokenizer: "PreTrainedTokenizerBase",
    template: str,
    messages: Messages,
    limit: TimeLimit | None,
) -> tuple[str, tuple[TextRange, ...]]:
    # `apply_chat_template(return_assistant_tokens_mask=True)` calls this function too, but if a
    # block ends in a character that the tokenizer drops, its mask of tokens extends to the end of
    # the chat. The ranges of characters are exact.
    from transformers.utils.chat_template_utils import render_jinja_template

    with _template_errors(record, tokenizer, limit):
        (text,), (blocks,) = render_jinja_template(
            conversations=[messages],
            chat_template=template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
    ranges = tuple(TextRange(*block) for block in blocks)
    if not any(text[start:end].strip() for start, end in ranges):
        raise DataError(
            f"{record.where}: no target tokens: the chat template of {tokenizer.name_or_path} "
            "marks no text of the assistant ({% generation %} stands around nothing)"
        )
    return text, ranges


def _ranges_by_prefix(
    record: Record,
    tokenizer: "PreTrainedTokenizerBase",
    messages: Messages,
    text: str,
    limit: TimeLimit | None,
) -> tuple[TextRange, ...]:
    ranges = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if number == 0:
            raise DataError(
                f"{record.where}: the conversation begins with an assistant message, which no "
                'generation prompt precedes; begin with a user message or use loss_on="all"'
            )
        before = _apply(record, tokenizer, messages[:number], limit, add_generation_prompt=True)
        through = _apply(record, tokenizer, messages[: number + 1], limit)
        if not (text.startswith(through) and through.startswith(before)):
            raise DataError(
                f"{record.where}: the chat template of {tokenizer.name_or_path} does not preserve "
                f"prefixes: rendered alone, the messages up to message {number} or their "
                "generation prompt differ from their part of the whole chat, so the assistant's "
                'tokens cannot be found; use loss_on="all", or a template that marks them with '
                "{% generation %}"
            )
        ranges.append(TextRange(len(before), len(through)))
    return tuple(ranges)


@contextmanager
def _template_errors(
    record: Record, tokenizer: "PreTrainedTokenizerBase", limit: TimeLimit | None
) -> Iterator[None]:
    if limit is not None:
        limit.restart()
    try:
        yield
    except Exception as error:  # a template is a program and may raise anything
        is_slow = isinstance(error, TimeLimitExceeded)
        raise DataError(
            f"{record.where}: the chat template of {tokenizer.name_or_path} "
            + ("takes too long" if is_slow else f"refuses the messages: {error}")
        ) from error
