"""From a source of records to the arrays of a microbatch.

Records are read, rendered as text, tokenized, drawn as the global batches of a task, and copied
into microbatches; a thread does this ahead of the device.
"""

from .batches import GlobalBatches
from .errors import DataError
from .microbatch import Microbatch, fill_microbatch
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
