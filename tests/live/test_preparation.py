"""Data are read a few at a time, and no source holds up the others for long."""

import threading
import time
from collections import Counter
from datetime import datetime

import pytest

from jaxmux.data.chat_templates import TemplateClock
from jaxmux.server.data import MOST_READINGS, Preparation
from jaxmux.tasks import Task, TaskError


class Sources:
    """Sources of data that are slow until they are let go."""

    def __init__(self):
        self._changed = threading.Condition()
        self._gone: set[str] = set()
        self.begun: list[str] = []

    def read(self, task: Task) -> str:
        with self._changed:
            self.begun.append(task.name)
            self._changed.notify_all()
            self._changed.wait_for(lambda: {task.name, "all"} & self._gone)
        return f"{task.name} {task.seed}"

    def let_go(self, *names: str) -> None:
        with self._changed:
            self._gone |= {*names}
            self._changed.notify_all()

    def wait_for(self, *names: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: {*names} <= {*self.begun}, timeout=10), self.begun


@pytest.fixture
def sources():
    sources = Sources()
    yield sources
    sources.let_go("all")


@pytest.fixture
def prepare(sources):
    """Begins to prepare tasks; `ended` gives the results that come."""

    def begin(*names, **options):
        preparation = Preparation(sources.read, lambda: None, **options)
        readings = {name: preparation.add(Task(name, "none.jsonl", steps=1), {}) for name in names}
        return preparation, readings

    return begin


def ended(preparation, count: int) -> list:
    """The next results: text that was read, or the reason of a failure."""
    found, end = [], time.monotonic() + 10
    while len(found) < count and time.monotonic() < end:
        found += [str(own.result) for own in preparation.take()]
        time.sleep(0.002)
    return found


def still(preparation) -> bool:
    """Whether nothing comes in some time."""
    time.sleep(0.05)
    return preparation.take() == []


def test_a_few_are_read_at_once_in_the_order_in_which_they_came(prepare, sources):
    preparation, _ = prepare(*"abcd", at_once=2)
    sources.wait_for(*"ab")
    assert [reading.task.name for reading in preparation.waiting] == ["c", "d"]
    assert still(preparation) and sorted(sources.begun) == ["a", "b"]
    sources.let_go("b")
    assert ended(preparation, 1) == ["b 0"]
    sources.wait_for("c")
    assert "d" not in sources.begun


def test_slow_sources_hold_up_others_only_for_a_short_time(prepare, sources):
    began = time.monotonic()
    preparation, _ = prepare(*"abcde", at_once=2, slow_seconds=0.1)
    sources.let_go(*"cde")
    assert preparation.seconds_left <= 0.1
    assert sorted(ended(preparation, 3)) == ["c 0", "d 0", "e 0"]
    assert 0.1 <= time.monotonic() - began < 5
    # They are slow, and not given up. Nothing waits for their places.
    assert preparation.seconds_left > 500
    sources.let_go(*"ab")
    assert sorted(ended(preparation, 2)) == ["a 0", "b 0"]
    assert preparation.seconds_left is None


def test_slow_sources_are_given_up_in_the_end(prepare, sources):
    preparation, _ = prepare("a", at_once=1, slow_seconds=0.02, most_seconds=0.1)
    (reason,) = ended(preparation, 1)
    assert reason == "task 'a': its data were not read within 0.1 s"
    sources.let_go("a")
    assert still(preparation)


def test_there_is_a_limit_of_readings(prepare, sources):
    names = [f"t{i}" for i in range(MOST_READINGS + 8)]
    preparation, _ = prepare(*names, at_once=2, slow_seconds=0.001)
    end = time.monotonic() + 10
    while len(sources.begun) < MOST_READINGS and time.monotonic() < end:
        preparation.take()
        time.sleep(0.002)
    assert still(preparation) and len(sources.begun) == MOST_READINGS
    sources.let_go(names[0])
    assert ended(preparation, 1) == ["t0 0"]
    sources.wait_for(names[MOST_READINGS])


def test_a_dropped_reading_frees_its_place_and_its_result_is_ignored(prepare, sources):
    preparation, readings = prepare(*"abc", at_once=1)
    sources.wait_for("a")
    preparation.drop(readings["b"])
    preparation.drop(readings["a"])
    sources.wait_for("c")
    assert "b" not in sources.begun
    # The same name again, while the first thread still reads.
    preparation.add(Task("a", "none.jsonl", steps=1, seed=7), {})
    sources.let_go(*"ac")
    assert sorted(ended(preparation, 2)) == ["a 7", "c 0"]
    assert still(preparation) and Counter(sources.begun) == {"a": 2, "c": 1}


