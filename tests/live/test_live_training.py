"""Tasks that come and go: their states, their order, what they have used, and their adapters."""

import dataclasses
import threading
import time

import pytest

from jaxmux.server.store import MemoryStore
from jaxmux.server.task import ENDED, FOLLOWING, LiveTask, Meter
from jaxmux.tasks import TaskError


def settle(live):
    """Waits until no data are being read, so that the next step sees all tasks."""
    while live._preparation.seconds_left is not None:
        time.sleep(0.001)


def step_with_data(live):
    """Steps twice, so that the data of new tasks have been read and they have been chosen from."""
    live.step()
    settle(live)
    live.step()


def live_with(make_live, tasks, *together):
    """A live training after the first choice among tasks. Each text has the names of tasks that are
    registered at the same end of a round; data are read when all are registered."""
    registered = threading.Event()

    def prepared(task):
        registered.wait()
        return tasks[task.name]

    live = make_live(dict.fromkeys("".join(together), prepared))
    for names in together:
        for name in names:
            live.register(tasks[name].task)
        live.step()
    registered.set()
    settle(live)
    live.step()
    return live


def wait_until(condition):
    """Waits for what another thread does."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def states(live, name):
    return [change.state for change in live.status(name).history]


def train_to_the_end(live, *names):
    """Steps until the tasks have ended."""
    for _ in range(1000):
        live.step()
        if all(live.status(name).state in ENDED for name in names):
            return
        settle(live)
    raise AssertionError([live.status(name) for name in names])


@pytest.fixture
def alone(make_live, tasks, trained_alone):
    """The adapter of a task that is trained alone."""

    def adapter(name):
        if name not in trained_alone:
            live = make_live()
            live.register(tasks[name].task)
            train_to_the_end(live, name)
            trained_alone[name] = live.adapter(name)
        return trained_alone[name]

    return adapter


def test_every_task_gets_the_adapter_that_it_gets_alone(make_live, tasks, alone, assert_same_bits):
    live = make_live()
    for name in "abc":
        live.register(tasks[name].task)
    for command in (
        lambda: live.pause("b"),
        lambda: live.register(tasks["d"].task, priority=1),
        lambda: live.cancel("c"),
        lambda: live.resume("b"),
        lambda: live.register(tasks["e"].task, priority=2),
    ):
        live.step()
        settle(live)
        command()
    train_to_the_end(live, *"abcde")
    assert live.status("c").state == "cancelled"
    for name in "abde":
        assert live.status(name).state == "succeeded"
        assert_same_bits(live.adapter(name), alone(name))


def test_states_follow_each_other_as_documented(make_live, tasks):
    live = make_live()
    for name in "abcd":
        live.register(tasks[name].task)
    train_to_the_end(live, *"abcd")
    assert states(live, "a") == ["preparing", "queued", "running", "succeeded"]
    for name in "abcd":
        found = states(live, name)
        assert all(b in FOLLOWING[a] for a, b in zip(found, found[1:], strict=False))
        times = [change.time for change in live.status(name).history]
        assert times == sorted(times)


def test_a_task_without_a_place_waits_and_is_told_why(make_live, tasks):
    live = live_with(make_live, tasks, "abc", "d")
    assert [live.status(name).state for name in "abcd"] == ["running"] * 3 + ["queued"]
    assert live.status("d").reason == "all 3 places are taken"


def test_a_task_of_higher_priority_takes_a_place_and_gives_it_back(make_live, tasks):
    live = make_live()
    for name in "abc":
        live.register(tasks[name].task)
    step_with_data(live)
    live.register(tasks["d"].task, priority=1)
    step_with_data(live)
    assert [live.status(name).state for name in "abcd"] == ["running"] * 2 + ["queued", "running"]
    train_to_the_end(live, *"abcd")
    assert states(live, "c") == [
        *("preparing", "queued", "running", "queued", "running", "succeeded")
    ]


def test_a_changed_priority_changes_who_trains(make_live, tasks):
    live = live_with(make_live, tasks, "abc", "d")
    live.set_priority("d", 5)
    live.step()
    assert [live.status(name).state for name in "abcd"] == ["running"] * 2 + ["queued", "running"]
    assert live.status("d").priority == 5
    assert live.status("c").reason.startswith("task 'd' of higher priority took its place; all 3")


def test_an_extended_task_trains_more_steps(make_live, tasks):
    live = make_live()
    for name in "ab":
        live.register(tasks[name].task)
    step_with_data(live)
    for name, steps in (("a", 9), ("b", 7)):
        live.extend(name, steps)
    live.pause("b")
    live.step()
    live.resume("b")
    train_to_the_end(live, *"ab")
    assert [live.status(name).step for name in "ab"] == [9, 7]


def test_commands_that_cannot_be_carried_out_say_why(make_live, tasks):
    live = make_live()
    live.register(tasks["a"].task)
    wrong = {
        "registered already": live.register(tasks["a"].task),
        "there is no such task": live.pause("nobody"),
        "it is not paused but preparing": live.resume("a"),
        "it has 4 steps already": live.extend("a", 4),
    }
    train_to_the_end(live, "a")
    ended = live.cancel("a")
    live.step()
    wrong["it has ended .succeeded."] = ended
    for message, future in wrong.items():
        with pytest.raises(TaskError, match=message):
            future.result(timeout=0)


def test_a_task_whose_data_cannot_be_read_fails_alone(make_live, tasks, alone, assert_same_bits):
    def broken(task):
        raise OSError("the disk is gone")

    live = make_live({"b": broken})
    for name in "ab":
        live.register(tasks[name].task)
    train_to_the_end(live, *"ab")
    assert (live.status("b").state, live.status("b").reason) == ("failed", "the disk is gone")
    assert_same_bits(live.adapter("a"), alone("a"))


def test_a_task_whose_data_hang_fails_in_time_and_holds_up_nobody(make_live, tasks):
    hangs = threading.Event()
    live = make_live(
        {name: lambda task: hangs.wait() for name in "ab"},
        prepared_at_once=2,
        most_preparation_seconds=0.2,
    )
    for name in "abc":
        live.register(tasks[name].task)
    for _ in range(100):
        live.step()
        time.sleep(0.01)
    assert [live.status(name).state for name in "abc"] == ["failed", "failed", "succeeded"]
    assert live.status("a").reason == "task 'a': its data were not read within 0.2 s"
    hangs.set()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 16}, "its rank is 16, the pool's is 8"),
        ({"targets": "all-linear"}, "for which the pool has no arrays"),
        ({"lengths": (200, 201)}, "its longest sample takes 199 places"),
    ],
)
def test_a_task_that_would_outgrow_the_pool_fails(fields, message, make_live, tasks, make_task):
    large = make_task("large", **{"targets": ("q_proj", "down_proj")} | fields)
    # Initial adapters may take hours.
    large = dataclasses.replace(large, make_adapter=lambda: pytest.fail("it was made"))
    live = make_live({"large": lambda task: large})
    live.register(large.task)
    train_to_the_end(live, "large")
    assert live.status("large").state == "failed"
    assert message in live.status("large").reason


def test_what_tasks_have_used_sums_up_to_the_totals(make_live, tasks):
    live = make_live()
    events = live.events()
    for name in "abcd":
        live.register(tasks[name].task)
    begin = time.monotonic()
    train_to_the_end(live, *"abcd")
    seconds = time.monotonic() - begin
    live.close()
    live.run()
    updates = [event for event in events if event.kind == "update"]
    for name in "abcd":
        prepared, meter = tasks[name], live.status(name).meter
        batches = [prepared.batches[k] for k in range(prepared.steps)]
        assert meter.effective_tokens == sum(s.stream_length for b in batches for s in b)
        assert meter.trained_tokens == sum(s.target_tokens for b in batches for s in b)
        own = [event.fields for event in updates if event.task == name]
        assert meter.computed_tokens == sum(fields["computed_tokens"] for fields in own)
        assert meter.computed_tokens % 64 == 0
        assert meter.computed_tokens >= meter.effective_tokens
    total = sum(live.status(name).meter.device_seconds for name in "abcd")
    assert 0 < total <= seconds
    owned = sum(live.status(name).meter.computed_tokens for name in "abcd")
    assert owned <= live._engine.computed_tokens


def test_a_skipped_update_is_not_trained(tasks):
    class Update:
        task_step, tokens, target_tokens, skipped = 1, 10, 5, True

    live = LiveTask(tasks["a"].task, 0, 0, [])
    live.count_update(Update)
    assert live.meter == Meter(effective_tokens=10)
    live.count_update(Update)
    assert live.meter == Meter(effective_tokens=10)


def test_commands_come_from_other_threads(make_live, tasks, alone, assert_same_bits):
    live = make_live()
    events = live.events()
    owner = threading.Thread(target=live.run)
    owner.start()
    threads = [
        threading.Thread(target=lambda name=name: live.register(tasks[name].task).result())
        for name in "abcde"
    ]
    for thread in threads:
        thread.start()
    ended = set()
    for event in events:
        if event.kind == "state" and event.fields["state"] == "succeeded":
            ended.add(event.task)
            if len(ended) == len(tasks):
                live.close()
    owner.join()
    for name in tasks:
        assert_same_bits(live.adapter(name), alone(name))
    with pytest.raises(RuntimeError, match="takes no more commands"):
        live.cancel("a")


def test_tasks_compile_nothing(make_live, tasks, compiles):
    """Not even the first ones: everything is compiled before they come."""
    live = make_live()
    before = len(compiles)
    for name in "abc":
        live.register(tasks[name].task)
    step_with_data(live)
    live.pause("b")
    live.register(tasks["d"].task, priority=1)
    step_with_data(live)
    live.resume("b")
    live.register(tasks["e"].task)
    train_to_the_end(live, *"abcde")
    live.adapter("a")
    assert compiles[before:] == []


def test_tasks_that_ended_long_ago_are_forgotten_and_keep_no_data(make_live, tasks):
    live = make_live(most_ended=2)
    for name in "abc":
        live.register(tasks[name].task)
        live.step()
        settle(live)
        live.cancel(name) if name == "b" else None
        for _ in range(20):
            live.step()
    assert [status.name for status in live.statuses()] == ["b", "c"]
    assert all(own.prepared is own.suspended is None for own in live._tasks)
    assert live.status("c").steps == 3
    live.register(tasks["a"].task)
    train_to_the_end(live, "a")
    assert live.status("a").state == "succeeded"


def test_tasks_that_somebody_needs_are_not_forgotten(make_live, tasks):
    live, needed = make_live(most_ended=0), {"a", "b"}
    live.know_while(lambda name: name in needed)
    for name in "ab":
        live.register(tasks[name].task)
    train_to_the_end(live, *"ab")
    live.step()
    assert [status.name for status in live.statuses()] == ["a", "b"]
    needed.discard("a")
    live.step()
    assert [status.name for status in live.statuses()] == ["b"]


def test_an_idle_training_keeps_an_end_when_its_adapter_has_been_written(
    make_live, tasks, monkeypatch
):
    """Also if the store has nothing else to write by then."""

    class SlowStore(MemoryStore):
        exporting = True

        def is_exporting(self, name):
            return self.exporting

    monkeypatch.setattr("jaxmux.server.training._RETRY", 0.01)
    store = SlowStore()
    live = make_live(store=store)
    owner = threading.Thread(target=live.run)
    owner.start()
    try:
        live.register(tasks["e"].task).result()
        waits = "its end is being written to disk"
        wait_until(lambda: live.statuses() and live.status("e").reason == waits)
        wait_until(lambda: live._saving.wanted is False)
        assert not live._tasks["e"].kept
        store.exporting = False
        wait_until(lambda: live._tasks["e"].kept)
        wait_until(lambda: live.status("e").state == "succeeded")
    finally:
        live.close()
        owner.join()


def test_use_is_written_once_a_second_and_news_at_once(make_live, tasks, monkeypatch):
    class CountingStore(MemoryStore):
        def __init__(self):
            super().__init__()
            self.states = []

        def write(self, tasks, *others):
            self.states.append([row["state"] for row in (*tasks.new, *tasks.changed.values())])

    now = 0.0
    monkeypatch.setattr("jaxmux.server.saving.time.monotonic", lambda: now)
    store = CountingStore()
    live = make_live(store=store)
    live.register(tasks["b"].task)
    live._runner.carry_out()
    settle(live)
    assert store.states == [["preparing"]]
    live.step()
    # Its data have been read.
    assert store.states[1:] == [["running"]]
    rounds = 0
    while live.status("b").state != "succeeded":
        now += 0.4
        live.step()
        rounds += 1
    assert rounds >= 6
    assert store.states[2:] == [["running"]] * ((rounds - 1) // 3) + [["succeeded"]]


def test_a_command_that_its_caller_gave_up_is_not_carried_out(make_live, tasks):
    live = make_live()
    live.register(tasks["a"].task)
    live.step()
    settle(live)
    given_up = live.cancel("a")
    assert given_up.cancel()
    train_to_the_end(live, "a")
    assert live.status("a").state == "succeeded"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (lambda live, task: live.register("a"), "task should be a Task"),
        (lambda live, task: live.register(task, priority="high"), "priority should be an integer"),
        (lambda live, task: live.set_priority("a", None), "priority should be an integer"),
        (lambda live, task: live.extend("a", 9.5), "steps should be an integer"),
    ],
)
def test_values_of_the_wrong_type_are_refused_at_once(command, message, make_live, tasks):
    with pytest.raises(TypeError, match=message):
        command(make_live(), tasks["a"].task)


def test_a_task_that_cannot_begin_fails_alone_and_frees_its_place(make_live, tasks):
    """Its first adapter can be made when its data are read, and not when it begins."""

    def once(task):
        def make_adapter(calls=[]):  # noqa: B006
            calls.append(1)
            if len(calls) > 1:
                raise ValueError("adapter.safetensors is gone")
            return tasks["a"].make_adapter()

        gone = dataclasses.replace(tasks["a"], task=task, make_adapter=make_adapter)
        gone.with_adapter()
        return dataclasses.replace(gone, make_adapter=make_adapter)

    live = make_live({"a": once})
    for name in "abcd":
        live.register(tasks[name].task)
    train_to_the_end(live, *"abcd")
    assert [live.status(name).state for name in "abcd"] == ["failed"] + ["succeeded"] * 3
    assert live.status("a").reason == "adapter.safetensors is gone"


def test_an_exception_of_the_devices_ends_training_and_tells_everybody(
    make_live, tasks, monkeypatch
):
    live = make_live()
    monkeypatch.setattr(live._engine, "train_round", lambda: 1 / 0)
    events = live.events()
    owner = threading.Thread(target=live.run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda _: None)
        owner.start()
        with pytest.raises(RuntimeError, match="training has ended|takes no more"):
            live.register(tasks["a"].task).result()
            live.pause("a").result()
            raise RuntimeError("training has ended")
        owner.join()
    with pytest.raises(RuntimeError, match="training has ended with an exception"):
        live.wait()
    list(events)


def test_of_tasks_that_arrive_together_those_with_the_most_tokens_train(make_live, tasks):
    live = live_with(make_live, tasks, "abcd")
    # Batches of 2, 3, 4 and 5 samples; there are three places.
    assert [live.status(name).state for name in "abcd"] == ["queued"] + ["running"] * 3
    assert live.status("a").reason == "all 3 places are taken"
    live.register(tasks["e"].task)
    train_to_the_end(live, *"abcde")
    began = {name: live.status(name).history[-2].time for name in "ae"}
    assert began["a"] < began["e"]


def test_the_shares_of_a_round_add_up(make_live, tasks):
    live = make_live()
    for name in "abd":
        live.register(tasks[name].task)
    step_with_data(live)
    live.step()
    live.step()
    shares = [live.status(name).share for name in "abd"]
    assert all(share > 0 for share in shares) and sum(shares) == pytest.approx(1)
    live.pause("d")
    live.step()
    assert live.status("d").share == 0


def test_what_is_suspicious_is_told_before_a_task_begins_and_when_it_has_ended(make_live, tasks):
    def warnings(prepared, progress):
        name = prepared.task.name
        if name == "b":
            return ()
        return [f"{name} has data"] if progress is None else [f"{name} has {progress.step} steps"]

    live = make_live(warnings=warnings)
    events = live.events()
    for name in "ab":
        live.register(tasks[name].task)
    step_with_data(live)
    assert live.status("a").warnings == ("a has data",)
    train_to_the_end(live, "a", "b")
    live.close()
    assert live.status("a").warnings == ("a has data", "a has 4 steps")
    assert live.status("b").warnings == ()
    told = [(own.task, own.kind, own.fields.get("state") or own.fields) for own in events]
    told = [
        own for own in told if own[:2] == ("a", "warning") or own[2] in ("running", "succeeded")
    ]
    assert told == [
        ("a", "warning", {"warnings": ["a has data"]}),
        ("a", "state", "running"),
        ("b", "state", "running"),
        ("a", "warning", {"warnings": ["a has 4 steps"]}),
        ("a", "state", "succeeded"),
        ("b", "state", "succeeded"),
    ]
