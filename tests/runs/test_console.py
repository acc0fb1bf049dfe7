"""What a training run prints, on a terminal and elsewhere."""

import io
import itertools
import json
import math
import random
import re
import shlex
import signal
import time

import pytest
from rich.console import Console

from jaxmux import SGD, Interrupted
from jaxmux.cli.main import run_command
from jaxmux.cli.plan_tables import NumberTable
from jaxmux.engine.devices import programs
from jaxmux.runs.console import RunConsole, live_table
from jaxmux.server import Meter, TaskStatus
from jaxmux.server.console import ServerConsole


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
    lengths = {"row_len": None, "chunk_len": None, "max_sequences": None}
    train(tmp_path, make_task(steps=1, batch_size=14), console=console, **lengths)
    assert "task tiny: 14 samples, 1 step, longest " in printed.getvalue()
    (shape,) = (line for line in lines_of(printed) if line.startswith("microbatches of "))
    assert re.fullmatch(
        r"microbatches of \d+ rows? of \d+ tokens, chunks of \d+ \(\d+% padding\)", shape
    )


def test_the_notice_of_a_signal_is_printed_above_the_live_table(
    train, make_task, tmp_path, printed, monkeypatch, capfd
):
    """What is written past the live table, as to standard error, leaves a part of it behind."""
    accumulate, seen = programs.accumulate, itertools.count(1)

    def accumulate_and_raise(*arguments):
        if next(seen) == 3:
            signal.raise_signal(signal.SIGINT)
        return accumulate(*arguments)

    accumulate_and_raise.lower = programs.accumulate.lower
    monkeypatch.setattr(programs, "accumulate", accumulate_and_raise)
    console = RunConsole(Console(file=printed, width=80, force_terminal=True))
    with pytest.raises(Interrupted):
        train(tmp_path, make_task(name="red-rank_16-learning_rate_0.002", steps=6), console=console)
    # The names of tenants end alike, those of a sweep's configurations begin alike.
    assert re.search(r" red-r\S*…\S*_rate_0\.002 ", printed.getvalue())
    assert "stopping after this microbatch; a second signal stops at once" in printed.getvalue()
    assert "stopping" not in "".join(capfd.readouterr())


def rows_of(count: int) -> list[tuple[str, ...]]:
    name = "tenant{0}.red-rank_16-learning_rate_0.0{0:02}"
    return [(name.format(i), f"{i}/1000", "0.1234", "1.00e-03", "12,345") for i in range(count)]


@pytest.mark.parametrize("count", [1, 15, 16, 17, 32, 500])
def test_a_live_table_fits_a_terminal_of_24_lines_with_its_footer(printed, count):
    console = Console(file=printed, width=80, height=24, force_terminal=True, color_system=None)
    headings = ("task", "step", "loss", "lr", "tokens/s")
    console.print(live_table(console, headings, rows_of(count), "30 running\ntokens/s: of a task"))
    lines = [line.rstrip() for line in lines_of(printed)]
    assert len(lines) < 24 and max(map(len, lines)) <= 80
    assert lines[-2:] == ["30 running", "tokens/s: of a task"]
    shown = [line.split() for line in lines if "/1000" in line]
    more = next((int(line.split()[1]) for line in lines if line.endswith(" more")), 0)
    assert len(shown) + more == count
    # No number is cut, and names are told apart at both ends.
    assert all(tuple(row[1:]) == rows_of(count)[i][1:] for i, row in enumerate(shown))
    assert len({row[0] for row in shown}) == len(shown)


def test_the_live_table_shows_the_swept_values(printed):
    values = itertools.product((2, 16), (0.002, 0.0005), ("all-linear", "q_proj.v_proj"))
    name = "pirate-rank_{}-learning_rate_{}-target_modules_{}"
    rows = [(name.format(*each), "5/12") for each in values]
    console = Console(file=printed, width=55, height=24)
    console.print(live_table(console, ("task", "a number of steps"), rows, ""))
    shown = [line.split()[0] for line in lines_of(printed) if "5/12" in line]
    assert len({*shown}) == 8 and "…16…0.0005…q_proj.v_proj" in shown


