"""Records of preferences: a prompt with a chosen and a rejected answer, or with an answer that is
labelled as good or bad, in the forms of other trainers.

Tokens and targets are those of TRL 1.16: an answer begins where its tokens first differ from those
of the prompt alone, the two answers of a pair where one of them does, and all tokens from there on
are targets.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .chat import chat_of
from .chat_templates import ChatTemplate, TimeLimit
from .conversations import ASSISTANT, SPEAKERS
from .errors import DataError
from .record_forms import Columns, field_names, history_of, valid_text
from .sources import LABELLED, PREFERENCE, Record, Records, Source, read_records
from .stored_samples import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The number of a sample that says whether its answer is good (1) or bad (0).
LABEL = "label"
# The two answers in the forms of TRL, LLaMA-Factory and Axolotl, in those of Argilla and OpenAI.
_ANSWERS = (
    ("chosen", "rejected"),
    ("chosen_response", "rejected_response"),
    ("preferred_output", "non_preferred_output"),
)
# The label of an answer in the forms of TRL and Axolotl, and in those of LLaMA-Factory.
_LABELS = (LABEL, "kto_tag")
# Fields with a question that a chat template renders, and fields with the messages of a prompt.
_QUESTIONS, _CHATS = ("instruction", "input", "question"), ("conversations", "messages")
# What a prompt or an answer is: a text, or messages.
_Part = str | list[Any]


class AnswerTexts(NamedTuple):
    """The texts of a record.

    Attributes:
      prompt: the text before the answers.
      answers: the prompt and one answer; of a pair, the chosen one comes first. A chat template may
        render the prompt differently when an answer follows.
      labels: for each answer, whether it is good.
      has_special_tokens: as in `RenderedText`.
    """

    prompt: str
    answers: tuple[str, ...]
    labels: tuple[bool, ...]
    has_special_tokens: bool

    @property
    def texts(self) -> tuple[str, ...]:
        return self.prompt, *self.answers


class _Answered(NamedTuple):
    """A prompt and its answers, by name: texts, or lists of messages. `labels` are as in
    `AnswerTexts`."""

    prompt: _Part
    answers: Mapping[str, _Part]
    labels: tuple[bool, ...] = (True, False)
    tools: Any = None

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str)


def kind_of_records(source: Source) -> Records:
    """What the records of a source are if they have answers or texts, pairs or labels: its form
    says so, or with the form "auto" the fields of the first record. Raises DataError if the source
    cannot be read."""
    if source.form != "auto":
        return {PREFERENCE: "pairs", LABELLED: "labels"}.get(source.form, "answers")
    columns = Columns(source)
    first = next(read_records(source), None)
    if first is None:
        return "answers"
    fields = columns.renamed(first).fields
    is_labelled = any(isinstance(fields.get(name), bool) for name in _LABELS)
    return "pairs" if _answer_fields(fields) else "labels" if is_labelled else "answers"


def is_chat(record: Record, kind: Records) -> bool:
    """Whether a chat template renders a record, which is one of pairs or of labels. DataError if it
    is none."""
    return _answered(record, kind).is_chat


def render_answers(
    record: Record,
    kind: Records,
    tokenizer: "PreTrainedTokenizerBase",
    limit: TimeLimit | None = None,
    treated: Callable[[Record], Record] = lambda record: record,
    source_template: ChatTemplate | None = None,
) -> AnswerTexts:
    """Renders a record of pairs or labels, which `kind` names; a pair is two labelled answers too.
    Other arguments are as for `chat.render_chat`. EOS ends the texts of records without messages.

    Raises:
      DataError: the record is none of this kind, an answer is missing or has another form than the
        prompt, a label is no boolean, or the chat template refuses the messages.
    """
    answered = _answered(record, kind)
    if not answered.is_chat:
        parts = treated(record._replace(fields={"prompt": answered.prompt, **answered.answers}))
        prompt, *answers = parts.fields.values()
        eos = tokenizer.eos_token
        ended = (answer if answer.endswith(eos) else answer + eos for answer in answers)
        texts = tuple(prompt + answer for answer in ended)
        return AnswerTexts(prompt, texts, answered.labels, has_special_tokens=False)
    chat = partial(
        chat_of, tokenizer=tokenizer, limit=limit, treated=treated, source_template=source_template
    )
    texts, prompt = [], ""
    for answer in answered.answers.values():
        fields = {**record.fields, "messages": [*answered.prompt, *answer]}
        whole = chat(record._replace(fields=fields | {"tools": answered.tools}))
        texts.append(valid_text(record, "the rendered chat", whole.rendered()))
        # A system prompt in a field of its own is the first message.
        before = len(whole.messages) - len(answer)
        prompt = valid_text(record, "the rendered chat", whole.rendered(before, True))
    return AnswerTexts(prompt, tuple(texts), answered.labels, has_special_tokens=True)


def equal_entries(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The number of entries that two sequences have in common at their beginning."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def with_mismatched(
    group: Sequence[tuple[Sequence[Sample], Sequence[Sample]]], max_length: int
) -> Iterator[Sample]:
    """Yields the answers of some records, and behind each one its mismatched answer: the same
    prompt with the answer of the record before, that of the last record for the first one. Records
    with the same prompt are passed over, if others follow. The first answer of a record gets the
    first one of the other record, and the second one the second.

    Args:
      group: for each record, its answers whole, and cut to `max_length` tokens.
    """
    begins = [[int(np.argmax(answer.target_mask)) for answer in whole] for whole, _ in group]
    prompts = [
        whole[0].input_ids[:begin].tobytes()
        for (whole, _), (begin, *_) in zip(group, begins, strict=True)
    ]
    for i, (whole, cut) in enumerate(group):
        before = [*range(i - 1, -1, -1), *range(len(group) - 1, i, -1)]
        other = next((j for j in before if prompts[j] != prompts[i]), before[0])
        answers = [
            answer.input_ids[begin:]
            for answer, begin in zip(group[other][0], begins[other], strict=True)
        ]
        for n, (answer, begin) in enumerate(zip(whole, begins[i], strict=True)):
            yield cut[n]
            ids = np.concatenate([answer.input_ids[:begin], answers[n % len(answers)]])[:max_length]
            yield answer._replace(
                input_ids=ids,
                target_mask=np.arange(len(ids)) >= begin,
                sample_id=~answer.sample_id % 2**32,
            )


def _answer_fields(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the fields with the two answers of a pair; empty if there are none."""
    if "instruction" in fields and isinstance(fields.get("output"), list):
        # Old files of LLaMA-Factory have a list of the two.
        return ("output",) if len(fields["output"]) == 2 else ()
    return next((names for names in _ANSWERS if {*names} <= fields.keys()), ())


