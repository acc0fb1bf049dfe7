"""Preference records: a prompt with a chosen and a rejected answer, in the forms of other trainers.

Tokens and targets are those of TRL 1.16: both answers begin at the place where one of them first
differs from the tokens of the prompt alone, and all tokens from there on are targets.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from .chat import chat_of
from .chat_templates import ChatTemplate, TimeLimit
from .conversations import ASSISTANT, SPEAKERS
from .errors import DataError
from .record_forms import Columns, field_names, history_of, valid_text
from .sources import PREFERENCE, Record, Source, read_records

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The two answers in the forms of TRL, LLaMA-Factory and Axolotl, and in that of OpenAI.
_ANSWERS = ("chosen", "rejected"), ("preferred_output", "non_preferred_output")
# What a prompt or an answer is: a text, or messages.
_Part = str | list[Any]


class PairText(NamedTuple):
    """The texts of a pair.

    Attributes:
      prompt: the text before both answers.
      chosen, rejected: the prompt and one answer. A chat template may render the prompt differently
        when an answer follows.
      has_special_tokens: as in `RenderedText`.
    """

    prompt: str
    chosen: str
    rejected: str
    has_special_tokens: bool

    @property
    def texts(self) -> tuple[str, ...]:
        return self.prompt, self.chosen, self.rejected


class _Pair(NamedTuple):
    """A prompt and its answers: three texts, or three lists of messages."""

    prompt: _Part
    chosen: _Part
    rejected: _Part
    tools: Any = None

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str)


def is_preference(record: Record) -> bool:
    """Whether a record has two answers."""
    fields = record.fields
    return any(answers <= fields.keys() for answers in map(set, _ANSWERS)) or _has_two(fields)


def holds_pairs(source: Source) -> bool:
    """Whether a source holds preference records: its form says so, or with the form "auto" the
    first record has two answers. Raises DataError if the source cannot be read."""
    if source.form != "auto":
        return source.form == PREFERENCE
    columns = Columns(source)
    first = next(read_records(source), None)
    return first is not None and is_preference(columns.renamed(first))


def is_chat(record: Record) -> bool:
    """Whether a chat template renders the pair of a record. DataError if it is no pair."""
    return _pair_of(record).is_chat


def render_pair(
    record: Record,
    tokenizer: "PreTrainedTokenizerBase",
    limit: TimeLimit | None = None,
    treated: Callable[[Record], Record] = lambda record: record,
    source_template: ChatTemplate | None = None,
) -> PairText:
    """Renders a preference record; arguments are as for `chat.render_chat`. EOS ends the texts of
    records without messages.

    Raises:
      DataError: the record is no pair, an answer is missing or has another form than the prompt, or
        the chat template refuses the messages.
    """
    pair = _pair_of(record)
    if not pair.is_chat:
        parts = {name: getattr(pair, name) for name in ("prompt", "chosen", "rejected")}
        parts = treated(record._replace(fields=parts)).fields
        prompt, eos = parts["prompt"], tokenizer.eos_token
        answers = (
            prompt + (parts[name] if parts[name].endswith(eos) else parts[name] + eos)
            for name in ("chosen", "rejected")
        )
        return PairText(prompt, *answers, has_special_tokens=False)
    chat = partial(
        chat_of, tokenizer=tokenizer, limit=limit, treated=treated, source_template=source_template
    )
    texts = []
    for answer in (pair.chosen, pair.rejected):
        fields = {**record.fields, "messages": [*pair.prompt, *answer], "tools": pair.tools}
        whole = chat(record._replace(fields=fields))
        texts.append(valid_text(record, "the rendered chat", whole.rendered()))
    # A system prompt in a field of its own is the first message.
    before = len(whole.messages) - len(pair.rejected)
    prompt = valid_text(record, "the rendered chat", whole.rendered(before, True))
    return PairText(prompt, *texts, has_special_tokens=True)


def answers_begin(prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> int:
    """The number of tokens before both answers, from the tokens of the prompt alone and those of
    the prompt with each answer."""
    return min(_equal_entries(prompt, answer) for answer in answers)


def _equal_entries(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The number of entries that two sequences have in common at their beginning."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _pair_of(record: Record) -> _Pair:
    fields = record.fields
    if not is_preference(record):
        raise DataError(
            f"{record.where}: no pair of answers: expected the fields chosen and rejected, or "
            f"preferred_output and non_preferred_output; found {field_names(record)}"
        )
    if set(_ANSWERS[1]) <= fields.keys():
        pair = _of_openai(record)
    elif _has_two(fields):
        pair = _of_alpaca(record, *fields["output"])
    elif "instruction" in fields:
        pair = _of_alpaca(record, fields["chosen"], fields["rejected"])
    elif isinstance(fields["chosen"], Mapping):
        if not isinstance(fields["rejected"], Mapping):
            raise DataError(f"{record.where}: chosen is a message, and rejected is none")
        answers = [[_message(record, fields[name])] for name in _ANSWERS[0]]
        prompt = [_message(record, each) for each in _list(record, "conversations")]
        pair = _Pair(prompt, *answers, tools=fields.get("tools"))
    else:
        pair = _of_trl(record)
    for name in ("prompt", "chosen", "rejected"):
        part = getattr(pair, name)
        if pair.is_chat and (not isinstance(part, list) or not part):
            raise DataError(
                f"{record.where}: {name} should be a list of messages, with one or more"
            )
        if not pair.is_chat:
            valid_text(record, name, part)
    return pair


def _of_trl(record: Record) -> _Pair:
    fields = record.fields
    chosen, rejected = (fields[name] for name in _ANSWERS[0])
    prompt, tools = fields.get("prompt"), fields.get("tools")
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        raise DataError(
            f"{record.where}: chosen and rejected should both be texts, or both lists of messages; "
            f"found {type(chosen).__name__} and {type(rejected).__name__}"
        )
    # A prompt that is a text repeats the first message of answers that are messages.
    if prompt is None or (isinstance(prompt, str) and isinstance(chosen, list)):
        return _implicit(record, chosen, rejected)._replace(tools=tools)
    return _Pair(prompt, chosen, rejected, tools)


def _implicit(record: Record, chosen: Any, rejected: Any) -> _Pair:
    """Divides two answers that begin with their prompt. A space before the place where two texts
    part belongs to the answers."""
    same = _equal_entries(chosen, rejected)
    if same == min(len(chosen), len(rejected)):
        # An answer is the beginning of the other one, or both are equal.
        same -= 1
    elif isinstance(chosen, str) and same and chosen[same - 1] == " ":
        same -= 1
    if same < 1:
        raise DataError(
            f"{record.where}: chosen and rejected have no common beginning that could be the "
            "prompt; give the prompt in a field 'prompt'"
        )
    return _Pair(chosen[:same], chosen[same:], rejected[same:])


def _of_openai(record: Record) -> _Pair:
    given = record.fields.get("input")
    if not isinstance(given, Mapping) or not isinstance(given.get("messages"), list):
        raise DataError(
            f"{record.where}: field 'input' should be an object with messages, beside "
            "preferred_output and non_preferred_output"
        )
    answers = (record.fields[name] for name in _ANSWERS[1])
    return _Pair(given["messages"], *answers, tools=given.get("tools"))


def _of_alpaca(record: Record, chosen: Any, rejected: Any) -> _Pair:
    """LLaMA-Factory's Alpaca records, which it renders as chats."""
    given = [record.fields.get(name) for name in ("instruction", "input")]
    text = "\n".join(valid_text(record, "instruction and input", part) for part in given if part)
    history = [
        {"role": role, "content": part}
        for turn in history_of(record)
        for role, part in zip(("user", ASSISTANT), turn, strict=True)
    ]
    answers = (
        [{"role": ASSISTANT, "content": valid_text(record, name, part)}]
        for name, part in (("chosen", chosen), ("rejected", rejected))
    )
    return _Pair([*history, {"role": "user", "content": text}], *answers)


def _has_two(fields: Mapping[str, Any]) -> bool:
    """Whether a record has the answers of old files of LLaMA-Factory: a list of the two."""
    output = fields.get("output")
    return "instruction" in fields and isinstance(output, list) and len(output) == 2


def _list(record: Record, name: str) -> list[Any]:
    if not isinstance(value := record.fields.get(name), list):
        raise DataError(f"{record.where}: field {name!r} should be a list of messages")
    return value


def _message(record: Record, value: Any) -> Any:
    """A message of the ShareGPT form as one with role and content."""
    if isinstance(value, Mapping) and "from" in value:
        role = SPEAKERS.get(value["from"], value["from"])
        return {"role": role, "content": value.get("value")}
    return value
