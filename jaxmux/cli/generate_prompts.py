"""The prompts of `jaxmux generate`: from the command line and from files."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxmux.data import DataError, Record, Source, read_records
from jaxmux.data.columns import field_names
from jaxmux.data.conversations import ASSISTANT, read_messages
from jaxmux.data.record_forms import valid_text
from jaxmux.generation import Conversation


class PromptText(NamedTuple):
    """A prompt.

    Attributes:
      text: what the model reads.
      is_rendered: whether a chat template has rendered it.
      fields: what the user gave: "prompt" or "messages".
    """

    text: str
    is_rendered: bool
    fields: dict[str, Any]

    @property
    def shown(self) -> str:
        """The text above completions: the prompt, or the last message after a sign."""
        if not self.is_rendered:
            return self.text
        messages = self.fields.get("messages") or [{"content": self.fields["prompt"]}]
        return f"> {messages[-1].get('content')}"


def read_prompts(options: argparse.Namespace, tokenizer: Any) -> list[PromptText]:
    """All prompts of the command, in their order.

    Args:
      options: options of the command.
      tokenizer: the tokenizer, whose chat template renders messages.

    Raises:
      DataError: a file cannot be read, has no prompts, or the template refuses them.
    """
    found = [_of_text(text, options, tokenizer) for text in options.prompt]
    for path in options.prompts:
        found += _of_file(path, options, tokenizer)
    if len({prompt.is_rendered for prompt in found}) > 1:
        raise DataError(
            "some prompts are chats and some are plain texts; render the texts as chats with "
            "--template, or pass them in another call"
        )
    return found


def _of_file(path: str, options: argparse.Namespace, tokenizer: Any) -> Iterator[PromptText]:
    if path.endswith(".txt"):
        yield from (_of_text(line, options, tokenizer) for line in _lines(path))
        return
    for record in read_records(Source(path)):
        if "messages" in record.fields:
            yield _of_messages(record, options, tokenizer)
        elif "prompt" in record.fields:
            text = valid_text(record, "field 'prompt'", record.fields["prompt"])
            yield _of_text(text, options, tokenizer)
        else:
            raise DataError(
                f"{record.where}: a prompt needs the field 'prompt' or 'messages'; "
                f"found fields: {field_names(record)}"
            )


def _of_messages(record: Record, options: argparse.Namespace, tokenizer: Any) -> PromptText:
    """The chat of a record. The answer at its end, which data for training have, is left out."""
    messages = read_messages(record, "messages", tokenizer.chat_template or "")
    while messages and messages[-1]["role"] == ASSISTANT:
        messages = messages[:-1]
    if not messages:
        raise DataError(f"{record.where}: there is no message before the assistant's")
    for message in messages:
        message.pop("weight", None)
    return _rendered(messages, {"messages": messages}, options, tokenizer)


def _lines(path: str) -> list[str]:
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except FileNotFoundError:
        raise DataError(f"{path}: file not found") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text: {error}") from error
    if not (found := [line for line in lines if line.strip()]):
        raise DataError(f"{path}: no prompts")
    return found


def _of_text(text: str, options: argparse.Namespace, tokenizer: Any) -> PromptText:
    if not options.template:
        return PromptText(text, False, {"prompt": text})
    return _rendered([{"role": "user", "content": text}], {"prompt": text}, options, tokenizer)


def _rendered(messages, fields, options: argparse.Namespace, tokenizer: Any) -> PromptText:
    conversation = Conversation(tokenizer, messages, options.system)
    return PromptText(conversation.prompt(), True, fields)
