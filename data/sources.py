"""Reads the records of files and Hugging Face datasets, defines their forms, and selects the
records that are held out."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxmux.field_checks import ByName, Count, PathText, Positive, Text, checked_dataclass
from jaxmux.similar_names import did_you_mean

from .errors import DataError
from .file_kinds import Rows, files_of, nested_columns, read_file, without_padding
from .hugging_face import is_saved_data_set, load_data_set

Form = Literal[
    "prompt_completion", "messages", "alpaca", "text", "sharegpt", "preference", "labelled"
]
# The form of records with two answers, of which one is better, and that of records with an answer
# that is labelled as good or bad.
PREFERENCE: Form = "preference"
LABELLED: Form = "labelled"
# What the records of a task are: answers or whole texts, pairs of a chosen and a rejected answer,
# labelled answers, or rollouts.
Records = Literal["answers", "pairs", "labels", "rollouts"]

# The fields that a record of each form needs. `detect_form` takes the first form that fits. "text"
# comes after "alpaca" because public Alpaca data sets also have the rendered record in `text`.
REQUIRED_FIELDS: Mapping[Form, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
    "sharegpt": ("conversations",),
    PREFERENCE: ("chosen", "rejected"),
    LABELLED: ("completion", "label"),
}
# The fields that a prompt of answers with preferences or labels may have.
_OF_PROMPTS = (
    "prompt",
    "instruction",
    "input",
    "question",
    "conversations",
    "messages",
    "system",
    "history",
    "tools",
)
# The fields that a record of each form may have.
OPTIONAL_FIELDS: Mapping[Form, tuple[str, ...]] = {
    "messages": ("system", "tools", "functions"),
    "alpaca": ("input", "system", "history"),
    "sharegpt": ("system", "tools", "functions"),
    PREFERENCE: (
        *_OF_PROMPTS,
        "preferred_output",
        "non_preferred_output",
        "chosen_response",
        "rejected_response",
        "output",
    ),
    LABELLED: (*_OF_PROMPTS, "output", "kto_tag"),
}
# The forms with one answer, or only a text.
ANSWER_FORMS: tuple[Form, ...] = tuple(
    form for form in REQUIRED_FIELDS if form not in (PREFERENCE, LABELLED)
)
# The forms that a chat template renders.
CHAT_FORMS: tuple[Form, ...] = ("messages", "sharegpt")

LossOn = Literal["completion", "all", "last_turn"]
Overlong = Literal["truncate", "drop", "error"]
OnBadRecord = Literal["error", "skip"]
SpecialTokens = Literal["parse", "escape"]

HUGGING_FACE_PREFIX = "hf:"


def fields_of(form: Form) -> tuple[str, ...]:
    """The fields of a form, required ones first."""
    return (*REQUIRED_FIELDS[form], *OPTIONAL_FIELDS.get(form, ()))


def all_fields() -> list[str]:
    return list(dict.fromkeys(name for form in REQUIRED_FIELDS for name in fields_of(form)))


def forms_with(names: set[str]) -> list[Form]:
    """The forms that have all of these fields."""
    return [form for form in REQUIRED_FIELDS if names <= {*fields_of(form)}]


@checked_dataclass
class Source:
    """Training records on disk or on the Hugging Face Hub, and how they become samples.

    Attributes:
      path: a `.jsonl` file (one JSON object per line), a `.json` file (the same, or an array of
        objects), a `.csv` or `.tsv` file (its first row names the fields), one of these with `.gz`
        or `.zst` behind it, a `.parquet` file, or "hf:" followed by the name of a Hugging Face
        dataset ("hf:tatsu-lab/alpaca") or by the folder of a dataset that `save_to_disk` wrote. A
        path with `*` or `?` stands for all files that match, in the order of their names:
        `"data/part-*.jsonl"`. In a `Task`, "jaxmux:" may come before the path of a file
        that ships with jaxmux, as in "jaxmux:demo/tasks/NAME.jsonl".
      split: split of a Hugging Face dataset. Sources without splits accept only "train".
      form: the fields of a record and how they become text. "prompt_completion" has the fields
        prompt and completion, which are joined. "messages" has a list of {"role", "content"}
        objects, which the tokenizer's chat template renders; assistant messages may have
        tool_calls, and a weight of 0 if they do not count in the loss; optionally the field system
        has the system prompt, and tools describes functions (or OpenAI's older functions, with
        function_call in messages). "sharegpt" has the field conversations, a list of {"from",
        "value"} objects, and optionally the same fields; it is rendered like "messages". "alpaca"
        has instruction, output and optionally input, which are joined with the headings of the
        Alpaca prompt, and optionally system and history, which come before them. "text"
        has the field text. "preference" has a prompt, a chosen and a rejected answer, and
        "labelled" an answer that is labelled as good or bad, in the forms that docs/your_data.md
        lists. "auto" looks at the first record and takes the first form that fits, in the order
        messages, prompt_completion, alpaca, text, sharegpt, for all records; for an objective of
        pairs it is "preference", and for one of labelled answers "labelled" or "preference".
      loss_on: the tokens that count in the loss. "completion": the tokens of the completion, of the
        output or of the assistant's messages; in the form "text", all tokens. "last_turn": of a
        chat, only the tokens of the assistant's last message; in other forms like "completion".
        "all": all tokens, except those of assistant messages with weight 0. The first token of a
        sample never counts.
      overlong: what happens to samples with more tokens than the task's `max_length`. "truncate"
        cuts their end, "drop" leaves them out, "error" raises a DataError when the source is
        loaded.
      on_bad_record: the treatment of records that cannot be trained on: malformed lines, missing
        fields, records without target tokens. "error" raises a DataError for the first one, "skip"
        leaves them out and counts them.
      special_tokens: the treatment of text that spells a special token of the tokenizer, such as
        `<|im_end|>` or `</s>`. "parse" lets it become this token, so that data can end a turn or a
        sample early. "escape" puts a space behind its first character, so that it stays text.
      columns: by field of the form, the name of this field in the records, as in {"prompt":
        "question", "completion": "answer"}. Fields that are not named keep their own names. With
        the form "auto", only forms with all of these fields are considered.
      chat_template: renders chats in place of the tokenizer's chat template: a template in Jinja,
        or the path of a file with one. It is a path if it ends in ".jinja" or a file has this name.
        Templates see the same values as in `transformers`, and their `{% generation %}` marks tell
        what counts in the loss. None takes the tokenizer's.
      max_samples: only the first so many records are read; malformed lines that are left out do not
        count. None reads all of them.
      repeat: how often an epoch of a task has each sample of the source: 3 for three times, 0.5 for
        half of the samples, the same ones in every epoch. None stands for once.
      weight: the share of the source in the samples of an epoch, beside the weights of the other
        sources of the task: 0.7 and 0.3, or 7 and 3, for 70% and 30%. The source with the most
        samples for its weight stands in an epoch once, and the samples of the others are repeated,
        so none is left out. All sources of a task have a weight, or none has. It takes the place of
        `repeat`.

    Raises:
      DataError: a field has another value.
    """

    path: PathText
    split: Text = "train"
    form: Literal["auto", Form] = "auto"
    loss_on: LossOn = "completion"
    overlong: Overlong = "truncate"
    on_bad_record: OnBadRecord = "error"
    special_tokens: SpecialTokens = "parse"
    columns: ByName[Text] = ()
    chat_template: PathText | None = None
    max_samples: Count | None = None
    repeat: Positive | None = None
    weight: Positive | None = None

    def __post_init__(self):
        self._check_columns()
        if self.repeat is not None and self.weight is not None:
            raise self._error("give repeat or weight, not both: each says how often samples occur")

    @property
    def forms(self) -> list[Form]:
        """The forms that the records may have, if they are answers or texts."""
        if self.form != "auto":
            return [self.form]
        fitting = forms_with({name for name, _ in self.columns})
        return [form for form in fitting if form in ANSWER_FORMS]

    def _check_columns(self) -> None:
        names = [name for name, _ in self.columns]
        known = all_fields()
        for name in names:
            if name not in known:
                hint = did_you_mean(name, known) or f"the fields are {', '.join(known)}"
                raise self._error(f"columns: {name!r} is no field of a form; {hint}")
            if names.count(name) > 1:
                raise self._error(f"columns names {name!r} twice")
        forms = REQUIRED_FIELDS if self.form == "auto" else [self.form]
        if not any(set(names) <= set(fields_of(form)) for form in forms):
            fields = "; ".join(f"{form} ({', '.join(fields_of(form))})" for form in forms)
            raise self._error(
                f"columns: no form has the fields {', '.join(names)}; the forms and their fields "
                f"are {fields}"
            )

    def _error(self, message: str) -> DataError:
        return DataError(f"{self.path}: {message}")


class SplitPart(NamedTuple):
    """The held-out records of a source, or all others.

    Whether a record is held out depends only on its index and on the fields here. The records that
    a smaller fraction holds out are a part of those that a larger fraction holds out.

    Attributes:
      fraction: average fraction of the records that is held out.
      held_out: True for the held-out records, False for the others.
      source: number of the source among those of a task.
    """

    fraction: float
    seed: int
    held_out: bool
    source: int = 0

    def has(self, index: int) -> bool:
        """Whether the record with this number in its source, from 0, belongs to the part."""
        return (stable_hash(self.seed, self.source, index) < self.fraction * 2**64) == self.held_out


def stable_hash(*key: object) -> int:
    """A hash below 2**64 that is the same in every process."""
    text = "/".join(map(str, key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


class Record(NamedTuple):
    """One record of a `Source`, before it is turned into text and tokens.

    Attributes:
      index: number of the record in its source, from 0.
      fields: the values of the record by field name.
      where: the location for error messages: "path:line" in a JSONL, CSV or TSV file, "path:row" in
        other sources, both counted from 1.
    """

    index: int
    fields: Mapping[str, Any]
    where: str


def read_records(
    source: Source, skip: Callable[[DataError], None] | None = None
) -> Iterator[Record]:
    """Yields the records of a source in order, without rendering or tokenizing them. Errors are
    raised while the result is iterated, not by the call itself.

    Args:
      source: only its `path`, `split`, `on_bad_record` and `max_samples` are used.
      skip: with `on_bad_record="skip"`, called with the error of every malformed line that is left
        out.

    Raises:
      DataError: the source is missing, empty, unreadable or of an unknown kind; it has no such
        split; a line is not a JSON object; or the optional package for this kind of source is not
        installed.
    """
    index, count = -1, 0
    for index, (where, fields) in enumerate(_open_rows(source)):
        if not isinstance(fields, DataError):
            yield Record(index, fields, where)
            count += 1
            if count == source.max_samples:
                return
        elif source.on_bad_record == "error":
            raise fields
        elif skip is not None:
            skip(fields)
    if index < 0:
        raise DataError(f"{source.path}: no records")


def _open_rows(source: Source) -> Rows:
    """The location and the fields of each row, or an error instead of the fields of a malformed
    line."""
    if source.path.startswith(HUGGING_FACE_PREFIX):
        return _read_hugging_face(source)
    if not (files := files_of(source.path)):
        raise DataError(f"{source.path}: no file matches")
    rows = map(read_file, map(Path, files))
    first = next(rows)
    _require_no_split(source)
    return chain(first, chain.from_iterable(rows))


def _require_no_split(source: Source) -> None:
    if source.split != "train":
        raise DataError(
            f"{source.path}: split={source.split!r}, but this source has no splits; "
            "name the file that holds the split instead"
        )


def _read_hugging_face(source: Source) -> Rows:
    name = source.path.removeprefix(HUGGING_FACE_PREFIX)
    data_set = load_data_set(name, source.split, source.path)
    # If a folder holds several splits, the result is a dict of splits.
    if isinstance(data_set, dict):
        if source.split not in data_set:
            names = ", ".join(map(repr, data_set))
            raise DataError(f"{source.path}: no split {source.split!r}; found splits: {names}")
        data_set = data_set[source.split]
    elif is_saved_data_set(Path(name)):
        _require_no_split(source)
    columns = nested_columns(data_set.features.arrow_schema)
    for row, fields in enumerate(data_set, start=1):
        yield f"{source.path}:{row}", without_padding(fields, columns)
