"""The table of the records of benchmark_generate.py."""

from collections.abc import Sequence

from benchmark_records import NOT_MEASURED, Record, figures_table, limit


def generate_table(records: Sequence[Record]) -> str:
    """The figures with their bounds and baselines."""
    if not records:
        return NOT_MEASURED
    rows = []
    for record in records:
        what, case, shape = record["name"].split(", ", 2)
        sequences, adapters = case.split("x")
        beside = ", ".join(
            f"{name} {value:,.4g}" if value < 1000 else f"{name} {value:,.0f}"
            for name, value in record["baselines"].items()
        )
        value = f"**{record['value']:,.0f}** {record['unit']}"
        rows.append([what, sequences, adapters, shape, value, limit(record), beside])
    head = ["figure", "sequences", "adapters", "lengths", "measured", "bound", "of the same run"]
    return figures_table(records, head, rows)
