"""What a training run prints, on a terminal and elsewhere."""

import io
import itertools
import json
import re
import signal
import time

import pytest
from rich.console import Console

from jaxmux import Interrupted
from jaxmux.engine import single_device
from jaxmux.runs.console import RunConsole


@pytest.fixture
def printed() -> io.StringIO:
    return io.StringIO()


def lines_of(printed: io.StringIO) -> list[str]:
    return printed.getvalue().splitlines()


def test_a_line_leaves_out_the_rate_as_long_as_it_is_unknown(train, make_task, tmp_path, printed):
    train(tmp_path, make_task(), console=RunConsole(Console(file=printed, width=80)))
    first, second, _ = (line for line in lines_of(printed) if line.startswith("tiny step "))
    assert re.fullmatch(r"tiny step 1/3 loss \d\.\d{4} lr \d\.\d\de[+-]\d\d", first)
    assert re.search(r" [\d,]+ tokens/s without padding ETA 0:\d\d:\d\d$", second)


@pytest.mark.parametrize("verbose", [False, True])
def test_where_the_start_goes_is_kept_and_shown_if_asked_for(
    verbose, train, make_task, tmp_path, printed
):
    console = RunConsole(Console(file=printed, width=80), verbose=verbose)
    begun = time.monotonic()
    train(tmp_path, make_task(), console=console)
    seconds = time.monotonic() - begun
    spans = json.loads((tmp_path / "start.json").read_text())
    parts = {span["what"]: span for span in spans}
    first, backbone, round_ = (
        parts[what] for what in ("start Python, import modules", "load the backbone", "first round")
    )
    assert first["begin"] == 0 and first["seconds"] < backbone["begin"] < round_["begin"]
    assert sum(parts[w]["seconds"] for w in ("load the backbone", "first round")) < seconds
    assert ("load the backbone" in printed.getvalue()) == verbose


def test_counts_of_one_are_singular(train, make_task, tmp_path, printed):
    console = RunConsole(Console(file=printed, width=80))
    train(tmp_path, make_task(steps=1), console=console, row_len=None, chunk_len=None)
    assert "task tiny: 14 samples, 1 step, longest " in printed.getvalue()
    (shape,) = (line for line in lines_of(printed) if line.startswith("microbatches of "))
    assert re.fullmatch(
        r"microbatches of \d+ rows? of \d+ tokens, chunks of \d+ \(\d+% padding\)", shape
    )


def test_the_notice_of_a_signal_is_printed_above_the_live_table(
    train, make_task, tmp_path, printed, monkeypatch, capfd
):
    """What is written past the live table, as to standard error, leaves a part of it behind."""
    accumulate, seen = single_device.accumulate, itertools.count(1)

    def accumulate_and_raise(*arguments):
        if next(seen) == 3:
            signal.raise_signal(signal.SIGINT)
        return accumulate(*arguments)

    monkeypatch.setattr(single_device, "accumulate", accumulate_and_raise)
    console = RunConsole(Console(file=printed, width=80, force_terminal=True))
    with pytest.raises(Interrupted):
        train(tmp_path, make_task(name="red-rank_16-learning_rate_0.002", steps=6), console=console)
    # The names of a sweep's configurations begin alike.
    assert " …_16-learning_rate_0.002 " in printed.getvalue()
    assert "stopping after this microbatch; a second signal stops at once" in printed.getvalue()
    assert "stopping" not in "".join(capfd.readouterr())
