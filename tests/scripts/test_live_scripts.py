"""The scripts that measure servers: their records, and what the soak calls growth."""

import json
import sys
import threading

import benchmark_live
import pytest
import soak_server
from live_records import live_table
from soak_server import Usage

FIELDS = {"name", "value", "bound", "sense", "unit", "command", "device", "versions", "baselines"}
FLAT = [Usage(500, 9, 30)] * 3 + [Usage(800, 12, 34)] * 6


def grown(**after):
    return FLAT[:6] + [FLAT[-1]._replace(**after)] * 3


@pytest.fixture
def main(monkeypatch, tmp_path):
    """Calls a script with arguments; returns its result and its records."""

    def call(script, *arguments):
        path = tmp_path / "records.json"
        arguments = [f"{script.__name__}.py", *arguments, "--out", str(path)]
        monkeypatch.setattr(sys, "argv", arguments)
        result = script.main()
        return result, json.loads(path.read_text()) if path.exists() else []

    return call


@pytest.fixture
def judge(main, monkeypatch):
    """The exit status and the records of a soak with the given counts."""

    def call(counts):
        monkeypatch.setattr(soak_server, "soak", lambda args: (counts, {"commands": 7}))
        return main(soak_server)

    return call


def test_a_server_that_stays_as_it_is_after_the_warm_up_passes(judge):
    status, records = judge(FLAT)
    assert status == 0
    assert [record["value"] for record in records] == [1, 0, 0]
    for record in records:
        assert record.keys() == FIELDS and record["name"].startswith("live, soak, ")
        assert record["baselines"]["commands"] == 7
    assert "open files that the last third has more than the second" in live_table(records)


@pytest.mark.parametrize(
    ("after", "what"),
    [
        ({"memory": 830}, "resident memory"),
        ({"files": 13}, "open files"),
        ({"threads": 40}, "threads"),
    ],
)
def test_growth_fails_and_is_named(after, what, judge, capsys):
    assert judge(grown(**after))[0] == 1
    assert f"the server grows: {what}" in capsys.readouterr().out


def test_less_memory_and_a_little_more_pass(judge):
    assert judge(grown(memory=700, files=5, threads=30))[0] == 0
    assert judge(grown(memory=815))[0] == 0


def test_too_few_counts_are_no_result(judge):
    assert judge(FLAT[:2]) == (2, [])


def test_all_threads_of_the_process_are_counted():
    begun, ends = threading.Event(), threading.Event()
    before = Usage.now()
    thread = threading.Thread(target=lambda: (begun.set(), ends.wait()))
    thread.start()
    begun.wait()
    with open(__file__):
        during = Usage.now()
    ends.set()
    thread.join()
    assert during.files > before.files and during.threads > before.threads
    assert 10 < before.memory < 100_000


def test_a_dry_run_of_the_planning_writes_its_record(main):
    _, records = main(benchmark_live, "planning", "--tasks", "8")
    (record,) = records
    assert record.keys() == FIELDS and record["name"].startswith("live, planning, ")
    assert 0 < record["value"] < 5
