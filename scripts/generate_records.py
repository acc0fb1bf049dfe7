"""The table of the records of benchmark_generate.py."""

from collections.abc import Sequence

from benchmark_records import NOT_MEASURED, Record, figures_table, limit


def _shown(value: float | str) -> str:
    """A number with about four digits; a text, such as why there is no number, as it is."""
    if isinstance(value, str):
        return value
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def generate_table(records: Sequence[Record]) -> str:
    """The figures with their bounds and baselines."""
    if not records:
        return NOT_MEASURED
    rows = []
    for record in records:
        what, case, shape = record["name"].split(", ", 2)
        sequences, adapters = case.split("x")
        beside = ", ".join(f"{name} {_shown(value)}" for name, value in record["baselines"].items())
        value = f"**{record['value']:,.0f}** {record['unit']}"
        rows.append([what, sequences, adapters, shape, value, limit(record), beside])
    head = ["figure", "sequences", "adapters", "lengths", "measured", "bound", "of the same run"]
    return figures_table(records, head, rows)
