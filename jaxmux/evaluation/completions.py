"""Greedy completions of held-out samples, compared with their reference completions."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmux.data import Sample, StoredSamples
from jaxmux.data.chat_templates import special_tokens
from jaxmux.data.preferences import LABEL
from jaxmux.generation import Generator, Request
from jaxmux.models import Backbone

from .losses import EvalCase, first_with_data


class Matches(NamedTuple):
    """Numbers of completions that equal their references.

    Attributes:
      compared: number of samples, pairs or desirable answers that have a prompt and a completion.
      adapter: number of equal completions with the adapter.
      backbone: number of equal completions with the bare backbone.
    """

    compared: int
    adapter: int
    backbone: int


class _Parts(NamedTuple):
    prompt: list[int]
    completion: list[int]


def matches_of(
    cases: Sequence[EvalCase], backbone: Backbone, max_new_tokens: int | None = None
) -> list[Matches]:
    """Completes the samples of all cases with their adapters and with the bare backbone, and
    compares the texts with the references, without white space around them.

    The reference of a sample is the last part of it whose tokens count in the loss, up to a special
    token such as the end of a turn; in a chat, this is the last message of the assistant. Samples
    without a prompt before it, such as plain texts, are not compared. If several cases have the
    same samples, the bare backbone completes them once. The reference of a pair is its chosen
    answer; of labelled answers, those that are desirable are compared.

    Args:
      cases: their samples come from one `Loaded`.
      max_new_tokens: most tokens of a completion; None for the length of the longest reference.

    Raises:
      DataError: a prompt fills the backbone's context.
    """
    parts = [[p for p in map(_parts_of, _good_answers(case)) if p] for case in cases]
    if not any(parts):
        return [Matches(0, 0, 0) for _ in cases]
    if max_new_tokens is None:
        max_new_tokens = max(len(part.completion) for case_parts in parts for part in case_parts)
    firsts = first_with_data(cases)
    requests, wanted = [], []
    for number, (case, case_parts) in enumerate(zip(cases, parts, strict=True)):
        tokenizer, specials = case.tokenizer, special_tokens(case.tokenizer)
        for which, adapter in enumerate(((case.spec, case.adapter), (None, None))):
            if which and firsts[number] != number:
                continue
            requests += [
                Request(part.prompt, *adapter, stops=tuple(specials), tokenizer=tokenizer)
                for part in case_parts
            ]
            wanted += [
                (number, which, _text(part.completion, tokenizer, specials)) for part in case_parts
            ]
    counts = np.zeros((len(cases), 2), int)
    generator = Generator(backbone, cases[0].tokenizer)
    completions = generator.complete(requests, max_new_tokens=max_new_tokens)
    for (number, which, reference), text in zip(wanted, completions, strict=True):
        counts[number, which] += text.strip() == reference.strip()
    counts[:, 1] = counts[firsts, 1]
    return [
        Matches(len(case_parts), *map(int, row))
        for case_parts, row in zip(parts, counts, strict=True)
    ]


def _good_answers(case: EvalCase) -> StoredSamples:
    good = case.samples[:: case.objective.members]
    if case.objective.records == "labels":
        good = good.take(np.flatnonzero(good.numbers[LABEL]))
    return good


def _parts_of(sample: Sample) -> _Parts | None:
    """Splits a sample into the last part that counts in the loss and the tokens before it; None if
    there is at most one token before it, such as BOS."""
    targets = np.flatnonzero(sample.target_mask)
    end = int(targets[-1]) + 1
    others = np.flatnonzero(~sample.target_mask[:end])
    start = int(others[-1]) + 1
    ids = sample.input_ids.tolist()
    return _Parts(ids[:start], ids[start:end]) if start > 1 else None


def _text(ids: Sequence[int], tokenizer: Any, specials: Collection[int]) -> str:
    """The text of the tokens before the first special one."""
    ended = next((n for n, token in enumerate(ids) if token in specials), len(ids))
    return tokenizer.decode(ids[:ended])
