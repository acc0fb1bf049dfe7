"""Lines of JSON, whose numbers may be missing but are never other than finite."""

import json
import math
from collections.abc import Mapping
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
