"""The most that one tenant may ask of a server, in all specifications together."""

import dataclasses
from functools import partial

from jaxmux.field_checks import integer

from .specification_limits import SpecificationLimits

_most = partial(integer, least=1)


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