@pytest.mark.parametrize("seed", range(30))
def test_names_in_tables_are_broken_between_words_only(seed):
    dice = random.Random(seed)
    text = "".join(dice.choices("ab1_-./,= ", k=dice.randint(1, 60))).strip() or "a"
    table, printed = NumberTable("task", "number"), io.StringIO()
    table.add_row(text, "9" * 50)
    console = Console(file=printed, width=80, markup=False)
    console.print(table)
    lines = [line.replace("9", "").strip() for line in printed.getvalue().splitlines()[3:-1]]
    assert "".join("".join(lines).split()) == "".join(text.split())
    for line, following in itertools.pairwise(lines):
        longest = max(map(len, re.split(r"[\s_./=:;,+-]+", text)))
        broken = line[-1:].isalnum() and following[:1].isalnum()
        # A space at the end of a line is not seen.
        assert not broken or longest > 12 or f"{line[-1]} " in text


def test_skipped_updates_are_warned_of_once_and_shown_as_nan(train, make_task, tmp_path, printed):
    ruined = make_task("ruined", optimizer=SGD(1e30, clip_norm=None), steps=6)
    console = RunConsole(Console(file=printed, width=80), log_every=1)
    summary = train(tmp_path, ruined, make_task("good"), console=console, max_bad_steps=50)
    assert summary.tasks["ruined"]["bad_streak"] == 5
    text = printed.getvalue()
    assert text.count("is skipped, because its loss, gradient or update is not finite") == 1
    assert text.count("ruined step 2/6 loss nan lr") == text.count("ruined step 6/6 loss nan") == 1
    assert re.search(r"ruined +succeeded +6 +\d\.\d{4} → nan ", text)
    assert "task ruined: warning: 5 of its 6 updates were skipped, because" in text


def test_the_commands_at_the_end_can_be_pasted(train, make_task, data, tmp_path, printed, capsys):
    folder = tmp_path / "my run's"
    tasks = [
        make_task("plain"),
        make_task("measured", eval_data=data["short.eval"], sample_prompt='red "apple"\n$HOME'),
    ]
    console = RunConsole(Console(file=printed, width=80))
    for _ in range(2):
        train(folder, *tasks, console=console)
    first, second = printed.getvalue().split("\nnext:\n")[1:]
    lines = second.splitlines()
    assert first.startswith(second)
    commands = [shlex.split(line) for line in second.strip().split("\n  jaxmux ")]
    commands[0] = commands[0][1:]
    assert [words[0] for words in commands] == ["ui", "eval", "generate", "export"], lines
    assert commands[0][1] == str(folder)
    for name, *options in commands[1:]:
        assert run_command(name, options, prog=f"jaxmux {name}") == 0
    assert 'red "apple"\n$HOME' in capsys.readouterr().out
    assert (tmp_path / "my run's-merged" / "plain" / "model.safetensors").exists()


def status(state: str, reason: str | None = None, **fields) -> TaskStatus:
    defaults = TaskStatus("red", state, reason, 0, 7, 9, 0.5, None, None, 0.0, Meter(), ())
    return defaults._replace(**fields)


def test_the_end_of_a_servers_task_has_its_own_word(printed):
    console = ServerConsole(Console(file=printed, width=120))
    for end in (("stopped early", "trained for 9 s"), ("succeeded", None), ("cancelled", None)):
        console.start([status(*end), status("running", name="blue")])
        console.start([])
        console.show([status(*end)], "adapters")
    assert lines_of(printed) == [
        "tasks of an earlier start: 1 running, 1 stopped early",
        "red: stopped early after 7 steps, loss 0.5000 (trained for 9 s)",
        "adapter red: adapters/red",
        "tasks of an earlier start: 1 running, 1 succeeded",
        "red: succeeded after 7 steps, loss 0.5000",
        "adapter red: adapters/red",
        "tasks of an earlier start: 1 running, 1 cancelled",
        "red: cancelled after 7 steps",
    ]


def test_a_server_warns_once_of_skipped_updates(printed):
    console = ServerConsole(Console(file=printed, width=120), log_every=1)
    for step, loss in enumerate([0.5, math.nan, math.nan, math.nan], start=1):
        console.show([status("running", step=step, loss=loss)], "adapters")
    assert printed.getvalue().count("the update of step 2 is skipped") == 1
    assert printed.getvalue().count("is skipped") == 1
    assert "red step 4/9 loss nan" in printed.getvalue()
