"""Chats whose prompts the tokenizer's chat template renders."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxmux.data import DataError
from jaxmux.data.chat_templates import ends_of_turns, line_of, template_of

_PROBE = "jaxmux"


class Conversation:
    """The messages of a chat, objects with "role" and "content", to which answers are added."""

    def __init__(
        self,
        tokenizer: Any,
        messages: Sequence[Mapping[str, Any]] = (),
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ):
        """Begins a conversation.

        Args:
          tokenizer: a tokenizer with a chat template; for an adapter, from `adapter_tokenizer`.
          system: a first message of the role "system"; ignored if `messages` has such a message.
          tools: descriptions of functions that the assistant may call, as transformers'
            `apply_chat_template` takes them.

        Raises:
          DataError: the tokenizer has no chat template.
        """
        self._template = template_of(tokenizer, tools)
        self._tokenizer, self._tools = tokenizer, tools
        self.messages = [dict(message) for message in messages]
        if system is not None and not any(m["role"] == "system" for m in self.messages):
            self.messages.insert(0, {"role": "system", "content": system})

    def add(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    def prompt(self) -> str:
        """The text that the assistant continues, with its special tokens; DataError if the template
        refuses the messages."""
        try:
            return self._tokenizer.apply_chat_template(
                self.messages,
                tools=self._tools,
                chat_template=self._template.text,
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # a template is a program and may raise anything
            raise DataError(
                f"{self._template.name} refuses the messages: {error}{line_of(error)}"
            ) from error


def end_of_turn(tokenizer: Any) -> list[int]:
    """The token with which a chat template ends a turn of the assistant: the first special token
    behind the turn's text. Empty if there is none, or the tokenizer has no template.

    It may differ from the tokenizer's end-of-sequence token, which some models do not write in
    chats.
    """
    if tokenizer.chat_template is None:
        return []
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
    try:
        # The only template of a tokenizer may be the one for chats with tools.
        template = template_of(tokenizer, tools=[]).text
        text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except Exception:  # the template needs other messages, so the end of a turn is not known
        return []
    behind = text.rpartition(_PROBE)[2]
    ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
    ends = ends_of_turns(tokenizer)
    return [token for token in ids if token in ends][:1]