def _answered(record: Record, kind: Records) -> _Answered:
    names = _answer_fields(record.fields)
    if names:
        answered = _pair_of(record, names)
    elif kind == "labels":
        answered = _labelled_of(record)
    else:
        raise DataError(
            f"{record.where}: no pair of answers: expected the fields chosen and rejected, or "
            f"preferred_output and non_preferred_output; found {field_names(record)}"
        )
    for name, part in {"prompt": answered.prompt, **answered.answers}.items():
        if answered.is_chat and (not isinstance(part, list) or not part):
            raise DataError(
                f"{record.where}: {name} should be a list of messages, with one or more"
            )
        if not answered.is_chat:
            valid_text(record, name, part)
    return answered


def _pair_of(record: Record, names: tuple[str, ...]) -> _Answered:
    fields = record.fields
    chosen, rejected = fields["output"] if names == ("output",) else (fields[n] for n in names)
    if names == _ANSWERS[2]:
        given = fields.get("input")
        if not isinstance(given, Mapping) or not isinstance(given.get("messages"), list):
            raise DataError(
                f"{record.where}: field 'input' should be an object with messages, beside "
                "preferred_output and non_preferred_output"
            )
        return _Answered(given["messages"], _pair(chosen, rejected), tools=given.get("tools"))
    prompt = fields.get("prompt")
    if (isinstance(chosen, str) or names == ("output",)) and (chat := _chat_before(record)):
        answers = (_of_assistant(record, *each) for each in _pair(chosen, rejected).items())
        return _Answered(chat, _pair(*answers), tools=fields.get("tools"))
    if isinstance(chosen, Mapping):
        if not isinstance(rejected, Mapping):
            raise DataError(f"{record.where}: chosen is a message, and rejected is none")
        answers = ([_message(each)] for each in (chosen, rejected))
        return _Answered(_messages_before(record), _pair(*answers), tools=fields.get("tools"))
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        raise DataError(
            f"{record.where}: chosen and rejected should both be texts, or both lists of messages; "
            f"found {type(chosen).__name__} and {type(rejected).__name__}"
        )
    if prompt is None and isinstance(chosen, list) and _has_chat(fields):
        # Whole chats, as those of UltraFeedback, may stand beside the chat before them.
        if len(chosen) == len(rejected) == 1:
            prompt = _messages_before(record)
    # A prompt that is a text repeats the first message of answers that are messages.
    if prompt is None or (isinstance(prompt, str) and isinstance(chosen, list)):
        return _implicit(record, chosen, rejected)._replace(tools=fields.get("tools"))
    return _Answered(prompt, _pair(chosen, rejected), tools=fields.get("tools"))


