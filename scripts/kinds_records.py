"""The table of adapter kinds, from the records of benchmark_kinds.py."""

from collections.abc import Sequence

from benchmark_records import NOT_MEASURED, Record, commands, markdown


def kinds_table(records: Sequence[Record]) -> str:
    """The figures with their bounds, and what they were made from."""
    if not records:
        return NOT_MEASURED
    rows = []
    for record in records:
        part, name = record["name"].split(", ", 1)
        error = part in ("memory", "peak")
        bound = record["bound"]
        limit = "none" if bound is None else f"{record['sense']} {_shown(bound, error)}"
        rows.append([part, name, f"**{_shown(record['value'], error)}**", limit, _sources(record)])
    devices = dict.fromkeys(record["device"] for record in records)
    versions = dict.fromkeys(f"jax {record['versions']['jax']}" for record in records)
    head = ["part", "figure", "measured", "bound", "made from"]
    return f"{commands(records)}{', '.join([*devices, *versions])}.\n\n{markdown(head, rows)}"


def _shown(value: float, error: bool) -> str:
    return f"{value:.1%}" if error else f"{value:.3f}"


def _sources(record: Record) -> str:
    of = record["baselines"]
    found = []
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
