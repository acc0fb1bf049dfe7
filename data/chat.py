"""Chat records: rendering by the tokenizer's chat template, and the ranges of assistant
messages."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from os.path import commonprefix
from typing import TYPE_CHECKING, NamedTuple

from .chat_templates import (
    ChatTemplate,
    Rendering,
    TimeLimit,
    TimeLimitExceeded,
    ends_of_turns,
    line_of,
    template_of,
)
from .conversations import ASSISTANT, Messages, Tools, read_messages, read_tools
from .errors import DataError
from .record_forms import RenderedText, TextRange, valid_text
from .sources import Form, LossOn, Record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Words with which answers begin. Most tokenizers join such a word with a space before it.
_FIRST_WORDS = ("I", "The", "a", "is")

_GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def read_chat(
    record: Record,
    tokenizer: "PreTrainedTokenizerBase",
    form: Form,
    source_template: ChatTemplate | None = None,
) -> tuple[ChatTemplate, Messages, Tools | None]:
    """The template that renders a record, and the record's messages and tools, with arguments as
    for `render_chat`. Raises DataError if the messages or tools are malformed, there is no
    template, or the template does not render tools or roles that they contain."""
    tools = read_tools(record, form)
    template = source_template or template_of(tokenizer, tools, record.where)
    if tools and "tools" not in template.text:
        raise DataError(
            f"{record.where}: the record has tools, which {template.name} "
            "does not render; use a tokenizer whose template does, or set Source.chat_template"
        )
    return template, read_messages(record, form, template.text), tools


def render_chat(
    record: Record,
    tokenizer: "PreTrainedTokenizerBase",
    loss_on: LossOn,
    limit: TimeLimit | None = None,
    form: Form = "messages",
    treated: Callable[[Record], Record] = lambda record: record,
    source_template: ChatTemplate | None = None,
) -> RenderedText:
    """Renders a record with messages. The target ranges are the parts of the text that the
    assistant generates.

    If the template marks these parts with `{% generation %}`, the marks are used. Without marks,
    the range of an assistant message begins where the rendering of the earlier messages with the
    generation prompt ends, and ends where the rendering of all messages up to and including this
    one ends. Such a range includes the template's end-of-turn token. Assistant messages whose
    weight is 0 are not targets. If the template writes a generation prompt after the last message
    of the assistant, although none was requested, this prompt is cut off.

    Args:
      record: a record whose field "messages" is a list of {"role", "content"} objects, or a
        ShareGPT record; its field "tools" may describe functions.
      tokenizer: a tokenizer with a chat template, unless `source_template` is given.
      loss_on: as in `Source`; "all" makes the whole text one target range, without the messages
        whose weight is 0.
      limit: time limit for each call of the template; None for no limit.
      form: "messages" or "sharegpt".
      treated: applied to the record after the JSON texts in it have been parsed and before it is
        rendered.
      source_template: the template of the source; None means the tokenizer's.

    Raises:
      DataError: the messages are malformed, the tokenizer has no chat template, the template
        refuses the conversation, or the template has no marks and renders the first messages
        differently when more messages follow.
    """
    chat = chat_of(record, tokenizer, limit, form, treated, source_template)
    spoken = [n for n, message in enumerate(chat.messages) if message["role"] == ASSISTANT]
    ignored = [n for n in spoken if chat.weights[n] == 0]
    last = spoken[-1:] if loss_on == "last_turn" else spoken
    targets = [n for n in last if n not in ignored]
    if loss_on == "all":
        text = chat.rendered()
        ranges = _outside(text, _ranges(chat, spoken, ignored)[1]) if ignored else None
    else:
        text, ranges = _ranges(chat, spoken, targets)
    return RenderedText(
        valid_text(record, "the rendered chat", text), ranges, has_special_tokens=True
    )


def chat_of(
    record: Record,
    tokenizer: "PreTrainedTokenizerBase",
    limit: TimeLimit | None = None,
    form: Form = "messages",
    treated: Callable[[Record], Record] = lambda record: record,
    source_template: ChatTemplate | None = None,
) -> "Chat":
    """The conversation of a record. Arguments and errors are those of `render_chat`."""
    template, messages, tools = read_chat(record, tokenizer, form, source_template)
    treated_record = treated(
        record._replace(fields={**record.fields, "messages": messages, "tools": tools})
    )
    messages, tools = treated_record.fields["messages"], treated_record.fields["tools"]
    weights = [message.pop("weight", 1) for message in messages]
    return Chat(record, tokenizer, template, messages, tools, weights, limit, {})


def joined_prompt(tokenizer: "PreTrainedTokenizerBase", rendering: Rendering) -> str:
    """The last line of a template's generation prompt, if the tokenizer joins the end of this line
    with the beginning of the answer, as most tokenizers do with a space. Generated answers then
    begin with other tokens than the answers of the samples. Empty if the tokenizer does not join
    them, there are no chats, or the template refuses a short test chat."""
    if not rendering.chat_templates:
        return ""
    render = partial(
        tokenizer.apply_chat_template, chat_template=rendering.own_template, tokenize=False
    )
    chat = [{"role": "user", "content": "?"}]
    chats = [[*chat, {"role": ASSISTANT, "content": word}] for word in _FIRST_WORDS]
    try:
        prompt, *texts = render(chat, add_generation_prompt=True), *map(render, chats)
    except Exception:  # the template needs other messages
        return ""
    if not all(text.startswith(prompt) for text in texts):
        return ""
    ids, *behind = tokenizer([prompt, *texts], add_special_tokens=False)["input_ids"]
    is_joined = any(ids_behind[: len(ids)] != ids for ids_behind in behind)
    return prompt.rstrip("\n").rpartition("\n")[2] if is_joined else ""


class Chat(NamedTuple):
    """A conversation with its template and tokenizer. `weights` has a 0 for each message that does
    not count in the loss."""

    record: Record
    tokenizer: "PreTrainedTokenizerBase"
    template: ChatTemplate
    messages: Messages
    tools: Tools | None
    weights: Sequence[float]
    limit: TimeLimit | None
    # The rendered texts, by number of messages and by whether a generation prompt was added.
    texts: dict[tuple[int, bool], str]

    def rendered(self, number: int | None = None, add_generation_prompt: bool = False) -> str:
        """The text of the first `number` messages; None means all messages."""
        number = len(self.messages) if number is None else number
        key = number, add_generation_prompt
        if key not in self.texts:
            text = self._render(self.messages[:number], add_generation_prompt)
            self.texts[key] = text if add_generation_prompt else self._unprompted(text, number)
        return self.texts[key]

    def _render(self, messages: Messages, add_generation_prompt: bool) -> str:
        with self._template_errors():
            return self.tokenizer.apply_chat_template(
                messages,
                tools=self.tools,
                chat_template=self.template.text,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )

    def _unprompted(self, text: str, number: int) -> str:
        """Cuts the generation prompt off the end of the text of the first `number` messages, if the
        template writes a generation prompt after every chat."""
        messages = self.messages[:number]
        if number < 2 or messages[-1]["role"] != ASSISTANT:
            return text
        # Such a template ignores `add_generation_prompt`. It also writes the prompt before the
        # answer, and the text ends differently when the user's next message follows.
        before = self.rendered(number - 1)
        if before != self.rendered(number - 1, True) or not text.startswith(before):
            return text
        try:
            longer = self._render([*messages, {"role": "user", "content": "?"}], False)
        except DataError:
            return text
        # The prompt begins between `start` and `end`. It may begin after `start`, because the
        # message before the answer may end in the same text as the answer.
        end = len(commonprefix([text, longer]))
        same = len(commonprefix([text[::-1], before[::-1]]))
        said = (messages[-1].get("content") or "").strip()
        said_until = text.rfind(said, len(before)) + len(said) if said else len(before)
        start = max(len(text) - same, said_until)
        if end == len(text) or start > end:
            return text
        # The token that ends a turn belongs to the answer, and so does the white space after it.
        special = re.compile("|".join(map(re.escape, self._ends_of_turns(text))) or "(?!)")
        if match := special.search(text, start, end):
            start = match.end()
        while start < end and text[start].isspace():
            start += 1
        return text[:start]

    def _ends_of_turns(self, text: str) -> list[str]:
        """The special tokens that may end a turn, longest first, without the token that begins
        turns."""
        tokens = self.tokenizer.convert_ids_to_tokens(list(ends_of_turns(self.tokenizer)))
        tokens = sorted(set(tokens), key=len, reverse=True)
        heading = text.partition(self.messages[0].get("content") or text)[0]
        spelt = re.findall("|".join(map(re.escape, tokens)) or "(?!)", heading)
        first = next((token for token in spelt if token != self.tokenizer.bos_token), None)
        return [token for token in tokens if token != first]

    def marked(self, number: int | None = None) -> tuple[str, list[TextRange]]:
        """The text of the first `number` messages (None means all) and its generation blocks."""
        # `apply_chat_template(return_assistant_tokens_mask=True)` uses this function too. But its
        # mask extends to the end of the chat if a block ends in a character that the tokenizer
        # drops. The ranges of characters are exact.
        from transformers.utils.chat_template_utils import render_jinja_template

        with self._template_errors():
            (text,), (blocks,) = render_jinja_template(
                # Like `apply_chat_template`, leave out keys whose value is None.
                conversations=[
                    [
                        {k: v for k, v in message.items() if v is not None}
                        for message in self.messages[:number]
                    ]
                ],
                tools=self.tools,
                chat_template=self.template.text,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        return text, [TextRange(*block) for block in blocks]

    @contextmanager
    def _template_errors(self) -> Iterator[None]:
        if self.limit is not None:
            self.limit.restart()
        try:
            yield
        except Exception as error:  # a template is a program and may raise anything
            is_slow = isinstance(error, TimeLimitExceeded)
            raise self.error(
                f"{self.template.name} "
                + (
                    "takes too long"
                    if is_slow
                    else f"refuses the messages: {error}{line_of(error)}"
                )
            ) from error

    def error(self, message: str) -> DataError:
        return DataError(f"{self.record.where}: {message}")


def _ranges(
    chat: Chat, spoken: Sequence[int], wanted: Sequence[int]
) -> tuple[str, tuple[TextRange, ...]]:
    """The text of a chat, and the ranges of the messages with the numbers `wanted`. `spoken` has
    the numbers of all of the assistant's messages."""
    if not _GENERATION_BLOCK.search(chat.template.text):
        text = chat.rendered()
        return text, tuple(_range_by_prefix(chat, text, number) for number in wanted)
    text, blocks = chat.marked()
    if not any(text[start:end].strip() for start, end in blocks):
        raise chat.error(
            f"no target tokens: {chat.template.name} "
            "marks no text of the assistant ({% generation %} stands around nothing)"
        )
    if wanted != spoken:
        blocks = [block for number in wanted for block in _blocks_of(chat, text, blocks, number)]
    return text, tuple(blocks)