def _pair(chosen: _Part, rejected: _Part) -> dict[str, _Part]:
    return {"chosen": chosen, "rejected": rejected}


def _implicit(record: Record, chosen: Any, rejected: Any) -> _Answered:
    """Divides two answers that begin with their prompt. A space before the place where two texts
    part belongs to the answers."""
    same = equal_entries(chosen, rejected)
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
    return _Answered(chosen[:same], _pair(chosen[same:], rejected[same:]))


def _labelled_of(record: Record) -> _Answered:
    fields = record.fields
    name = next((name for name in _LABELS if name in fields), "")
    if not name:
        raise DataError(
            f"{record.where}: no labelled answer: expected a prompt, a completion and a label, or "
            f"a pair of chosen and rejected; found {field_names(record)}"
        )
    if not isinstance(fields[name], bool):
        raise DataError(
            f"{record.where}: field {name!r} should be true or false, found {fields[name]!r:.60}"
        )
    prompt, completion = _prompt_and_completion(record)
    return _Answered(prompt, {"completion": completion}, (fields[name],), fields.get("tools"))


def _prompt_and_completion(record: Record) -> tuple[_Part, _Part]:
    fields = record.fields
    name = "completion" if "completion" in fields else "output"
    if name not in fields:
        return _without_last(record, [_message(each) for each in _messages_of(record)])
    prompt, completion = fields.get("prompt"), fields[name]
    if isinstance(completion, str) and (chat := _chat_before(record)):
        return chat, _of_assistant(record, name, completion)
    if prompt is None or (isinstance(prompt, str) and isinstance(completion, list)):
        if not isinstance(completion, list):
            raise DataError(
                f"{record.where}: no prompt before {name}: expected one in a field such as "
                f"'prompt'; found {field_names(record)}"
            )
        return _without_last(record, completion)
    if type(prompt) is not type(completion):
        raise DataError(
            f"{record.where}: prompt and {name} should both be texts, or both lists of messages; "
            f"found {type(prompt).__name__} and {type(completion).__name__}"
        )
    return prompt, completion


def _without_last(record: Record, chat: list[Any]) -> tuple[list[Any], list[Any]]:
    """Divides a whole chat into its prompt and the answer at its end."""
    last = chat[-1] if len(chat) > 1 else None
    if not isinstance(last, Mapping) or last.get("role") != ASSISTANT:
        raise DataError(
            f"{record.where}: the last of several messages should be the assistant's labelled "
            "answer"
        )
    return chat[:-1], chat[-1:]


def _chat_before(record: Record) -> list[Any]:
    """The messages before an answer that is a text and that a chat template renders; empty if the
    record is no such one."""
    fields = record.fields
    if fields.get("prompt") is not None:
        if "system" not in fields or not isinstance(fields["prompt"], str):
            return []
        names = ("prompt",)
    elif _has_chat(fields):
        return _messages_before(record)
    elif not (names := tuple(name for name in _QUESTIONS if name in fields)):
        return []
    parts = [fields[name] for name in names if fields[name]]
    text = "\n".join(valid_text(record, " and ".join(names), part) for part in parts)
    history = [
        {"role": role, "content": part}
        for turn in history_of(record)
        for role, part in zip(("user", ASSISTANT), turn, strict=True)
    ]
    return [*history, {"role": "user", "content": text}]


def _has_chat(fields: Mapping[str, Any]) -> bool:
    return any(name in fields for name in _CHATS)


def _messages_before(record: Record) -> list[Any]:
    """The messages of the prompt, which may be one text of a user."""
    if isinstance(text := record.fields.get("messages"), str):
        return [{"role": "user", "content": text}]
    return [_message(each) for each in _messages_of(record)]


def _messages_of(record: Record) -> list[Any]:
    name = next((name for name in _CHATS if name in record.fields), _CHATS[0])
    if not isinstance(value := record.fields.get(name), list):
        raise DataError(f"{record.where}: field {name!r} should be a list of messages")
    return value


def _of_assistant(record: Record, name: str, text: Any) -> list[Any]:
    return [{"role": ASSISTANT, "content": valid_text(record, name, text)}]


def _message(value: Any) -> Any:
    """A message of the ShareGPT form as one with role and content."""
    if isinstance(value, Mapping) and "from" in value:
        role = SPEAKERS.get(value["from"], value["from"])
        return {"role": role, "content": value.get("value")}
    return value
