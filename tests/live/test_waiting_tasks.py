"""Tasks whose data wait to be read, and tasks that wait for a place: what they are told, and that
none holds up others."""

import dataclasses
import threading
import time

import pytest

from .test_live_training import alone, settle, step_with_data, train_to_the_end  # noqa: F401


def test_a_task_that_lost_its_place_is_told_to_whom_as_long_as_it_waits(make_live, tasks):
    together = threading.Event()

    def prepared(task):
        together.wait()
        return tasks[task.name]

    live = make_live(dict.fromkeys("de", prepared))
    for name in "abc":
        live.register(dataclasses.replace(tasks[name].task, steps=50))
    step_with_data(live)
    events = live.events()
    for name in "de":
        live.register(tasks[name].task, priority=1)
    live.step()
    together.set()
    settle(live)
    live.step()
    live.step()
    for name in "bc":
        assert live.status(name).reason == (
            "tasks 'e', 'd' of higher priority took places; all 3 places are taken"
        )
    live.close()
    live.run()
    told = [event.fields.get("reason") for event in events if event.task == "c"]
    assert sum(reason is not None for reason in told) == 1
    assert live.status("a").reason is None


def test_slow_data_hold_up_nobody_while_nothing_trains(make_live, tasks):
    """The thread that owns the engine waits for commands meanwhile."""
    hangs = threading.Event()
    live = make_live(
        {name: lambda task: hangs.wait() for name in "ab"}, slow_preparation_seconds=0.2
    )
    events = live.events()
    owner = threading.Thread(target=live.run)
    owner.start()
    for name in "abc":
        live.register(tasks[name].task)
    assert any(event.fields.get("state") == "succeeded" for event in events)
    assert [live.status(name).state for name in "abc"] == ["preparing", "preparing", "succeeded"]
    live.close()
    owner.join()
    hangs.set()


def test_tasks_whose_data_wait_are_told_how_many_are_before_them(make_live, tasks):
    begun = {name: threading.Event() for name in "abcde"}

    def prepared(task):
        begun[task.name].wait()
        return tasks[task.name]

    live = make_live(dict.fromkeys("abcde", prepared), prepared_at_once=1)
    events = live.events()

    def reasons():
        return [live.status(name).reason for name in "abcde"]

    def waits(place):
        return f"waits for its data to be read; {place}"

    for name in "abcde":
        live.register(tasks[name].task)
    live.step()
    many = waits("at most 3 tasks are before it")
    one, first = waits("at most 1 task is before it"), waits("it is the next one")
    assert reasons() == [None, first, one, waits("at most 2 tasks are before it"), many]
    live.cancel("a")
    live.step()
    # "e" had three before it, and has two: it is not told of every one.
    assert reasons() == [None, None, first, one, many]
    live.pause("c")
    live.step()
    assert reasons() == [None, None, None, first, one]
    for event in begun.values():
        event.set()
    settle(live)
    live.step()
    live.close()
    live.run()
    told = [own.fields["reason"] for own in events if (own.task, own.kind) == ("e", "state")]
    assert told[:4] == [None, many, one, None]


@pytest.mark.parametrize("command", ["cancel", "pause"])
def test_a_task_that_is_not_wanted_frees_its_place_among_those_that_are_read(
    command, make_live, tasks
):
    hangs = threading.Event()
    live = make_live({"a": lambda task: hangs.wait()}, prepared_at_once=1)
    live.register(tasks["a"].task)
    live.register(tasks["c"].task)
    live.step()
    assert live.status("c").reason == "waits for its data to be read; it is the next one"
    getattr(live, command)("a")
    for _ in range(500):
        live.step()
        time.sleep(0.002)
        if live.status("c").state == "succeeded":
            break
    assert live.status("c").state == "succeeded"
    assert live.status("a").state == {"cancel": "cancelled", "pause": "paused"}[command]
    hangs.set()


def test_tasks_wait_for_their_turn_to_compute_an_initial_adapter(make_live, tasks):
    """Others train meanwhile, and those that are cancelled before their turn never begin."""
    let_go, computed = threading.Event(), []

    def slowly(task):
        def make_adapter():
            computed.append(task.name)
            let_go.wait()
            return tasks[task.name].make_adapter()

        return dataclasses.replace(tasks[task.name], task=task, make_adapter=make_adapter)

    live = make_live(dict.fromkeys("abd", slowly), prepared_at_once=1)
    for name in "abcd":
        task = tasks[name].task
        adapter = dataclasses.replace(task.adapter, rank=2, initialisation="eva")
        live.register(dataclasses.replace(task, adapter=adapter) if name in "abd" else task)

    def step_until(name, state, reason=None):
        for _ in range(2000):
            live.step()
            status = live.status(name)
            if (status.state, status.reason) == (state, reason):
                return
            time.sleep(0.002)
        raise AssertionError(status)

    waits = "waits for its initial adapter to be computed; "
    step_until("c", "succeeded")
    step_until("b", "preparing", waits + "it is the next one")
    step_until("d", "preparing", waits + "at most 1 task is before it")
    for name in "ab":
        live.cancel(name)
        step_until(name, "cancelled")
    # What is no longer wanted still counts.
    step_until("d", "preparing", waits + "it is the next one")
    assert computed == ["a"]
    let_go.set()
    step_until("d", "succeeded")
    assert computed == ["a", "d"]


def test_a_task_of_the_same_name_never_gets_the_data_of_an_earlier_one(
    make_live,
    tasks,
    alone,  # noqa: F811
    assert_same_bits,
):
    """Not even if it is the same object, and the earlier thread is late."""
    late, done, calls = threading.Event(), threading.Event(), []

    def read(task):
        calls.append(task)
        if len(calls) == 1:
            late.wait()
            return dataclasses.replace(tasks["b"], task=task)
        # It is still being read when the earlier thread ends.
        done.wait()
        return tasks["a"]

    live = make_live({"a": read}, most_ended=1)
    live.register(tasks["a"].task)
    live.step()
    live.cancel("a")
    live.register(tasks["e"].task)
    train_to_the_end(live, "e")
    assert [status.name for status in live.statuses()] == ["e"]
    live.register(tasks["a"].task)
    live.step()
    (earlier,) = [own for own in threading.enumerate() if own.name == "prepare a"][:1]
    late.set()
    earlier.join()
    live.step()
    assert live.status("a").state == "preparing"
    done.set()
    train_to_the_end(live, "a")
    assert_same_bits(live.adapter("a"), alone("a"))
