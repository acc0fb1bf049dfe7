"""The report of `jaxmux plan --fits` as tables and lines for a terminal of 80 columns."""

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from rich.table import Table

from jaxmux.planner.costs import FitCell, fastest_fitting, largest_fitting
from jaxmux.planner.costs.memory_model import USABLE
from jaxmux.planner.numbers import numbered, size_text

from .plan_tables import NumberTable

if TYPE_CHECKING:
    from .plan_fits import Fits


def fit_tables(fits: "Fits") -> Iterator[Table | str]:
    """The tables and lines that describe what fits, in the order of the report."""
    yield (
        f"{fits.backbone} ({numbered(fits.layers, 'layer')}) on one device of "
        f"{fits.device_gib:g} GiB,\nof which training may use "
        f"{size_text(USABLE * fits.memory_bytes)}"
    )
    yield f"each task: {_task(fits)}"
    samples = numbered(fits.max_sequences, "sample")
    yield f"rows of {fits.row_len:,} tokens, at most {samples} in each"
    yield from _sources(fits)
    yield "\npeak memory in GiB by tokens of a microbatch, with the leanest layers' policy:"
    yield _memory(fits)
    for name, reason in fits.refused.items():
        yield f"{name}: {reason}"
    yield (
        "norms, dots, lean, full: what layers keep (fine_tune.remat), from most to least\n"
        "no: does not fit, with the memory that it would take\n"
    )
    if not any(cell.fits for cells in fits.cells.values() for cell in cells):
        yield "nothing fits"
        return
    device = next(iter(fits.sources.values())).device
    yield f"the largest and the fastest microbatch, with the speed on {device}:"
    yield _speeds(fits)
    yield "tokens/s leave updates out; --profile=FILE gives those of a device that was measured"


def _task(fits: "Fits") -> str:
    """The contents of a slot, for example `LoRA of rank 16 on 7 linears, with adamw`."""
    pool = fits.pool
    adapters = [kind.kind for kind in pool.others]
    if pool.modules:
        linears = numbered(len(pool.modules), "linear")
        adapters = [f"LoRA of rank {pool.rank} on {linears}", *adapters]
    return f"{', '.join(adapters)}, with {pool.optimizer}"


def _sources(fits: "Fits") -> Iterator[str]:
    """The origin of the costs and, if there are several origins, the formats of each."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, source in fits.sources.items():
        names.setdefault((source.kind, source.text), []).append(name)
    for (kind, text), formats in names.items():
        which = f" of {', '.join(formats)}" if len(names) > 1 else ""
        yield f"costs{which} are {kind}: {text}"
    yield from dict.fromkeys(note for source in fits.sources.values() for note in source.notes)


def _memory(fits: "Fits") -> Table:
    columns = [numbered(tasks, "task") for tasks in _tasks(fits)]
    table = NumberTable("linears,\nweights", "tokens", *columns)
    # With these settings, five numbers of tasks fit into 80 columns.
    table.pad_edge, table.columns[0].no_wrap = False, True
    for name, cells in fits.cells.items():
        table.add_section()
        labels = iter((name, f"{fits.weights[name] / 2**30:.3g} GiB"))
        for tokens, row in groupby(cells, key=lambda cell: cell.tokens):
            table.add_row(next(labels, ""), f"{tokens:,}", *map(_need, row))
    return table


def _tasks(fits: "Fits") -> list[int]:
    return sorted({cell.tasks for cells in fits.cells.values() for cell in cells})


def _need(cell: FitCell) -> str:
    """The text of a cell: `20.1 lean`, or `no 31.2` if the cell does not fit."""
    gib = cell.peak_bytes / 2**30
    digits = 2 if gib < 1 else 1 if gib < 100 else 0
    size = f"{gib:.{digits}f}"
    return f"{size} {next(iter(cell.remat))}" if cell.fits else f"no {size}"


def _speeds(fits: "Fits") -> Table:
    table = NumberTable("", "linears in", "largest", "tokens/s", "fastest", "tokens/s", texts=2)
    for tasks in _tasks(fits):
        table.add_section()
        label = numbered(tasks, "task")
        for name, cells in fits.cells.items():
            largest, fastest = largest_fitting(cells, tasks), fastest_fitting(cells, tasks)
            if largest and fastest:
                table.add_row(label, name, *_speed(largest), *_speed(fastest))
                label = ""
    return table


def _speed(cell: FitCell) -> tuple[str, str]:
    return f"{cell.tokens:,}", f"{cell.tokens_per_second:,.0f}"
