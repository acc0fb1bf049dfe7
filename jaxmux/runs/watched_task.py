"""What a server remembers of a specification in a watched directory."""

import dataclasses
from collections.abc import Mapping
from concurrent.futures import Future

from .watched_directory import Signature
from .watched_specification import WatchedSpecification


@dataclasses.dataclass
class WatchedTask:
    """A specification and what has become of it.

    Attributes:
      task: the name of its task in the server.
      seen: its signature in the last poll; None if it was missing.
      missing: number of polls in a row in which it was missing.
      changes: number of polls in a row in which it had changed, or a file that it names.
      read: its signature when it was read; None before.
      wanted: what it asks for; None if it is refused as it is.
      files: the files that it names, with their signatures in the last poll.
      refused: `files` as they were when they were refused.
      retry_at: the time before which nothing is tried again.
      resume_at: the time before which a task is not resumed that the server has paused.
      error: why it is refused, or a change of it, or what it waits for.
      waits: whether it is not refused, but waits.
      commands: the commands that have been given and have no answer yet.
    """

    task: str
    seen: Signature | None = None
    missing: int = 0
    changes: int = 0
    read: Signature | None = None
    wanted: WatchedSpecification | None = None
    files: Mapping[str, Signature | None] | None = None
    refused: Mapping[str, Signature | None] | None = None
    retry_at: float = 0.0
    resume_at: float = 0.0
    error: str | None = None
    waits: bool = False
    commands: list[tuple[str, Future[None]]] = dataclasses.field(default_factory=list)
