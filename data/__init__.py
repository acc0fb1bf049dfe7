"""Data: sources, tokenization, per-task global batches, packing into microbatches, and running
ahead of the device."""

from .batches import GlobalBatches
from .errors import DataError
from .microbatch import Microbatch
from .packing import fill_microbatch
from .prefetch import Prefetch
from .samples import Sample
from .sources import Record, Source, read_records
from .tokenization import Samples, load_samples, load_tokenizer

__all__ = [
    "DataError",
    "GlobalBatches",
    "Microbatch",
    "Prefetch",
    "Record",
    "Sample",
    "Samples",
    "Source",
    "fill_microbatch",
    "load_samples",
    "load_tokenizer",
    "read_records",
]
