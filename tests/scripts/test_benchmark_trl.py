"""The comparison of DPO with TRL."""

from argparse import Namespace

import benchmark_trl
import numpy as np
import pytest

ARGS = Namespace(pairs=2, length=8, tokens=32, layers=1, rank=4, vocab=20)
JAXMUX = {"seconds": 2.0, "device": "GPU", "versions": {"jax": "1"}}
TRL = {
    "2-compiled": {"error": "out of memory"},
    "1-compiled": {"seconds": 3.0, "device": "GPU", "versions": {"trl": "2"}},
    "1-eager": {"seconds": 5.0, "device": "GPU", "versions": {"trl": "2"}},
}


def test_the_fastest_mode_of_trl_counts():
    record = benchmark_trl.figure(ARGS, JAXMUX, TRL)
    assert (record["value"], record["sense"], record["bound"]) == (1.5, "at least", 1.5)
    baselines = record["baselines"]
    assert baselines["trl_mode"] == "1-compiled"
    assert baselines["tokens_per_second"] == 2 * 2 * 8 / 2.0
    assert baselines["trl"]["2-compiled"] == {"error": "out of memory"}
    assert record["versions"] == {"jax": "1", "trl": "2"}


@pytest.mark.parametrize("jaxmux", [{"error": "exit code 1"}, JAXMUX | {"device": "cpu"}])
def test_sides_that_cannot_be_compared_are_refused(jaxmux):
    with pytest.raises(ValueError, match="exit code 1|jaxmux ran on cpu, TRL on GPU"):
        benchmark_trl.figure(ARGS, jaxmux, TRL)


def test_pairs_are_texts_of_as_many_words():
    ids = benchmark_trl.random_pairs(ARGS)
    record = benchmark_trl.as_texts(ids[0])
    assert [list(map(int, text.split())) for text in record.values()] == ids[0].tolist()
    assert np.all(ids[:, 1:, -1] == ARGS.vocab - 1) and np.sum(ids == ARGS.vocab - 1) == 2 * len(
        ids
    )


def test_updates_of_the_warm_up_do_not_count():
    found = benchmark_trl.statistics_of([0.0, 9.0, 10.0, 13.0, 15.0], warm_up=1)
    assert found == {"seconds": 2.0, "each": [1.0, 3.0, 2.0]}
