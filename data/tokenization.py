"""Tokenization: turns all records of a source into samples, before training begins."""

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import batched, chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from .chat import render_chat
from .errors import DataError
from .record_forms import RenderedText, TextRange, detect_form, render
from .samples import Sample
from .sources import Record, Source, read_records

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RECORDS_PER_CALL = 1024


class Samples(NamedTuple):
    """The samples (tokenized examples) of one source, and counts of its records.

    Attributes:
      samples: at least one sample, in the order of the source.
      read: number of records read; equals `len(samples) + dropped`.
      truncated: number of samples that were cut to the maximum length.
      dropped: number of records without a sample. A record has none if it is too long and the
        source says `overlong="drop"`, or if truncation leaves no token that counts in the loss.
    """

    samples: list[Sample]
    read: int
    truncated: int
    dropped: int


def load_tokenizer(folder: str | Path) -> "PreTrainedTokenizerBase":
    """Loads the tokenizer of a Hugging Face checkpoint folder, from local files only.

    Args:
      folder: folder with tokenizer.json, usually the backbone's folder.

    Returns:
      A Hugging Face tokenizer, for `prepare_task`, `load_samples` and `complete`.

    Raises:
      DataError: the folder is missing, holds no tokenizer that can be loaded, or its tokenizer is
        not "fast". Only fast tokenizers return the character offsets of tokens, by which the tokens
        that count in the loss are found.
    """
    # Importing transformers takes seconds, and it warns that torch is missing, which tokenizers do
    # not need.
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
    except Exception as error:  # transformers and tokenizers raise many kinds of exceptions
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
    """Reads a whole source, turns its records into text, and tokenizes them.

    The text of a record is tokenized at once. A token counts in the loss if some of its characters
    belong to the part that `source.loss_on` selects, so a token across the border of prompt and
    completion counts. A BOS token is added if the tokenizer adds one. An EOS token, which counts in
    the loss, ends every text except the texts that a chat template renders.

    Args:
      source: the records to read.
      tokenizer: a fast tokenizer, from `load_tokenizer`.
      max_length: most tokens of a sample, BOS and EOS included; at least 2. `source.overlong`
        decides what happens to longer samples.
      vocab_size: rows of the model's embedding; a token id that is not below this number is an
        error. None skips the check.

    Returns:
      The samples in the order of the source, with counts of truncated and dropped records.

    Raises:
      DataError: the source cannot be read, a record cannot be trained on (the message names its
        file and line), no sample is left, the tokenizer lacks an EOS token or chat template that
        the records need, or `max_length` is below 2.
    """
    if max_length < 2:
        raise DataError(
            f"{source.path}: max_length={max_length}, but a sample has at least 2 tokens"
        )
    samples: list[Sample] = []
    read = truncated = 0
    for record, whole in _tokenize(source, tokenizer):
        read += 1
        _require_known_ids(record, whole, tokenizer, vocab_size)
        sample = _fit(record, whole, source, max_length)
        if sample is not None:
            samples.append(sample)
            truncated += sample is not whole
    if not samples:
        raise DataError(
            f"{source.path}: no samples left: all {read} records exceed max_length={max_length} "
            f"and were dropped (overlong={source.overlong!r})"
        )
    return Samples(samples, read, truncated, dropped=read - len(samples))


def _tokenize(
    source: Source, tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[tuple[Record, Sample]]:
    records = read_records(source)
    first = next(records)
    form = detect_form(first) if source.form == "auto" else source.form
    if form == "messages":
        render_record = partial(render_chat, tokenizer=tokenizer, loss_on=source.loss_on)
    else:
        if tokenizer.eos_token_id is None:
            raise DataError(
                f"{source.path}: the tokenizer {tokenizer.name_or_path} has no EOS token to end a "
                "text"
            )
        render_record = partial(render, form=form, loss_on=source.loss_on)
    for group in batched(chain([first], records), _RECORDS_PER_CALL):
        rendered = [render_record(record) for record in group]
        yield from zip(group, _tokenize_group(group, rendered, tokenizer), strict=True)


def _tokenize_group(
    records: Sequence[Record],
    rendered: Sequence[RenderedText],
    tokenizer: "PreTrainedTokenizerBase",
) -> Iterable[Sample]:
    # All records of a source have the same form, so the first tells about special tokens for all.
    adds_special_tokens = not rendered[0].has_special_tokens
    encoded = tokenizer(
        [text for text, *_ in rendered],
        add_special_tokens=adds_special_tokens,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    for record, (_, target_ranges, _), ids, offsets in zip(
        records, rendered, encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        if adds_special_tokens and len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
            # The text begins with the BOS token, and the tokenizer added a second one.
            ids, offsets = ids[1:], offsets[1:]
        offsets = np.asarray(offsets, np.int64).reshape(-1, 2)
        target_mask = _target_mask(offsets, target_ranges)
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
        yield Sample(np.asarray(ids, np.int32), target_mask, record.index)


def _target_mask(
    offsets: Int[np.ndarray, "n 2"], target_ranges: Sequence[TextRange] | None
) -> Bool[np.ndarray, "n"]:
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
    return Sample(ids, mask, record.index)
