"""The table of adapter kinds, from the records of benchmark_kinds.py."""

from collections.abc import Sequence

from benchmark_records import NOT_MEASURED, Record, figures_table, limit

# By part, how its figures are written; ratios of times have no entry.
FORMS = {"memory": ".1%", "peak": ".1%", "programs": ".0f"}


def kinds_table(records: Sequence[Record]) -> str:
    """The figures with their bounds, and what they were made from."""
    if not records:
        return NOT_MEASURED
    rows = []
    for record in records:
        part, name = record["name"].split(", ", 1)
        form = FORMS.get(part, ".3f")
        value = f"**{record['value']:{form}}**"
        rows.append([part, name, value, limit(record, form), _sources(record)])
    return figures_table(records, ["part", "figure", "measured", "bound", "made from"], rows)


def _sources(record: Record) -> str:
    of = record["baselines"]
    found = [f"{of['programs']} programs on a {record['device']}"] if "programs" in of else []
    if "median" in of:
        found.append(f"median {of['median']:.4f}")
    if "95% interval" in of:
        low, high = of["95% interval"]
        found.append(f"interval {low:.4f} to {high:.4f} of {of['turns']} pairs")
    units = {"ms of a microbatch": "ms", "bytes": "MB", "peak GiB": "GiB", "predicted": "GiB"}
    for name, value in of.items():
        unit = next((unit for start, unit in units.items() if name.startswith(start)), None)
        if unit:
            what = {"peak GiB": "measured", "predicted peak GiB": "predicted"}.get(name)
            number = value / 1e6 if unit == "MB" else value
            found.append(f"{what or name.split(', ')[1]} {number:.4g} {unit}")
    return ", ".join(found)
