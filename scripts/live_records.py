"""The table of tasks that come and go, from the records of benchmark_live.py."""

from collections.abc import Sequence

from benchmark_records import NOT_MEASURED, Record, commands, markdown

PREFIX = "live, "


def live_table(records: Sequence[Record]) -> str:
    """The figures with their bounds, by device."""
    own = [record for record in records if record["name"].startswith(PREFIX)]
    if not own:
        return NOT_MEASURED
    rows = []
    for record in own:
        _, part, name = record["name"].split(", ", 2)
        bound = f"{record['sense']} {_shown(record['bound'], record['unit'])}"
        value = _shown(record["value"], record["unit"])
        rows.append([part, name, f"**{value}**", bound, record["device"]])
    versions = {f"jax {record['versions']['jax']}": None for record in own}
    head = ["part", "figure", "measured", "bound", "device"]
    return f"{commands(own)}{', '.join(versions)}.\n\n{markdown(head, rows)}"


def _shown(value: float, unit: str) -> str:
    if unit == "s":
        return f"{1000 * value:.3g} ms"
    return f"{value:.1%}" if unit == "ratio" else f"{value:g}"
