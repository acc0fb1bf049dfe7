"""Chat records: messages rendered by the tokenizer's chat template, with the assistant's spans."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .errors import DataError
from .records import RenderedText, Span, required_field, valid_text
from .sources import LossOn, Record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def render_chat(
    record: Record, tokenizer: "PreTrainedTokenizerBase", loss_on: LossOn
) -> RenderedText:
    """Renders a "messages" record; the targets are what the assistant generates.

    A template that marks these parts with `{% generation %}` says itself where they are. With any
    other, a turn is what its message adds to the rendering of the messages before it plus the
    generation prompt, and so contains the template's end-of-turn token.

    Raises:
      DataError: the messages are malformed, the tokenizer has no chat template, the template
        refuses the conversation, or it marks nothing and does not preserve prefixes.
    """
    messages = _valid_messages(record)
    template = _chat_template(record, tokenizer)
    if loss_on == "all":
        text = _apply(record, tokenizer, messages)
        spans = None
    elif _GENERATION_BLOCK.search(template):
        text, spans = _render_generation_blocks(record, tokenizer, template, messages)
    else:
        text = _apply(record, tokenizer, messages)
        spans = _spans_by_prefix(record, tokenizer, messages, text)
    return RenderedText(
        valid_text(record, "the rendered chat", text), spans, has_special_tokens=True
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
    # Columnar files give every message the fields of all, null where absent; templates print them.
    return [{k: v for k, v in message.items() if v is not None} for message in messages]


def _chat_template(record: Record, tokenizer: "PreTrainedTokenizerBase") -> str:
    if tokenizer.chat_template is None:
        raise DataError(
            f"{record.where}: 'messages' records need a chat template, and the tokenizer "
            f"{tokenizer.name_or_path} has none"
        )
    return tokenizer.get_chat_template()


def _apply(
    record: Record,
    tokenizer: "PreTrainedTokenizerBase",
    messages: Messages,
    add_generation_prompt: bool = False,
) -> str:
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:  # a template is a program, free to fail in any way
        raise _refusal(record, tokenizer, error) from error


def _render_generation_blocks(
    record: Record, tokenizer: "PreTrainedTokenizerBase", template: str, messages: Messages
) -> tuple[str, tuple[Span, ...]]:
    # `apply_chat_template(return_assistant_tokens_mask=True)` renders by this very function, but
    # its token mask runs on to the end of the chat where a block ends in a character that the
    # tokenizer drops. The character spans are exact.
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        (text,), (blocks,) = render_jinja_template(
            conversations=[messages],
            chat_template=template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
    except Exception as error:  # a template is a program, free to fail in any way
        raise _refusal(record, tokenizer, error) from error
    return text, tuple(Span(*block) for block in blocks)


def _spans_by_prefix(
    record: Record, tokenizer: "PreTrainedTokenizerBase", messages: Messages, text: str
) -> tuple[Span, ...]:
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if number == 0:
            raise DataError(
                f"{record.where}: the conversation begins with an assistant message, which no "
                'generation prompt precedes; begin with a user message or use loss_on="all"'
            )
        before = _apply(record, tokenizer, messages[:number], add_generation_prompt=True)
        through = _apply(record, tokenizer, messages[: number + 1])
        if not (text.startswith(through) and through.startswith(before)):
            raise DataError(
                f"{record.where}: the chat template of {tokenizer.name_or_path} does not preserve "
                f"prefixes: rendered alone, the messages up to message {number} or their "
                "generation prompt differ from their part of the whole chat, so the assistant's "
                'tokens cannot be found; use loss_on="all", or a template that marks them with '
                "{% generation %}"
            )
        spans.append(Span(len(before), len(through)))
    return tuple(spans)


def _refusal(record: Record, tokenizer: "PreTrainedTokenizerBase", error: Exception) -> DataError:
    return DataError(
        f"{record.where}: the chat template of {tokenizer.name_or_path} refuses the messages: "
        f"{error}"
    )
