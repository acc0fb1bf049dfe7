"""Turns the records of a source of training data into the arrays of a microbatch.

`read_records` yields the records of a `Source`. `load_samples` renders them as text and tokenizes
them into `Samples`, whose tokens are in a `TokenFile`. `GlobalBatches` draws the global batches of
a task from these samples. `fill_microbatch` copies placed samples into a `Microbatch`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .chat_templates import Rendering
from .errors import DataError
from .rollouts import rollout
from .sources import Record, Source, SplitPart, read_records
from .stored_samples import Sample, StoredSamples, TokenFile, stored
from .tokenization import Samples, load_samples
from .tokenizers import load_tokenizer

if TYPE_CHECKING:
    from .batches import GlobalBatches, Microbatch, fill_microbatch

__all__ = [
    "DataError",
    "GlobalBatches",
    "Microbatch",
    "SplitPart",
    "Record",
    "Rendering",
    "Sample",
    "Samples",
    "Source",
    "StoredSamples",
    "TokenFile",
    "fill_microbatch",
    "load_samples",
    "load_tokenizer",
    "read_records",
    "rollout",
    "stored",
]


def __getattr__(name: str) -> Any:
    # The module `batches` imports JAX, which is too slow to import for help texts.
    if name in ("GlobalBatches", "Microbatch", "fill_microbatch"):
        return getattr(import_module(f"{__name__}.batches"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
