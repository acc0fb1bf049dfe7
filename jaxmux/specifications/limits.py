"""Limits of one specification that a tenant has written, and of all specifications of one
tenant."""

import dataclasses
from functools import partial

from jaxmux.field_checks import check_fields, integer

_most = partial(integer, least=1)
_KIB, _MIB, _GIB = 2**10, 2**20, 2**30


@dataclasses.dataclass(frozen=True)
class SpecificationLimits:
    """Limits of tasks that come as JSON from tenants who are not trusted.

    They are checked before the memory is taken. Trusted tasks, of configs and of Python, have no
    such limits.

    Attributes:
      specification_bytes: bytes of a specification, and of the adapter_config.json of an adapter
        from which a task begins.
      data_bytes: bytes of one data file. The tokenized samples of a task are in a temporary file
        with up to 4 bytes for a byte of the data. In memory are 20 bytes for each sample, and at
        most 4 MiB of the tokens.
      record_bytes: bytes of one line of a data file. While it is tokenized, it takes up to 280
        bytes of memory for each.
      records: lines of one data file, blank lines included.
      adapter_bytes: bytes of the weights of an adapter from which a task begins.
      rank: rank of an adapter. The arrays of all tasks are as large as those of the largest rank.
      batch_size: samples in a global batch (the samples of one optimizer update).
      max_length: tokens of a sample.
      steps: global batches that a task trains, also where it gives epochs, and steps of a warm-up.
      epochs: number of times that a task trains on each of its samples.
      prompt_characters: characters of the prompt that is completed after training, and of a text
        with which a trained prompt begins.
      target_modules: names in a list of target modules.
      calibration_tokens: tokens that the backbone reads on the host for the initial values of an
        adapter.

    Raises:
      ValueError: a limit is not an integer of at least 1.
    """

    specification_bytes: int = _most(64 * _KIB)
    data_bytes: int = _most(64 * _MIB)
    record_bytes: int = _most(_MIB)
    records: int = _most(1_000_000)
    adapter_bytes: int = _most(_GIB)
    rank: int = _most(256)
    batch_size: int = _most(1024)
    max_length: int = _most(8192)
    steps: int = _most(100_000)
    epochs: int = _most(1000)
    prompt_characters: int = _most(4096)
    target_modules: int = _most(1024)
    calibration_tokens: int = _most(8192)

    def __post_init__(self):
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class TenantLimits(SpecificationLimits):
    """Limits of a tenant who is not trusted: those of each specification, from
    `SpecificationLimits`, and those of all specifications of the tenant together.

    Attributes:
      priority: the highest priority of a task; the lowest is -100. With 0, no tenant can have tasks
        trained before those of others.
      specifications: specifications that the tenant's folder may hold, and tasks of the tenant that
        have not ended. Further ones are refused.
      tasks: tasks of the tenant that the server knows, those that have ended included.
      folder_entries: files and folders that lie directly in the tenant's folder. In a folder with
        more, only the specifications are read that are known.
      copied_bytes: bytes of the copies of the tenant's files, for tasks that have not ended.

    Raises:
      ValueError: a limit is not an integer within its range.
    """

    priority: int = integer(100, least=-100)
    specifications: int = _most(1000)
    tasks: int = _most(100_000)
    folder_entries: int = _most(10_000)
    copied_bytes: int = _most(10 * 2**30)
