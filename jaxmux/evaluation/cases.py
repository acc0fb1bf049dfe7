"""What is evaluated: an adapter on some held-out samples."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxmux.data import StoredSamples
from jaxmux.data.stored_samples import target_tokens


class Case(NamedTuple):
    """An adapter, and held-out samples.

    Attributes:
      task: name of the task.
      data: name of the held-out data.
      spec: the specification of the adapter.
      adapter: its weights, from `import_adapter`.
      samples: the samples, at least one.
      tokenizer: the tokenizer that read them.
    """

    task: str
    data: str
    spec: Any
    adapter: Any
    samples: StoredSamples
    tokenizer: Any

    @property
    def target_tokens(self) -> int:
        """Number of tokens that count in the loss."""
        return target_tokens(self.samples)


def first_with_data(cases: Sequence[Case]) -> list[int]:
    """By case, the index of the first case that has the same samples.

    Args:
      cases: the cases; their samples come from one `Loaded`.
    """
    found: dict[Any, int] = {}
    return [found.setdefault(case.samples.tokens_key, i) for i, case in enumerate(cases)]
