"""Writes docs/task.schema.json, the JSON Schema of tasks, from the fields of `Task` and its parts,
and docs/watched_task.schema.json, that of the files of a watched directory.

Run it after a change of a field, its check, its default or its description:

    python scripts/write_task_schema.py
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxmux.specifications import watched_schema
from jaxmux.specifications.schema import task_schema

_DOCS = Path(__file__).resolve().parents[1] / "docs"
FILES = {"task.schema.json": task_schema, "watched_task.schema.json": watched_schema}


def schema_text(make: Callable[[], dict[str, Any]] = task_schema) -> str:
    """The content of a file.

    Args:
      make: function that makes the schema.
    """
    return json.dumps(make(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for name, make in FILES.items():
        (_DOCS / name).write_text(schema_text(make), encoding="utf-8")
