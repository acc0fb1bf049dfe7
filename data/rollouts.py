"""Rollouts: answers that were sampled from a policy, with the log-probabilities of their tokens and
with advantages or rewards."""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from .errors import DataError
from .record_forms import field_names
from .sources import Record
from .stored_samples import Sample

# The log-probability of a token under the policy that sampled it, and its advantage.
LOGPROBS, ADVANTAGES = "logprobs", "advantages"
# The reward of an answer, and the group of answers with which it is compared.
REWARD, GROUP = "reward", "group"


def rollout(
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    advantages: float | Sequence[float],
    logprobs: Sequence[float] | None = None,
    number: int = 0,
) -> Sample:
    """The sample of an answer, for `Engine.train_on` with a `Policy`.

    Args:
      prompt_ids: tokens of the prompt, with those that the tokenizer puts before a text.
      completion_ids: tokens of the answer, at least one, with EOS if the answer ended.
      advantages: the advantage of the answer, or of each of its tokens.
      logprobs: log-probability in nats of each token of the answer under the policy that sampled
        it; None for the policy that is trained.
      number: `Sample.sample_id`, by which dropout masks differ.

    Raises:
      DataError: there is no token, a number is not finite, or there are not as many numbers as
        tokens of the answer.
    """
    fields = {
        "prompt_ids": [int(token) for token in prompt_ids],
        "completion_ids": [int(token) for token in completion_ids],
        ADVANTAGES: np.asarray(advantages, float).tolist(),
        LOGPROBS: None if logprobs is None else np.asarray(logprobs, float).tolist(),
    }
    record = Record(number, fields, f"rollout {number}")
    return with_values(record, sample_of_tokens(record), Groups())


def has_tokens(record: Record) -> bool:
    """Whether a rollout has tokens; otherwise it has texts."""
    return "completion_ids" in record.fields


def sample_of_tokens(record: Record) -> Sample:
    """The sample of a rollout that has the tokens of its prompt and its completion. DataError if
    these are no lists of tokens, or have no token that counts in the loss."""
    prompt, completion = (_tokens(record, name) for name in ("prompt_ids", "completion_ids"))
    ids = np.array([*prompt, *completion], np.int32)
    if not completion or len(ids) < 2:
        raise DataError(f"{record.where}: completion_ids is empty, or the only token of the record")
    return Sample(ids, np.arange(len(ids)) >= max(1, len(prompt)), record.index)


def with_values(record: Record, sample: Sample, groups: "Groups") -> Sample:
    """The sample of a rollout with the values "logprobs" and "advantages" of its tokens, and the
    numbers "reward" and "group". What a record does not have is NaN; it needs advantages or a
    reward. DataError if a value is no number, or a list does not fit the completion."""
    fields, values = record.fields, {}
    logprobs = fields.get(LOGPROBS)
    if logprobs is not None and not isinstance(logprobs, list):
        raise DataError(f"{record.where}: {LOGPROBS} should be a list of numbers")
    values[LOGPROBS] = _of_targets(record, sample, LOGPROBS, logprobs)
    advantages, reward = fields.get(ADVANTAGES), fields.get(REWARD)
    if (advantages is None) == (reward is None):
        raise DataError(
            f"{record.where}: a rollout needs {ADVANTAGES} or a {REWARD}, one of the two; "
            f"found {field_names(record)}"
        )
    if reward is not None:
        reward = _number(record, REWARD, reward)
    elif not isinstance(advantages, list):
        advantages = _number(record, ADVANTAGES, advantages)
    values[ADVANTAGES] = _of_targets(record, sample, ADVANTAGES, advantages)
    numbers = {
        REWARD: math.nan if reward is None else reward,
        GROUP: float(groups.number(record)) if reward is not None else math.nan,
    }
    return sample._replace(values=values, numbers=numbers)


class Groups:
    """Numbers of groups in the order in which they first occur."""

    def __init__(self):
        self._known: dict[Hashable, int] = {}

    def number(self, record: Record) -> int:
        """The number of a rollout's group. Without a group, the answers to one prompt are one.
        DataError if the group is no name and no number."""
        fields = record.fields
        group = fields.get(GROUP)
        if group is None:
            group = fields.get("prompt", fields.get("prompt_ids"))
        key = tuple(group) if isinstance(group, list) else group
        try:
            return self._known.setdefault(key, len(self._known))
        except TypeError:
            raise DataError(
                f"{record.where}: {GROUP} should be a name or a number, found {group!r:.60}"
            ) from None


def _of_targets(record: Record, sample: Sample, name: str, value: Any) -> Float[np.ndarray, " n"]:
    """A value for each token of a sample, float32; NaN where there is none."""
    values = np.full(len(sample.input_ids), np.nan, np.float32)
    if isinstance(value, list):
        if len(value) != sample.target_tokens:
            raise DataError(
                f"{record.where}: {name} has {len(value)} numbers, and the completion has "
                f"{sample.target_tokens} tokens"
            )
        values[sample.target_mask] = [_number(record, name, each) for each in value]
    elif value is not None:
        values[sample.target_mask] = value
    return values


def _number(record: Record, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{record.where}: {name} should have finite numbers, found {value!r:.60}")
    return float(value)


def _tokens(record: Record, name: str) -> list[int]:
    tokens = record.fields.get(name)
    if not isinstance(tokens, list) or not all(type(t) is int and t >= 0 for t in tokens):
        raise DataError(f"{record.where}: {name} should be a list of token ids")
    return tokens
