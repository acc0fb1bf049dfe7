"""The arrays of a microbatch hold exactly the placed samples."""

import numpy as np
import pytest

from jaxmux.data import Sample, fill_microbatch
from jaxmux.planner.packing import ShapeClass, pack_round

ROWS, ROW_LEN, CHUNK = 2, 256, 64
# (slot, index in its global batch, row, offset). Sample 1 of slot 5 is in another microbatch.
PLACEMENTS = [(3, 1, 0, 0), (3, 0, 0, 30), (5, 0, 0, 128), (3, 2, 1, 64)]


def sample(rng, length: int, sample_id: int, prompt: int) -> Sample:
    """A random sample of `length` + 1 tokens, whose stream length is `length`."""
    ids = rng.integers(1, 100, length + 1).astype(np.int32)
    return Sample(ids, np.arange(length + 1) > prompt, sample_id)


@pytest.fixture(scope="module")
def batches():
    rng = np.random.default_rng(0)
    return {
        3: [sample(rng, 50, 7, 10), sample(rng, 30, 2**32 - 1, 0), sample(rng, 130, 9, 129)],
        5: [sample(rng, 64, 7, 5), sample(rng, 200, 8, 100)],
    }


@pytest.fixture(scope="module")
def microbatch(batches):
    return fill_microbatch(PLACEMENTS, batches, rows=ROWS, row_len=ROW_LEN, chunk_len=CHUNK)


@pytest.fixture(scope="module")
def covered():
    """True at the positions that a sequence covers, False on padding."""
    mask = np.zeros((ROWS, ROW_LEN), bool)
    mask[0, :80] = mask[0, 128:192] = mask[1, 64:194] = True
    return mask


def placed_samples(batches):
    for slot, index, row, offset in PLACEMENTS:
        own = batches[slot][index]
        yield slot, own, (row, slice(offset, offset + own.stream_length))


