"""Writes docs/task.schema.json, the JSON Schema of tasks, from the fields of `Task` and its parts.

Run it after a change of a field, its check, its default or its description:

    python scripts/write_task_schema.py
"""

import json
from pathlib import Path

from jaxmux.runs import task_schema

FILE = Path(__file__).resolve().parents[1] / "docs" / "task.schema.json"


def schema_text() -> str:
    """The content of the file."""
    return json.dumps(task_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(schema_text(), encoding="utf-8")
