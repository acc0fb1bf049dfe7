"""Tokenization: turns all records of a source into samples, before training begins."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from .chat import joined_prompt, render_chat
from .chat_templates import (
    Rendering,
    SpecialText,
    TemplateClock,
    TimeLimit,
    TimeLimitExceeded,
    ends_of_turns,
    own_template,
    template_of,
)
from .errors import DataError
from .preferences import (
    LABEL,
    AnswerTexts,
    equal_entries,
    is_chat,
    render_answers,
    with_mismatched,
)
from .record_forms import Columns, RenderedText, TextRange, detect_form, render, unread_fields
from .rollouts import LOGPROBS, Groups, has_tokens, sample_of_tokens, with_values
from .sources import (
    CHAT_FORMS,
    LABELLED,
    PREFERENCE,
    Form,
    Record,
    Records,
    Source,
    SplitPart,
    read_records,
)
from .stored_samples import Sample, SampleWriter, StoredSamples, TokenFile
from .tokenizers import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# At most this many records, and this many of their characters, are tokenized in one call: tokens
# and offsets take up to 280 bytes of memory for each character.
_RECORDS_PER_CALL, _CHARACTERS_PER_CALL = 1024, 2**18

# One call of a chat template takes milliseconds, unless the template loops.
_TEMPLATE_SECONDS = 3.0


class Samples(NamedTuple):
    """The samples (tokenized examples) of one source, and counts of the records that were cut or
    left out.

    Attributes:
      samples: at least one sample, in the order of the source.
      read: number of records read: those of the samples, `dropped` and `skipped`. A pair is one
        record and two samples.
      truncated: number of samples that were cut to the maximum length; a pair has two. Mismatched
        answers do not count.
      dropped: number of records that are too long and are left out, because of
        `Source.overlong="drop"` or because truncation leaves no token that counts in the loss.
      skipped: number of records that cannot be trained on, with `Source.on_bad_record="skip"`.
      first_skipped: the error of the first skipped record; empty if there is none.
      target_tokens: number of tokens that count in the loss, before records are cut or dropped.
      cut_target_tokens: number of these tokens that truncation removes.
      unknown_target_tokens: number of these tokens that are the tokenizer's unknown token.
      special_text: the first special token that the text of a record spells; empty if there is
        none, or with `Source.special_tokens="escape"`.
      special_records: number of records whose text spells a special token.
      endless: number of chats in which no token that may end a turn counts in the loss, before
        records are cut or dropped; a pair counts once. Models do not learn from them where an
        answer ends.
      equal_answers: number of pairs whose answers are the same tokens.
      without_logprobs: number of rollouts without log-probabilities.
      joined_prompt: the result of `chat.joined_prompt` for the template of the chats.
      rendering: how the records became text.
      unread_fields: for each field that looks like text but that the form of the records does not
        read, the number of records that have it.
    """

    samples: StoredSamples
    read: int
    truncated: int = 0
    dropped: int = 0
    skipped: int = 0
    first_skipped: str = ""
    target_tokens: int = 0
    cut_target_tokens: int = 0
    unknown_target_tokens: int = 0
    special_text: str = ""
    special_records: int = 0
    endless: int = 0
    equal_answers: int = 0
    without_logprobs: int = 0
    joined_prompt: str = ""
    rendering: Rendering = Rendering()
    unread_fields: Counter[str] = Counter()


class Skipped:
    """Counts records that are left out, and keeps the first error. `first` is the error of the
    first record; empty if there is none."""

    def __init__(self):
        self.count, self.first = 0, ""

    def add(self, error: DataError) -> None:
        self.first = self.first or str(error)
        self.count += 1


def load_samples(
    source: Source,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int,
    vocab_size: int | None = None,
    part: SplitPart | None = None,
    tokens: TokenFile | None = None,
    records: Records = "answers",
    mismatched_in: int | None = None,
) -> Samples:
    """Reads a whole source or a part of it, turns its records into text, and tokenizes them.

    A token counts in the loss if some of its characters belong to the part of the text that
    `source.loss_on` selects, so a token that contains the border of prompt and completion counts. A
    BOS token is added if the tokenizer adds one. An EOS token, which counts in the loss, ends every
    text except the texts that a chat template renders.

    Args:
      tokenizer: a fast tokenizer, from `load_tokenizer`.
      max_length: most tokens of a sample, BOS and EOS included; at least 2. `source.overlong`
        decides what happens to longer samples.
      vocab_size: rows of the model's embedding. A token id that is not below this number is an
        error; None skips the check.
      part: the part of the records that is loaded; None for all of them.
      tokens: the file to which the tokens are appended; None for a new one.
      records: what the records are. A pair becomes two samples, the chosen answer and behind it the
        rejected one. A labelled answer becomes a sample with the number "label", 1 or 0; so do both
        answers of a pair among labels. The tokens of pairs and labels are those of TRL, see
        `preferences`. A pair is left out if one of its answers is. Rollouts have tokens or texts;
        their samples have the values "logprobs" and "advantages" of `rollouts.with_values`, and
        with rewards the numbers "reward" and "group".
      mismatched_in: for labels, the number of records in the groups within which prompts get the
        answers of other records. Each sample is followed by its mismatched one, from
        `preferences.with_mismatched`, of which the end is cut to `max_length`. The last group may
        be smaller, but no group has one record. None for no mismatched samples.

    Raises:
      DataError: the source cannot be read, a record cannot be trained on (the message names its
        file and line), no sample is left, the tokenizer lacks an EOS token or chat template that
        the records need, or `max_length` is below 2.
    """
    if max_length < 2:
        raise DataError(
            f"{source.path}: max_length={max_length}, but a sample has at least 2 tokens"
        )
    samples = SampleWriter(tokens or TokenFile())
    skipped = Skipped()
    special = SpecialText(source, tokenizer)
    # Some tokenizers also use the EOS token, which ends each sample, as the unknown token.
    unknown_id = tokenizer.unk_token_id if tokenizer.unk_token_id != tokenizer.eos_token_id else -1
    dropped = truncated = targets = cut = unknown = endless = equal = unknown_policy = 0
    ends = np.fromiter(ends_of_turns(tokenizer), np.int32)
    is_end = np.zeros(ends.max(initial=0) + 1, bool)
    is_end[ends] = True
    rendering, unread = Rendering(), Counter[str]()
    kept, group_size = 0, max(2, mismatched_in or 0)
    # The answers of records that wait for their mismatched ones: whole, and cut.
    waiting: list[tuple[Sequence[Sample], Sequence[Sample]]] = []
    with TemplateClock() as clock:
        for record, members, rendering_of_source in _tokenize(
            source, tokenizer, special, skipped, part, unread, records
        ):
            rendering = rendering_of_source
            has_end = True
            for whole in members:
                _require_known_ids(record, whole, tokenizer, vocab_size)
                targets += whole.target_tokens
                target_ids = whole.input_ids[whole.target_mask]
                unknown += np.count_nonzero(target_ids == unknown_id)
                has_end = has_end and is_end[target_ids[target_ids < len(is_end)]].any()
            endless += bool(rendering.chat_templates) and not has_end
            fitting = [_fit(record, whole, source, max_length) for whole in members]
            if None in fitting:
                dropped += 1
                continue
            kept += 1
            equal += len(fitting) == 2 and np.array_equal(*(each.input_ids for each in fitting))
            unknown_policy += records == "rollouts" and record.fields.get(LOGPROBS) is None
            for whole, sample in zip(members, fitting, strict=True):
                truncated += sample is not whole
                cut += whole.target_tokens - sample.target_tokens
            if mismatched_in is None:
                samples.extend(fitting)
                continue
            waiting.append((members, fitting))
            # Of those that are left, there may be no single one.
            if len(waiting) == group_size + 2:
                samples.extend(with_mismatched(waiting[:group_size], max_length))
                del waiting[:group_size]
    if len(waiting) == 1:
        raise DataError(
            f"{source.path}: one record only, and KTO needs the answer of another one for its "
            'prompt; add records, or choose the loss "apo_zero_unpaired"'
        )
    samples.extend(with_mismatched(waiting, max_length))
    if clock.was_read:
        rendering = rendering._replace(date=clock.date.isoformat(" ", "seconds"))
    if not samples:
        raise DataError(_no_samples(source, max_length, dropped, skipped, part))
    return Samples(
        samples.samples(),
        read=kept + dropped + skipped.count,
        truncated=truncated,
        dropped=dropped,
        skipped=skipped.count,
        first_skipped=skipped.first,
        target_tokens=targets,
        cut_target_tokens=cut,
        unknown_target_tokens=int(unknown),
        special_text=special.first,
        special_records=special.records,
        endless=endless,
        equal_answers=int(equal),
        without_logprobs=unknown_policy,
        joined_prompt=joined_prompt(tokenizer, rendering),
        rendering=rendering,
        unread_fields=unread,
    )


def _no_samples(
    source: Source, max_length: int, dropped: int, skipped: Skipped, part: SplitPart | None
) -> str:
    reasons = []
    if part and not dropped and not skipped.count:
        share = "none" if part.held_out else "all"
        return (
            f"{source.path}: validation_fraction={part.fraction:g} holds out {share} of the "
            "records; choose another fraction, or name the held-out records with eval_data"
        )
    if dropped:
        reasons.append(
            f"{dropped} exceed max_length={max_length} and were dropped "
            f"(overlong={source.overlong!r})"
        )
    if skipped.count:
        reasons.append(f"{skipped.count} were skipped, the first because of {skipped.first}")
    records = dropped + skipped.count
    return f"{source.path}: no samples left of {records} records: {'; '.join(reasons)}"


def _tokenize(
    source: Source,
    tokenizer: "PreTrainedTokenizerBase",
    special: SpecialText,
    skipped: Skipped,
    part: SplitPart | None,
    unread: Counter[str],
    kind: Records,
) -> Iterator[tuple[Record, Sequence[Sample], Rendering]]:
    """Yields the untruncated samples of every record that can be trained on, two of a pair, and the
    rendering of the source. `skipped` counts the other records if `source.on_bad_record` is
    "skip". `unread` counts fields that are not read, by name."""

    def refuse(error: DataError) -> None:
        if source.on_bad_record == "error":
            raise error
        skipped.add(error)

    source_template = own_template(source, tokenizer)
    columns, groups = Columns(source), Groups()
    has_preferences = kind in ("pairs", "labels")
    records = read_records(source, skipped.add)
    for first in records:
        try:
            if kind == "rollouts" and has_tokens(columns.renamed(first)):
                yield from _rollouts_of_tokens(chain([first], records), columns, part, refuse)
                return
            if has_preferences and source.form in _FORMS_OF[kind]:
                form = LABELLED if kind == "labels" else PREFERENCE
                in_chats = is_chat(columns.renamed(first), kind)
                break
            if (form := source.form) == "auto":
                form = detect_form(columns.renamed(first), source.forms)
            _require_form(source, form, kind)
            in_chats = form in CHAT_FORMS
            break
        except DataError as error:
            refuse(error)
    else:
        return
    if in_chats:
        if source_template is None and tokenizer.chat_template is None:
            template_of(tokenizer, where=first.where)
        rendering = Rendering(chat_templates=(source_template and source_template.text,))
        limit = TimeLimit(_TEMPLATE_SECONDS)
        render_record = partial(
            render_chat,
            tokenizer=tokenizer,
            loss_on=source.loss_on,
            limit=limit,
            form=form,
            treated=special.treated,
            source_template=source_template,
        )
        if has_preferences:
            render_record = partial(
                _rendered_answers,
                kind=kind,
                in_chats=True,
                tokenizer=tokenizer,
                limit=limit,
                treated=special.treated,
                source_template=source_template,
            )
    else:
        if source.chat_template is not None:
            raise DataError(
                f"{source.path}: chat_template renders chats, and these records have the form "
                f"{form!r}"
            )
        if tokenizer.eos_token_id is None:
            raise DataError(
                f"{source.path}: the tokenizer {tokenizer.name_or_path} has no EOS token to end a "
                "text"
            )
        limit, rendering = nullcontext(), Rendering(texts=True)

        def render_record(record: Record) -> RenderedText | AnswerTexts:
            if has_preferences:
                return _rendered_answers(record, kind, False, tokenizer, treated=special.treated)
            return render(special.treated(record), form, source.loss_on, tokenizer.eos_token)

    renamed = {field for _, field in source.columns}

    def is_wanted(record: Record) -> bool:
        columns.see(record)
        return part is None or part.has(record.index)

    wanted = filter(is_wanted, chain([first], records))
    for group in _groups(wanted, lambda record: _characters(record.fields)):
        rendered: list[tuple[Record, RenderedText | AnswerTexts]] = []
        with limit:
            for record in group:
                try:
                    read = columns.renamed(record)
                    rendered.append((read, render_record(read)))
                    if source.special_tokens == "escape":
                        read = special.treated(read)
                    text = "".join(rendered[-1][1].texts)
                    unread.update({*unread_fields(read, form, text)} - renamed)
                except DataError as error:
                    refuse(error)
                except TimeLimitExceeded:
                    refuse(DataError(f"{record.where}: rendering the record takes too long"))
                except RecursionError:
                    refuse(DataError(f"{record.where}: the record nests objects or lists deeply"))
        parts = _groups(rendered, lambda each: sum(map(len, each[1].texts)))
        tokenize = _tokenize_group
        if has_preferences:
            tokenize = partial(_tokenize_answers, paired=kind == "pairs")
        tokenized = (tokenize(group, tokenizer) for group in parts)
        for record, members in chain.from_iterable(tokenized):
            if members:
                try:
                    found = (
                        [with_values(record, m, groups) for m in members]
                        if kind == "rollouts"
                        else members
                    )
                except DataError as error:
                    refuse(error)
                    continue
                yield record, found, rendering
            else:
                refuse(
                    DataError(
                        f"{record.where}: no target tokens: the completion, the assistant's "
                        "messages or the text is empty (the first token of all is never a target)"
                    )
                )
    columns.refuse_unseen()


def _rollouts_of_tokens(
    records: Iterable[Record],
    columns: Columns,
    part: SplitPart | None,
    refuse: Callable[[DataError], None],
) -> Iterator[tuple[Record, Sequence[Sample], Rendering]]:
    groups = Groups()
    for record in records:
        columns.see(record)
        if part is not None and not part.has(record.index):
            continue
        try:
            read = columns.renamed(record)
            yield read, [with_values(read, sample_of_tokens(read), groups)], Rendering()
        except DataError as error:
            refuse(error)
    columns.refuse_unseen()


# The forms of preferences that a source may have, by what an objective asks for.
_FORMS_OF = {"pairs": ("auto", PREFERENCE), "labels": ("auto", LABELLED, PREFERENCE)}


def _require_form(source: Source, form: Form, kind: Records) -> None:
    if kind == "pairs":
        raise DataError(
            f"{source.path}: the task's objective needs pairs of a chosen and a rejected answer "
            f'(form="{PREFERENCE}"), and form is "{form}"'
        )
    if kind == "labels":
        raise DataError(
            f"{source.path}: the task's objective needs labelled answers "
            f'(form="{LABELLED}" or "{PREFERENCE}"), and form is "{form}"'
        )
    if form == PREFERENCE:
        raise DataError(
            f"{source.path}: records of the form {PREFERENCE!r} need an objective of pairs, such "
            "as DPO()"
        )
    if form == LABELLED:
        raise DataError(
            f"{source.path}: records of the form {LABELLED!r} need an objective of labelled "
            "answers, such as KTO()"
        )


def _rendered_answers(
    record: Record, kind: Records, in_chats: bool, *arguments: Any, **options: Any
) -> AnswerTexts:
    """`render_answers`, which refuses a record whose texts are not made as those of the first
    one."""
    rendered = render_answers(record, kind, *arguments, **options)
    if rendered.has_special_tokens != in_chats:
        found, first = ("messages", "texts") if not in_chats else ("texts", "messages")
        raise DataError(f"{record.where}: has {found}, and the first record has {first}")
    return rendered


def _tokenize_answers(
    rendered: Sequence[tuple[Record, AnswerTexts]],
    tokenizer: "PreTrainedTokenizerBase",
    paired: bool,
) -> Iterator[tuple[Record, Sequence[Sample]]]:
    """The untruncated sample of each answer of each record; none if an answer has no target token.
    If `paired`, the answers of a record begin at the same place; otherwise they have labels."""
    texts = [text for _, answers in rendered for text in answers.texts]
    encoded = iter(encode(tokenizer, texts, is_rendered=rendered[0][1].has_special_tokens))
    for record, answers in rendered:
        prompt, *wholes = (next(encoded).ids for _ in answers.texts)
        begins = [equal_entries(prompt, ids) for ids in wholes]
        if paired:
            begins = [min(begins)] * len(begins)
        members = [
            Sample(
                np.asarray(ids, np.int32),
                np.arange(len(ids)) >= max(1, begin),
                (2 * record.index + member) % 2**32,
                numbers={} if paired else {LABEL: float(answers.labels[member])},
            )
            for member, (ids, begin) in enumerate(zip(wholes, begins, strict=True))
        ]
        yield record, members if all(each.target_tokens for each in members) else ()


def _tokenize_group(
    rendered: Sequence[tuple[Record, RenderedText]], tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[tuple[Record, Sequence[Sample]]]:
    """The untruncated sample of each rendered record; none for a record without target tokens."""
    # All records of a source have the same form, so either all texts have special tokens or none.
    adds_special_tokens = not rendered[0][1].has_special_tokens
    encoded = encode(
        tokenizer, [text for _, (text, *_) in rendered], is_rendered=not adds_special_tokens
    )
    for (record, (text, target_ranges, _)), (ids, offsets) in zip(rendered, encoded, strict=True):
        offsets = np.asarray(offsets, np.int64).reshape(-1, 2)
        target_mask = _target_mask(offsets, target_ranges)
        covers_text = offsets[:, 0] < offsets[:, 1]
        if not (target_mask & covers_text).any() or _is_blank(text, target_ranges):
            yield record, ()
            continue
        if adds_special_tokens:
            if ids[-1] != tokenizer.eos_token_id:
                ids = [*ids, tokenizer.eos_token_id]
                target_mask = np.append(target_mask, True)
            target_mask[-1] = True
        yield record, [Sample(np.asarray(ids, np.int32), target_mask, record.index)]


def _is_blank(text: str, ranges: Sequence[TextRange] | None) -> bool:
    """Whether the targets are only white space."""
    return not any(text[start:end].strip() for start, end in ranges or ((0, len(text)),))


def _target_mask(
    offsets: Int[np.ndarray, "n 2"], target_ranges: Sequence[TextRange] | None
) -> Bool[np.ndarray, " n"]:
    starts, ends = offsets[:, 0], offsets[:, 1]
    mask = np.full(len(offsets), target_ranges is None)
    for target in target_ranges or ():
        mask |= (ends > target.start) & (starts < target.end)
    mask[:1] = False
    return mask


def _require_known_ids(
    record: Record, sample: Sample, tokenizer: "PreTrainedTokenizerBase", vocab_size: int | None
) -> None:
    if vocab_size is not None and (largest := sample.input_ids.max()) >= vocab_size:
        raise DataError(
            f"{record.where}: token id {largest} is outside the model's vocabulary of "
            f"{vocab_size}: the tokenizer {tokenizer.name_or_path} has {len(tokenizer)} tokens; "
            "use the model's own tokenizer"
        )


def _fit(record: Record, sample: Sample, source: Source, max_length: int) -> Sample | None:
    length = len(sample.input_ids)
    if length <= max_length:
        return sample
    if source.overlong == "error":
        raise DataError(
            f"{record.where}: {length} tokens exceed max_length={max_length} (overlong='error')"
        )
    # Views would keep the arrays of the whole text in memory.
    ids, mask = (array[:max_length].copy() for array in (sample.input_ids, sample.target_mask))
    if source.overlong == "drop" or not mask.any():
        return None
    values = {name: each[:max_length].copy() for name, each in sample.values.items()}
    return sample._replace(input_ids=ids, target_mask=mask, values=values)


def _groups[Item](items: Iterable[Item], characters: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Divides records, or their rendered texts, into groups for one call of the tokenizer. A record
    with more characters than a call may have is a separate group."""
    group: list[Item] = []
    total = 0
    for item in items:
        size = characters(item)
        if group and (len(group) == _RECORDS_PER_CALL or total + size > _CHARACTERS_PER_CALL):
            yield group
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield group


def _characters(value: Any) -> int:
    """Number of characters in all texts of a record's fields."""
    try:
        match value:
            case str():
                return len(value)
            case Mapping():
                return sum(map(_characters, value.values()))
            case list():
                return sum(map(_characters, value))
    except RecursionError:
        # Such a record is refused when it is rendered.
        pass
    return 0
