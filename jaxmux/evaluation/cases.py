"""The cases of an evaluation: an adapter with held-out samples."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxmux.data import StoredSamples
from jaxmux.data.stored_samples import target_tokens


class EvalCase(NamedTuple):
    """An adapter, from `import_adapter`, and held-out samples.

    Attributes:
      data: name of the held-out data.
      samples: at least one.
      tokenizer: the tokenizer with which the samples were read.
    """

    task: str
    data: str
    spec: Any
    adapter: Any
    samples: StoredSamples
    tokenizer: Any

    @property
    def target_tokens(self) -> int:
        return target_tokens(self.samples)


def first_with_data(cases: Sequence[EvalCase]) -> list[int]:
    """The index of the first case with the same samples, for each case. The samples of all cases
    come from one `Loaded`."""
    first_with_key: dict[Any, int] = {}
    return [first_with_key.setdefault(case.samples.tokens_key, i) for i, case in enumerate(cases)]