def _blocks_of(
    chat: Chat, text: str, blocks: Sequence[TextRange], number: int
) -> Sequence[TextRange]:
    """The generation blocks of one message: those that the message adds to the blocks of earlier
    messages."""
    before = len(chat.marked(number)[1]) if number else 0
    shorter, shorter_blocks = chat.marked(number + 1)
    added = blocks[before : len(shorter_blocks)]
    if [text[start:end] for start, end in added] != [
        shorter[s:e] for s, e in shorter_blocks[before:]
    ]:
        raise chat.error(
            f"{chat.template.name} does not preserve prefixes: it "
            f"marks other text with {{% generation %}} when more messages follow message {number}, "
            "so the parts of single messages cannot be found, which weights and "
            'loss_on="last_turn" need'
        )
    return added


def _range_by_prefix(chat: Chat, text: str, number: int) -> TextRange:
    if number == 0:
        raise chat.error(
            "the conversation begins with an assistant message, which no generation prompt "
            'precedes; begin with a user message or use loss_on="all"'
        )
    before = chat.rendered(number, add_generation_prompt=True)
    through = chat.rendered(number + 1)
    if not (text.startswith(through) and through.startswith(before)):
        raise chat.error(
            f"{chat.template.name} does not preserve prefixes: "
            f"rendered alone, the messages up to message {number} or their generation prompt "
            "differ from their part of the whole chat, so the assistant's tokens cannot be found; "
            'use loss_on="all", loss_on="last_turn" if only the last message is to count, or a '
            "template that marks them with {% generation %}"
        )
    return TextRange(len(before), len(through))


def _outside(text: str, excluded: Sequence[TextRange]) -> tuple[TextRange, ...]:
    """The parts of a text outside some ranges, which are in ascending order."""
    starts = [0, *(part.end for part in excluded)]
    ends = [*(part.start for part in excluded), len(text)]
    return tuple(TextRange(s, e) for s, e in zip(starts, ends, strict=True) if s < e)
