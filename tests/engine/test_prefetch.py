"""Prefetch yields items in order, computes them ahead of the consumer, and ends cleanly."""

import threading
import time
from itertools import count, islice

import pytest

from jaxmux.engine.rounds.position import Prefetch

# Seconds that a test waits for the other thread before it fails.
TIMEOUT = 5.0


def wait_until(condition) -> bool:
    end = time.monotonic() + TIMEOUT
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_items_arrive_in_order_and_end(depth):
    items = Prefetch(range(100), depth)
    assert list(items) == list(range(100))
    with pytest.raises(StopIteration):
        next(items)


def test_an_empty_iterable_ends_at_once():
    assert list(Prefetch([])) == []


def test_at_most_depth_items_are_computed_ahead():
    computed = []
    items = Prefetch((computed.append(i) for i in count()), depth=3)
    # Three items wait, and the thread has computed a fourth one.
    assert wait_until(lambda: len(computed) == 4)
    time.sleep(0.02)
    assert len(computed) == 4
    next(items)
    assert wait_until(lambda: len(computed) == 5)
    items.close()


def test_the_work_happens_in_another_thread():
    items = Prefetch(threading.get_ident() for _ in range(2))
    assert threading.get_ident() not in list(items)


def test_the_consumer_overlaps_with_the_producer():
    both_busy = threading.Barrier(2, timeout=TIMEOUT)

    def produce():
        yield "first"
        both_busy.wait()
        yield "second"

    items = Prefetch(produce())
    assert next(items) == "first"
    both_busy.wait()
    assert next(items) == "second"


def failing_items():
    yield 1
    yield 2
    raise ValueError("train.jsonl:7: malformed")


def test_an_exception_is_raised_where_its_item_would_have_come():
    items = Prefetch(failing_items(), depth=1)
    assert [next(items), next(items)] == [1, 2]
    for _ in range(2):
        with pytest.raises(ValueError, match="train.jsonl:7"):
            next(items)


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_close_ends_the_thread_of_an_endless_source(taken):
    before = set(threading.enumerate())
    items = Prefetch(count(), depth=2)
    assert list(islice(items, taken)) == list(range(taken))
    items.close()
    assert set(threading.enumerate()) <= before


def test_close_twice_and_after_the_end_is_harmless():
    items = Prefetch([1])
    assert list(items) == [1]
    items.close()
    items.close()


@pytest.mark.timeout(20)
def test_a_closed_prefetch_ends_instead_of_waiting_for_ever():
    items = Prefetch(count(), depth=2)
    items.close()
    taken = []
    consumer = threading.Thread(target=lambda: taken.extend(items), daemon=True)
    consumer.start()
    consumer.join(timeout=1.0)
    assert not consumer.is_alive()
