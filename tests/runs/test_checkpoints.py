"""A checkpoint gives back the arrays that were saved, of all tasks or of one."""

import ml_dtypes
import numpy as np
import pytest

from jaxmux.objectives.token_losses import SUMS
from jaxmux.peft import LeafSpec
from jaxmux.runs.checkpoints import Checkpoints

NAMES = ("a", "a.adapter", "task 10", "task9", "größer")
DTYPES = (np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int32, np.uint8, bool)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def checkpoints(said, tmp_path):
    found = Checkpoints(tmp_path / "checkpoints", 3, said.append)
    yield found
    found.close()


@pytest.fixture
def arrays():
    """By task, arrays of many dtypes, one without axes and one in another order."""
    rng = np.random.default_rng(0)

    def own():
        drawn = {
            f"adapter/mlp.{i}": rng.integers(0, 2, (3, 4)).astype(d) for i, d in enumerate(DTYPES)
        }
        return drawn | {"count": np.asarray(rng.random()), "optimizer/mu": rng.random((4, 3)).T}

    return {name: own() for name in NAMES}


@pytest.fixture
def save(checkpoints):
    def run(number, arrays):
        checkpoints.save(number, {"tasks": {name: {} for name in arrays}}, arrays)
        checkpoints.wait()

    return run


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        assert type(found[path]) is np.ndarray and found[path].dtype == array.dtype
        np.testing.assert_array_equal(found[path], array)


def test_the_loss_of_an_earlier_version_is_the_first_of_the_sums(checkpoints, save):
    save(1, {"a": {"loss": np.asarray(np.float32(2.5))}})
    spec = LeafSpec((SUMS,), ("sum",))
    found = checkpoints.newest(lambda record: {"a": {"sums": spec}})
    assert_equal(found.arrays["a"], {"sums": np.array([2.5, *[0] * (SUMS - 1)], np.float32)})


@pytest.mark.parametrize("wanted", [NAMES, NAMES[:1], NAMES[1:3], ()])
def test_the_arrays_of_the_tasks_that_are_wanted_are_those_that_were_saved(
    wanted, checkpoints, save, arrays
):
    save(1, arrays)
    found = checkpoints.newest(lambda record: dict.fromkeys(wanted))
    assert found.number == 1 and found.arrays.keys() == set(wanted)
    for name in wanted:
        assert_equal(found.arrays[name], arrays[name])


def test_arrays_may_change_when_they_are_being_saved(checkpoints, arrays):
    before = {path: array.copy() for path, array in arrays["a"].items()}
    checkpoints.save(1, {"tasks": {"a": {}}}, {"a": arrays["a"]})
    arrays["a"]["optimizer/mu"][:] = 0
    checkpoints.wait()
    assert_equal(checkpoints.newest(lambda record: {"a": None}).arrays["a"], before)


def test_a_checkpoint_without_arrays_has_its_record(checkpoints):
    checkpoints.save(1, {"tasks": {"a": {"waits": True}}}, {})
    checkpoints.wait()
    found = checkpoints.newest(lambda record: {})
    assert found.record["tasks"] == {"a": {"waits": True}} and found.arrays == {}


OTHERS = {
    "missing": lambda own: own.pop("optimizer/mu"),
    "not described": lambda own: own.update({"optimizer/nu": np.zeros(2)}),
    "of another shape": lambda own: own.update({"optimizer/mu": np.zeros((3, 5))}),
    "of another dtype": lambda own: own.update({"optimizer/mu": np.zeros((3, 4), np.float32)}),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_a_checkpoint_of_other_arrays_than_described_gives_way(
    change, checkpoints, save, said, arrays
):
    """Those of a task are what the engine has for it, unless another version has saved them."""
    specs = {
        name: {
            path: LeafSpec(array.shape, ("input", "output")[: array.ndim], dtype=array.dtype.name)
            for path, array in own.items()
        }
        for name, own in arrays.items()
    }
    save(1, arrays)
    change(arrays["task9"])
    save(2, arrays)
    found = checkpoints.newest(lambda record: specs)
    assert found.number == 1
    (line,) = said
    assert "step 2 is damaged (array 'optimizer/" in line
    assert "' of task 'task9' is not what this version expects)" in line
