"""The host plans and packs the next round while the device trains this one."""

import threading
import time

from jaxmux.engine.rounds.rounds import pack_tightly

SOON = 10.0


def test_the_next_rounds_are_planned_before_training_asks_for_them(make_engine, make_task):
    threads = []

    def packing(lengths, shape):
        threads.append(threading.get_ident())
        return pack_tightly(lengths, shape)

    engine = make_engine(make_task("one", steps=6), packing=packing)
    assert not threads
    engine.train_round()
    end = time.monotonic() + SOON
    while len(threads) < 3 and time.monotonic() < end:
        time.sleep(0.001)
    # Nobody has asked for the second round and the third yet.
    assert engine.rounds == 1 and len(threads) >= 3
    assert threading.get_ident() not in threads
    waited = engine.seconds_waited
    engine.train_round()
    assert engine.seconds_waited - waited < 0.1
    engine.close()


def test_training_waits_for_a_plan_that_takes_longer_than_the_device(make_engine, make_task):
    """What `seconds_waited` counts."""

    def packing(lengths, shape):
        time.sleep(0.5)
        return pack_tightly(lengths, shape)

    engine = make_engine(make_task("one", steps=3), packing=packing)
    engine.train_round()
    assert engine.seconds_waited > 0.4
    engine.close()
