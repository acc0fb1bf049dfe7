"""Tokenization: records to samples, all of a source at once, so that bad data is refused early."""

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import batched, chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .chat import render_chat
from .errors import DataError
from .records import RenderedText, Span, detect_form, render
from .samples import Sample
from .sources import Record, Source, read_records

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RECORDS_PER_CALL = 1024


class Samples(NamedTuple):
    """The samples of one source, in its order, and what became of its records.

    Attributes:
      samples: never empty.
      read: records read; `read == len(samples) + dropped`.
      truncated: samples cut to the maximum length.
      dropped: records without a sample: too long where `overlong="drop"`, or left without target
        tokens by truncation.
    """

    samples: list[Sample]
    read: int
    truncated: int
    dropped: int


class _Tokens(NamedTuple):
    ids: list[int]
    target_mask: np.ndarray


def load_tokenizer(folder: str | Path) -> "PreTrainedTokenizerBase":
    """Loads the tokenizer of a Hugging Face checkpoint folder, from local files only.

    Raises:
      DataError: the folder is missing, holds no loadable tokenizer, or one that is not "fast"
        (targets are found by character offsets, which only fast tokenizers return).
    """
    # transformers takes seconds to import, and advises to install torch: not for its tokenizers.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    if not Path(folder).is_dir():
        raise DataError(f"{folder}: tokenizer folder not found")
    if not any(Path(folder).glob("tokenizer*")):
        raise DataError(f"{folder}: holds no tokenizer (tokenizer.json, tokenizer_config.json)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers and tokenizers raise many kinds, bare Exception too
        raise DataError(f"{folder}: no tokenizer can be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise DataError(
            f"{folder}: {type(tokenizer).__name__} is not a fast tokenizer (no tokenizer.json)"
        )
    return tokenizer


def load_samples(
    source: Source,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_length: int,
    vocab_size: int | None = None,
) -> Samples:
    """Reads, renders and tokenizes a whole source.

    The text of a record is tokenized once, as a whole; a token is a target where its characters
    overlap a target span, so one that straddles the border of prompt and completion is. BOS is as
    the tokenizer adds it. An EOS token, itself a target, ends every text that is not rendered by a
    chat template.

    Args:
      source: what to read.
      tokenizer: a fast tokenizer, see `load_tokenizer`.
      max_length: longest sample in tokens n, BOS and EOS included; at least 2.
      vocab_size: rows of the model's embedding; None skips the check.

    Raises:
      DataError: anything in the source that cannot be trained on, by file and line; no sample left.
    """
    if max_length < 2:
        raise DataError(
            f"{source.path}: max_length={max_length}, but a sample has at least 2 tokens"
        )
    samples: list[Sample] = []
    read = truncated = 0
    for record, tokens in _tokenize(source, tokenizer):
        read += 1
        _require_known_ids(record, tokens, tokenizer, vocab_size)
        sample = _fit(record, tokens, source, max_length)
        if sample is not None:
            samples.append(sample)
            truncated += len(tokens.ids) > max_length
    if not samples:
        raise DataError(
            f"{source.path}: no samples left: all {read} records exceed max_length={max_length} "
            f"and were dropped (overlong={source.overlong!r})"
        )
    return Samples(samples, read, truncated, dropped=read - len(samples))


def _tokenize(
    source: Source, tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[tuple[Record, _Tokens]]:
    records = read_records(source)
    first = next(records)
    form = detect_form(first) if source.form == "auto" else source.form
    if form == "messages":
        render_record = partial(render_chat, tokenizer=tokenizer, loss_on=source.loss_on)
    else:
        _require_eos(source, tokenizer)
        render_record = partial(render, form=form, loss_on=source.loss_on)
    for group in batched(chain([first], records), _RECORDS_PER_CALL):
        rendered = [render_record(record) for record in group]
        yield from zip(group, _tokenize_group(group, rendered, tokenizer), strict=True)


def _require_eos(source: Source, tokenizer: "PreTrainedTokenizerBase") -> None:
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"{source.path}: the tokenizer {tokenizer.name_or_path} has no EOS token to end a text"
        )


def _tokenize_group(
    records: Sequence[Record],
    rendered: Sequence[RenderedText],
    tokenizer: "PreTrainedTokenizerBase",
) -> Iterable[_Tokens]:
    # One source has one form, so its texts agree about special tokens.
    adds_special_tokens = not rendered[0].has_special_tokens
    encoded = tokenizer(
        [text for text, *_ in rendered],
        add_special_tokens=adds_special_tokens,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    for record, (_, spans, _), ids, offsets in zip(
        records, rendered, encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        if adds_special_tokens and len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
            # The text itself spells the BOS token that the tokenizer adds.
            ids, offsets = ids[1:], offsets[1:]
        offsets = np.asarray(offsets, np.int64).reshape(-1, 2)
        target_mask = _target_mask(offsets, spans)
        covers_text = offsets[:, 0] < offsets[:, 1]
        if not (target_mask & covers_text).any():
            raise DataError(
                f"{record.where}: no target tokens: the completion, the assistant's messages or "
                "the text is empty (the first token of all is never a target)"
            )
        if adds_special_tokens:
            if ids[-1] != tokenizer.eos_token_id:
                ids = [*ids, tokenizer.eos_token_id]
                target_mask = np.append(target_mask, True)
            target_mask[-1] = True
        yield _Tokens(ids, target_mask)


def _target_mask(offsets: np.ndarray, spans: Sequence[Span] | None) -> np.ndarray:
    starts, ends = offsets[:, 0], offsets[:, 1]
    mask = np.full(len(offsets), spans is None)
    for span in spans or ():
        mask |= (ends > span.start) & (starts < span.end)
    mask[:1] = False
    return mask


def _require_known_ids(
    record: Record, tokens: _Tokens, tokenizer: "PreTrainedTokenizerBase", vocab_size: int | None
) -> None:
    if vocab_size is not None and (largest := max(tokens.ids)) >= vocab_size:
        raise DataError(
            f"{record.where}: token id {largest} is outside the model's vocabulary of "
            f"{vocab_size}: the tokenizer {tokenizer.name_or_path} has {len(tokenizer)} tokens; "
            "use the model's own tokenizer"
        )


def _fit(record: Record, tokens: _Tokens, source: Source, max_length: int) -> Sample | None:
    length = len(tokens.ids)
    if length > max_length:
        if source.overlong == "error":
            raise DataError(
                f"{record.where}: {length} tokens exceed max_length={max_length} (overlong='error')"
            )
        if source.overlong == "drop" or not tokens.target_mask[:max_length].any():
            return None
    # A copy, so that a truncated sample does not keep the mask of the long text alive.
    target_mask = tokens.target_mask[:max_length].copy()
    return Sample(np.asarray(tokens.ids[:max_length], np.int32), target_mask, record.index)
