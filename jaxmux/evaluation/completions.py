"""Greedy completions of held-out samples, compared with their reference completions."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmux.data import Sample
from jaxmux.data.special_text import special_tokens
from jaxmux.generation import Generator, Request
from jaxmux.models import Backbone

from .cases import Case, first_with_data


class Matches(NamedTuple):
    """How many completions of a case's samples equal the reference.

    Attributes:
      compared: number of samples that have a prompt and a completion.
      adapter: number of equal completions with the adapter.
      backbone: number of equal completions with the bare backbone.
    """

    compared: int
    adapter: int
    backbone: int


class _Parts(NamedTuple):
    """The tokens of a sample."""

    prompt: list[int]
    completion: list[int]


def matches_of(
    cases: Sequence[Case], backbone: Backbone, max_new_tokens: int | None = None
) -> list[Matches]:
    """Completes the samples of all cases with their adapters and with the bare backbone, and
    compares the texts with the references, without white space around them.

    The reference is the last part of a sample whose tokens count in the loss, up to a special token
    such as the end of a turn: of a chat, what the assistant says last. Samples without a prompt
    before it, such as plain texts, are not compared. The bare backbone completes the samples of
    several cases once, if they are the same.

    Args:
      cases: the cases; their samples come from one `Loaded`.
      backbone: the backbone.
      max_new_tokens: most tokens of a completion; None for those of the longest reference.

    Raises:
      DataError: a prompt fills the backbone's context.
    """
    parts = [[p for p in map(_parts_of, case.samples) if p] for case in cases]
    if not any(parts):
        return [Matches(0, 0, 0) for _ in cases]
    if max_new_tokens is None:
        max_new_tokens = max(len(part.completion) for own in parts for part in own)
    firsts = first_with_data(cases)
    requests, wanted = [], []
    for number, (case, own) in enumerate(zip(cases, parts, strict=True)):
        tokenizer, specials = case.tokenizer, special_tokens(case.tokenizer)
        for which, adapter in enumerate(((case.spec, case.adapter), (None, None))):
            if which and firsts[number] != number:
                continue
            requests += [
                Request(part.prompt, *adapter, stops=tuple(specials), tokenizer=tokenizer)
                for part in own
            ]
            wanted += [(number, which, _text(part.completion, tokenizer, specials)) for part in own]
    counts = np.zeros((len(cases), 2), int)
    generator = Generator(backbone, cases[0].tokenizer)
    found = generator.complete(requests, max_new_tokens=max_new_tokens)
    for (number, which, reference), text in zip(wanted, found, strict=True):
        counts[number, which] += text.strip() == reference.strip()
    counts[:, 1] = counts[firsts, 1]
    return [Matches(len(own), *map(int, row)) for own, row in zip(parts, counts, strict=True)]


def _parts_of(sample: Sample) -> _Parts | None:
    """The tokens before and of the last part that counts in the loss; None if only a first token,
    such as BOS, is before it."""
    targets = np.flatnonzero(sample.target_mask)
    end = int(targets[-1]) + 1
    others = np.flatnonzero(~sample.target_mask[:end])
    start = int(others[-1]) + 1
    ids = sample.input_ids.tolist()
    return _Parts(ids[:start], ids[start:end]) if start > 1 else None


def _text(ids: Sequence[int], tokenizer: Any, specials: Collection[int]) -> str:
    """The text of tokens up to the first special one."""
    ended = next((n for n, token in enumerate(ids) if token in specials), len(ids))
    return tokenizer.decode(ids[:ended])
