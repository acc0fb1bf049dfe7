"""Lines of JSON, whose numbers may be missing but are never other than finite."""

import json
import math
import mmap
from collections.abc import Iterator, Mapping
from typing import Any


def json_line(fields: Mapping[str, Any]) -> bytes:
    """An object as a line of JSON. Numbers that are not finite become null.

    Args:
      fields: the entries of the object.
    """
    finite = {key: finite_or_none(value) for key, value in fields.items()}
    return json.dumps(finite).encode() + b"\n"


def finite_or_none(value: Any) -> Any:
    """The value, or None for a number that is not finite, which JSON cannot express.

    Args:
      value: any value.
    """
    return None if isinstance(value, float) and not math.isfinite(value) else value


def objects(content: bytes) -> Iterator[dict[str, Any]]:
    """The objects in lines of JSON. Damaged lines are left out.

    Args:
      content: the lines.
    """
    for line in content.split(b"\n"):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found


def objects_backwards(content: mmap.mmap | bytes) -> Iterator[dict[str, Any]]:
    """The objects in lines of JSON, from the last one on. Damaged lines are left out.

    Args:
      content: the lines.
    """
    end = len(content)
    while end:
        begin = content.rfind(b"\n", 0, end - 1) + 1
        yield from objects(content[begin:end])
        end = begin
