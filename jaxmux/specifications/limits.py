"""Limits of one specification that a tenant has written, and of all specifications of one
tenant."""

from typing import Annotated

from pydantic import Field

from jaxmux.field_checks import EXACT, Count, checked_dataclass

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30


@checked_dataclass
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

    specification_bytes: Count = 64 * _KIB
    data_bytes: Count = 64 * _MIB
    record_bytes: Count = _MIB
    records: Count = 1_000_000
    adapter_bytes: Count = _GIB
    rank: Count = 256
    batch_size: Count = 1024
    max_length: Count = 8192
    steps: Count = 100_000
    epochs: Count = 1000
    prompt_characters: Count = 4096
    target_modules: Count = 1024
    calibration_tokens: Count = 8192


@checked_dataclass
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

    priority: Annotated[int, Field(ge=-100), EXACT] = 100
    specifications: Count = 1000
    tasks: Count = 100_000
    folder_entries: Count = 10_000
    copied_bytes: Count = 10 * 2**30