def test_a_result_that_has_come_is_ignored_too_once_it_is_dropped(prepare, sources):
    preparation, readings = prepare("a", at_once=1)
    sources.let_go("a")
    while preparation.seconds_left is not None:
        time.sleep(0.001)
    preparation.drop(readings["a"])
    assert preparation.take() == []


def test_readings_that_were_set_aside_come_last_and_hold_up_nobody(prepare, sources):
    preparation, readings = prepare(*"abcd", at_once=1)
    sources.wait_for("a")
    for name in "ba":
        preparation.set_aside(readings[name], True)
    # The place of "a" is free at once; "b" lets all others go before it.
    sources.wait_for("c")
    assert [reading.task.name for reading in preparation.waiting] == ["d"]
    sources.let_go(*"ac")
    assert sorted(ended(preparation, 2)) == ["a 0", "c 0"]
    sources.wait_for("d")
    assert "b" not in sources.begun
    sources.let_go("d")
    sources.wait_for("b")
    assert ended(preparation, 1) == ["d 0"]


def test_a_reading_that_was_taken_back_has_its_turn_again(prepare, sources):
    preparation, readings = prepare(*"abc", at_once=1)
    preparation.set_aside(readings["b"], True)
    preparation.set_aside(readings["b"], False)
    sources.let_go(*"abc")
    assert ended(preparation, 3) == ["a 0", "b 0", "c 0"]


def test_the_error_of_a_source_is_the_result():
    def broken(task):
        raise TaskError("no such column")

    preparation = Preparation(broken, lambda: None)
    preparation.add(Task("a", "none.jsonl", steps=1), {})
    assert ended(preparation, 1) == ["no such column"]


def test_few_initial_adapters_are_computed_at_once_dropped_ones_included(sources):
    """Those that do not take long do not wait for them, and the dropped never begin."""
    adapters = Sources()

    def begin(prepared):
        return adapters.read(Task(prepared.split()[0], "none.jsonl", steps=1)) + " begun"

    preparation = Preparation(
        sources.read, lambda: None, 1, begin=begin, begins_slowly=lambda read: read[0] in "abcde"
    )

    def add(name):
        return preparation.add(Task(name, "none.jsonl", steps=1), {})

    sources.let_go("all")
    adapters.let_go("f")
    try:
        readings = {name: add(name) for name in "abcd"}
        adapters.wait_for("a")
        add("f")
        assert ended(preparation, 1) == ["f 0 begun"]
        assert [own.task.name for own in preparation.waiting_to_begin] == ["b", "c", "d"]
        preparation.set_aside(readings["c"], True)
        for name in "ab":
            preparation.drop(readings[name])
        # "a" still computes.
        assert still(preparation) and adapters.begun == ["a", "f"]
        assert [own.task.name for own in preparation.waiting_to_begin] == ["d"]
        adapters.let_go(*"ad")
        assert ended(preparation, 1) == ["d 0 begun"]
        adapters.wait_for("c")
        assert adapters.begun == ["a", "f", "d", "c"]
        preparation.add(Task("e", "none.jsonl", steps=1), {})
        while not preparation.waiting_to_begin:
            time.sleep(0.001)
        preparation.close()
        adapters.let_go("all")
        assert ended(preparation, 1) == ["c 0 begun"]
        assert still(preparation) and "e" not in adapters.begun
    finally:
        adapters.let_go("all")


def test_a_computation_that_takes_too_long_counts_until_it_has_ended(sources):
    adapters = Sources()
    preparation = Preparation(
        lambda task: task,
        lambda: None,
        1,
        most_seconds=0.1,
        begin=adapters.read,
        begins_slowly=lambda task: True,
    )
    for name in "ab":
        preparation.add(Task(name, "none.jsonl", steps=1), {})
    try:
        reason = "task 'a': its initial adapter was not computed within 0.1 s"
        assert ended(preparation, 1) == [reason]
        # The time for which "b" waits does not count.
        time.sleep(0.15)
        assert still(preparation) and adapters.begun == ["a"]
        adapters.let_go(*"ab")
        assert ended(preparation, 1) == ["b 0"]
    finally:
        adapters.let_go("all")


def test_data_are_read_with_the_date_of_the_registration():
    """So a server that is started again renders the same texts; the date is that of UTC."""
    preparation = Preparation(lambda task: TemplateClock().date, lambda: None)
    preparation.add(Task("a", "none.jsonl", steps=1), {}, registered=86400.5)
    (found,) = ended(preparation, 1)
    assert found == str(datetime(1970, 1, 2))
