"""The tables of the records of benchmark_sharding.py."""

from collections.abc import Sequence

from benchmark_records import Record, commands, limit, markdown, shown


def sharding_table(records: Sequence[Record]) -> str:
    """Meshes of several devices beside one device, which was measured in the same run; how well the
    planner predicts rounds, peak memory, idle shares and gains; and the other figures."""
    rows, predicted, others = [], [], []
    for r in records:
        of = r["baselines"]
        if "one GPU, tokens/s" in of:
            cells = [f"{of['one GPU, tokens/s']:,.0f}", f"{of['mesh, tokens/s']:,.0f}"]
            first = of["seconds to the end of the first round, mesh"]
            peaks = ", ".join(f"{peak:.1f}" for peak in of["peak memory of each device, GiB"])
            mesh, bound = _trained(r), limit(r)
            rows.append([mesh, f"**{r['value']:.3f}**", bound, *cells, f"{first:.0f}", peaks])
        elif r["unit"] in ("relative error", "share of the time"):
            quantity = r["name"].split(", ")[-1].split(" beside")[0]
            if "in the plan" in of:
                cells = [", ".join(f"{x:.1%}" for x in of["of each stage"])]
                cells.append(f"{of['in the plan']:.1%}")
            else:
                cells = [_with_unit(key, x) for key, x in of.items()]
            error, bound = f"**{r['value']:.1%}**", limit(r, ".0%")
            predicted.append([_trained(r), quantity, *cells, error, bound])
        else:
            others.append([r["name"], f"**{shown(r['value'])}**", r["unit"], limit(r)])
    head = ["mesh", "over one GPU", "bound", "one GPU, tokens/s", "mesh, tokens/s"]
    head += ["s to the end of the first round", "peak memory, GiB"]
    versions = ", ".join(f"{name} {version}" for name, version in records[0]["versions"].items())
    tables = [markdown(head, rows)] if rows else []
    if predicted:
        head = ["mesh", "quantity", "measured", "predicted", "error, or mean share", "bound"]
        tables.append(markdown(head, predicted))
    if others:
        tables.append(markdown(["figure", "value", "unit", "bound"], others))
    return f"{commands(records)}{records[0]['device']}, {versions}.\n\n" + "\n".join(tables)


def _trained(record: Record) -> str:
    """What a record of several devices trained: the mesh, and the backbone unless it is that of
    8B."""
    shape, mesh, *_ = record["name"].split(", ")
    return mesh if shape == "8B shape" else f"{shape}, {mesh}"


def _with_unit(name: str, values: float | Sequence[float]) -> str:
    """One value or several, with the unit that follows the comma in their name."""
    values = values if isinstance(values, list) else [values]
    return f"{', '.join(f'{x:.3g}' for x in values)} {name.split(', ')[1]}"
