"""The prompts of `jaxmux generate`: from the command line and from files."""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxmux.data import DataError, Record, Source, read_records
from jaxmux.data.chat import read_chat
from jaxmux.data.conversations import ASSISTANT
from jaxmux.data.record_forms import (
    CONTEXT_FIELDS,
    field_names,
    unread_fields,
    valid_text,
)
from jaxmux.data.sources import Form
from jaxmux.generation import Conversation
from jaxmux.planner.numbers import numbered


class PromptText(NamedTuple):
    """A prompt.

    Attributes:
      texts: for each tokenizer, the text that the model reads.
      is_rendered: whether chat templates have rendered the texts.
      fields: the user's input: "prompt", or "messages" and perhaps "tools".
    """

    texts: tuple[str, ...]
    is_rendered: bool
    fields: Mapping[str, Any]

    @property
    def shown(self) -> str:
        """The text above completions: the prompt, or the last message after ">"."""
        if not self.is_rendered:
            return self.fields["prompt"]
        messages = self.fields.get("messages") or [{"content": self.fields["prompt"]}]
        return f"> {messages[-1].get('content')}"


def read_prompts(options: argparse.Namespace, tokenizers: Sequence[Any]) -> list[PromptText]:
    """All prompts of the command, in order. `tokenizers` has, for each backbone or adapter that
    answers, the tokenizer whose chat template renders messages. Raises DataError if a file cannot
    be read or has no prompts, or a template refuses them."""
    prompts = [_of_text(text, options, tokenizers) for text in options.prompt]
    for path in options.prompts:
        prompts += _of_file(path, options, tokenizers)
    if len({prompt.is_rendered for prompt in prompts}) > 1:
        raise DataError(
            "some prompts are chats and some are plain texts; render the texts as chats with "
            "--template, or pass them in another call"
        )
    return prompts


def _of_file(
    path: str, options: argparse.Namespace, tokenizers: Sequence[Any]
) -> Iterator[PromptText]:
    if path.endswith(".txt"):
        yield from (_of_text(line, options, tokenizers) for line in _lines(path))
        return
    unread = Counter[str]()
    for record in read_records(Source(path)):
        form: Form = "prompt_completion"
        if "messages" in record.fields:
            form = "messages"
            prompt = _of_chat(record, form, options, tokenizers)
        elif "conversations" in record.fields:
            form = "sharegpt"
            prompt = _of_chat(record, form, options, tokenizers)
        elif "prompt" in record.fields:
            text = valid_text(record, "field 'prompt'", record.fields["prompt"])
            prompt = _of_text(text, options, tokenizers)
        else:
            raise DataError(
                f"{record.where}: a prompt needs the field 'prompt', 'messages' or "
                f"'conversations'; found fields: {field_names(record)}"
            )
        yield prompt
        # Records may have other texts, such as the expected answers; they are reported as unread.
        names = unread_fields(record, form, prompt.texts[0])
        unread.update(set(names).intersection(CONTEXT_FIELDS))
    for name, count in unread.most_common():
        print(
            f"warning: {path}: {name!r} of {numbered(count, 'record')} is not read", file=sys.stderr
        )


def _of_chat(
    record: Record, form: Form, options: argparse.Namespace, tokenizers: Sequence[Any]
) -> PromptText:
    """The chat of a record, without the answer at its end that training data has."""
    # Many adapters share a tokenizer, so each tokenizer is used once.
    texts: dict[int, str] = {}
    fields: dict[str, Any] = {}
    for tokenizer in tokenizers:
        if id(tokenizer) in texts:
            continue
        _, messages, tools = read_chat(record, tokenizer, form)
        while messages and messages[-1]["role"] == ASSISTANT:
            messages = messages[:-1]
        if not messages:
            raise DataError(f"{record.where}: there is no message before the assistant's")
        for message in messages:
            message.pop("weight", None)
        conversation = Conversation(tokenizer, messages, options.system, tools)
        texts[id(tokenizer)] = conversation.prompt()
        fields = {"messages": messages} | ({"tools": tools} if tools else {})
    return PromptText(tuple(texts[id(tokenizer)] for tokenizer in tokenizers), True, fields)


def _lines(path: str) -> list[str]:
    try:
        # Only LF and CRLF end a line. Texts may contain other separators, such as U+2028.
        text = Path(path).read_bytes().decode("utf-8-sig")
        lines = [line.removesuffix("\r") for line in text.split("\n")]
    except FileNotFoundError:
        raise DataError(f"{path}: file not found") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text: {error}") from error
    if not (prompts := [line for line in lines if line.strip()]):
        raise DataError(f"{path}: no prompts")
    return prompts


def _of_text(text: str, options: argparse.Namespace, tokenizers: Sequence[Any]) -> PromptText:
    if not options.template:
        return PromptText((text,) * len(tokenizers), False, {"prompt": text})
    message = {"role": "user", "content": text}
    texts = [
        Conversation(tokenizer, [message], options.system).prompt() for tokenizer in tokenizers
    ]
    return PromptText(tuple(texts), True, {"prompt": text})