def test_shapes_and_dtypes_are_those_of_the_docstring(microbatch):
    expected = {
        "tokens": np.int32,
        "targets": np.int32,
        "loss_weight": np.float32,
        "positions": np.int32,
        "segment_ids": np.int32,
        "sample_id": np.uint32,
        "sampled": np.float32,
        "advantage": np.float32,
        "reference": np.float32,
    }
    for name, dtype in expected.items():
        array = getattr(microbatch, name)
        assert (array.shape, array.dtype) == ((ROWS, ROW_LEN), dtype), name
    assert microbatch.chunk_slot.shape == (ROWS * ROW_LEN // CHUNK,)
    assert microbatch.chunk_slot.dtype == np.int32


def test_tokens_are_inputs_and_targets_are_the_tokens_after_them(microbatch, batches):
    for _, own, place in placed_samples(batches):
        np.testing.assert_array_equal(microbatch.tokens[place], own.input_ids[:-1])
        np.testing.assert_array_equal(microbatch.targets[place], own.input_ids[1:])


def test_positions_restart_in_every_sequence(microbatch, batches):
    for _, own, place in placed_samples(batches):
        np.testing.assert_array_equal(microbatch.positions[place], range(own.stream_length))


def test_segments_count_the_sequences_of_a_row(microbatch, covered):
    expected = np.full((ROWS, ROW_LEN), -1)
    expected[0, :30], expected[0, 30:80], expected[0, 128:192], expected[1, 64:194] = 0, 1, 2, 0
    np.testing.assert_array_equal(microbatch.segment_ids, expected)
    np.testing.assert_array_equal(microbatch.segment_ids >= 0, covered)


def test_every_token_carries_the_identity_of_its_sample(microbatch, batches):
    for _, own, place in placed_samples(batches):
        assert (microbatch.sample_id[place] == own.sample_id).all()


def test_chunks_belong_to_the_task_whose_tokens_they_hold(microbatch):
    np.testing.assert_array_equal(microbatch.chunk_slot, [3, 3, 5, -1, -1, 3, 3, 3])


def test_loss_weight_is_one_over_the_target_tokens_of_the_whole_batch(microbatch, batches, covered):
    for slot, own, place in placed_samples(batches):
        total = sum(np.count_nonzero(s.target_mask) for s in batches[slot])
        expected = np.where(own.target_mask[1:], np.float32(1 / total), 0)
        np.testing.assert_array_equal(microbatch.loss_weight[place], expected)
    assert not microbatch.loss_weight[~covered].any()


def test_padding_holds_zeros(microbatch, covered):
    for name in ("tokens", "targets", "positions"):
        assert not getattr(microbatch, name)[~covered].any(), name


@pytest.mark.parametrize("seed", range(5))
def test_loss_weights_of_a_task_sum_to_one_over_all_microbatches(seed):
    rng = np.random.default_rng(seed)
    shape = ShapeClass(rows=2, row_len=128, chunk_len=64, max_sequences=4)
    batches = {
        slot: [
            sample(rng, n := int(rng.integers(1, 129)), i, int(rng.integers(0, n)))
            for i in range(rng.integers(1, 20))
        ]
        for slot in range(4)
    }
    lengths = {slot: [s.stream_length for s in batch] for slot, batch in batches.items()}
    sums, tokens = dict.fromkeys(batches, 0.0), dict.fromkeys(batches, 0)
    microbatches = [
        fill_microbatch(p, batches, rows=2, row_len=128, chunk_len=64)
        for p in pack_round(lengths, shape).microbatches()
    ]
    assert len(microbatches) > 1
    for m in microbatches:
        owner = np.repeat(m.chunk_slot, 64).reshape(2, 128)
        assert not m.loss_weight[owner < 0].any()
        for slot in batches:
            sums[slot] += m.loss_weight[owner == slot].sum(dtype=np.float64)
            tokens[slot] += np.count_nonzero(m.segment_ids[owner == slot] >= 0)
    assert sums == pytest.approx(dict.fromkeys(batches, 1.0), abs=1e-6)
    assert tokens == {slot: sum(sizes) for slot, sizes in lengths.items()}


def test_virtual_tokens_stand_before_those_of_the_sample(batches):
    plain = batches[3][1]
    virtual = plain._replace(virtual_tokens=4)
    sizes = {"rows": 1, "row_len": 128, "chunk_len": 64}
    expected = fill_microbatch([(0, 0, 0, 44)], {0: [plain]}, **sizes)
    found = fill_microbatch([(0, 0, 0, 40)], {0: [virtual]}, **sizes)
    assert (virtual.stream_length, virtual.read_tokens) == (34, 30)
    np.testing.assert_array_equal(found.tokens[0, 40:44], [-1, -2, -3, -4])
    np.testing.assert_array_equal(found.tokens[0, 44:], expected.tokens[0, 44:])
    np.testing.assert_array_equal(found.positions[0, 40:74], range(34))
    for name in ("targets", "loss_weight"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    assert (found.segment_ids[0, 40:74] == 0).all() and (found.segment_ids >= 0).sum() == 34


def test_given_terms_stand_where_targets_are_predicted(batches):
    rng = np.random.default_rng(4)
    batch, sample = batches[3], batches[3][1]
    terms = [[rng.normal(size=each.target_tokens) for each in batch] for _ in range(4)]
    found = fill_microbatch([(3, 1, 0, 40)], batches, {3: terms}, rows=1, row_len=128, chunk_len=64)
    predicted = 40 + np.flatnonzero(sample.target_mask[1:])
    names = ("loss_weight", "sampled", "advantage", "reference")
    for name, of_batch in zip(names, terms, strict=True):
        expected = np.zeros(128, np.float32)
        expected[predicted] = of_batch[1]
        np.testing.assert_array_equal(getattr(found, name)[0], expected)


def test_no_placements_give_an_empty_microbatch():
    empty = fill_microbatch([], {}, rows=1, row_len=128, chunk_len=64)
    assert (empty.chunk_slot == -1).all() and (empty.segment_ids == -1).all()
    assert not empty.loss_weight.any()
