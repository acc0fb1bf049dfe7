"""Chats: prompts that the tokenizer's chat template renders."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxmux.data import DataError
from jaxmux.data.chat_templates import line_of, template_of
from jaxmux.data.special_text import ends_of_turns

_PROBE = "jaxmux"


class Conversation:
    """The messages of a chat, to which answers are added.

    Attributes:
      messages: objects with "role" and "content", in their order.
    """

    def __init__(
        self,
        tokenizer: Any,
        messages: Sequence[Mapping[str, Any]] = (),
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ):
        """Begins a conversation.

        Args:
          tokenizer: a tokenizer with a chat template. That of an adapter is from
            `adapter_tokenizer`.
          messages: the first messages.
          system: a message of the role "system" before them; None for none, or if there is one
            among them.
          tools: descriptions of functions that the assistant may call, as transformers'
            `apply_chat_template` takes them; None for none.

        Raises:
          DataError: the tokenizer has no chat template.
        """
        self._template = template_of(tokenizer, tools)
        self._tokenizer, self._tools = tokenizer, tools
        self.messages = [dict(message) for message in messages]
        if system is not None and not any(m["role"] == "system" for m in self.messages):
            self.messages.insert(0, {"role": "system", "content": system})

    def add(self, role: str, content: str) -> None:
        """Adds a message behind the others."""
        self.messages.append({"role": role, "content": content})

    def prompt(self) -> str:
        """The text behind which the assistant answers, with its special tokens.

        Raises:
          DataError: the template refuses the messages.
        """
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
    """The tokens with which a chat template ends what the assistant says: the first special token
    behind its text. Empty if there is none, or the tokenizer has no template.

    Some tokenizers have another end-of-sequence token, which the model does not write in chats.

    Args:
      tokenizer: the tokenizer.
    """
    if tokenizer.chat_template is None:
        return []
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
    try:
        # Of several templates, that of chats with tools may be the only one.
        template = template_of(tokenizer, tools=[]).text
        text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except Exception:  # such a template needs other messages, and they say what ends them
        return []
    behind = text.rpartition(_PROBE)[2]
    ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
    ends = ends_of_turns(tokenizer)
    return [token for token in ids if token in ends][:1]
