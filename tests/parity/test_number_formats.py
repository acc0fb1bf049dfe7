"""nf4 and int8 weights are those of bitsandbytes on the CPU, bit for bit."""

import os
from functools import cache

import numpy as np
import pytest
import torch

functional = pytest.importorskip("bitsandbytes").functional
pytest.importorskip("compressed_tensors")
from quantised_checkpoints import decoded_4_bits  # noqa: E402

LAYERS = 2
# By case, the dtype and the shape [n, k] of the weights of a layer, and whether the sum of the
# largest weights of all blocks is exact in float32. Otherwise their mean depends on the order in
# which torch adds, which differs between machines; jaxmux is given the mean of bitsandbytes.
CASES = {
    "float32": (torch.float32, (96, 448), True),
    "bfloat16": (torch.bfloat16, (32, 1024), True),
    "float16": (torch.float16, (50, 192), True),
    "ties": (torch.float32, (1, 64), True),
    "any sum": (torch.float32, (136, 1920), False),
    # Blocks go on from one row to the next.
    "352": (torch.float32, (48, 352), False),
    "100": (torch.bfloat16, (50, 100), False),
    "96": (torch.float16, (30, 96), False),
    "2": (torch.float32, (7, 2), False),
}
# An exact sum, ties, an inexact sum, and blocks that go on in the next row.
MAIN = ("bfloat16", "ties", "any sum", "100")


def weights_of(case: str) -> torch.Tensor:
    """Weights [L, n, k] with an outlier, a channel of zeros, and channels of other deviations.

    Those of the case "ties" lie between two numbers of nf4.
    """
    dtype, (n, k), exact = CASES[case]
    if case == "ties":
        code = functional.get_4bit_type("nf4", device="cpu")
        ties = torch.cat([code[-1:], (code[1:] + code[:-1]) / 2]).repeat(4)
        return torch.stack([ties, -ties])[:, None]
    generator = torch.Generator().manual_seed(len(case))
    weights = torch.randn(LAYERS, n, k, generator=generator)
    weights *= torch.randn(LAYERS, n, 1, generator=generator).exp()
    weights[:, n // 2, 3 % k] = 30
    weights[:, n // 3] = 0
    if exact:
        # Multiples of 2^-8 below 2^5: the sum of up to 2^11 of them is exact.
        blocks = weights.clamp(-31, 31).view(LAYERS, -1, 64)
        largest = blocks.abs().argmax(-1, keepdim=True)
        coarse = blocks.gather(-1, largest) * 2**8
        coarse = coarse.sign() * coarse.abs().ceil() / 2**8
        weights = blocks.scatter(-1, largest, coarse).view(LAYERS, n, k)
    return weights.to(dtype)


def nf4_of(weights: torch.Tensor, double: bool) -> tuple[torch.Tensor, functional.QuantState]:
    return functional.quantize_4bit(
        weights, blocksize=64, quant_type="nf4", compress_statistics=double
    )


def decoded(values: torch.Tensor, state: functional.QuantState, dtype=torch.float32):
    state.dtype = dtype
    return decoded_4_bits(values, state)


def of_bitsandbytes(weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """Everything that `encoded_weights.encoded_weights` returns, for one layer [n, k]."""
    (n, k), found = weights.shape, {}
    rows = n if k % 64 == 0 else 1
    values, state = nf4_of(weights, double=False)
    found["nf4.plain"], found["nf4.plain.absmax"] = values.view(n, -1), state.absmax.view(rows, -1)
    found["nf4.plain.decoded"] = decoded(values, state)
    values, state = nf4_of(weights, double=True)
    found["nf4"], found["nf4.absmax"] = values.view(n, -1), state.absmax.view(rows, -1)
    found["nf4.nested_absmax"], found["nf4.offset"] = state.state2.absmax, state.offset
    found["nf4.decoded"] = decoded(values, state)
    found["int8"], found["int8.absmax"], _ = functional.int8_vectorwise_quant(weights)
    found["int8.decoded"] = functional.int8_vectorwise_dequant(found["int8"], found["int8.absmax"])
    return found


@pytest.fixture(scope="module")
def encoded(tmp_path_factory, jaxmux):
    """A function that returns what jaxmux stores and decodes of a case, or the "tables" of its
    formats."""
    folder = tmp_path_factory.mktemp("number-formats")
    # Compiled as for users: optimised code may join operations, which rounds differently.
    optimised = type(jaxmux)({n: v for n, v in os.environ.items() if n != "XLA_FLAGS"})

    @cache
    def found(name: str):
        cases = {}
        if name != "tables":
            dtype, _, exact = CASES[name]
            layers = weights_of(name)
            np.save(folder / "weights.npy", layers.float().numpy())
            offset = None if exact else [float(nf4_of(w, double=True)[1].offset) for w in layers]
            cases[name] = {"weights": "weights.npy", "dtype": str(dtype)[6:], "offset": offset}
        optimised("encode", folder, {"cases": cases})
        return np.load(folder / "encoded" / f"{name}.npz")

    yield found
    optimised.close()


def bits(array: np.ndarray | torch.Tensor) -> np.ndarray:
    array = np.asarray(array)
    return array.view(f"u{array.itemsize}")


@pytest.mark.parametrize(
    "case",
    [case if case in MAIN else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
)
def test_stored_and_decoded_weights_have_the_bits_of_bitsandbytes(case, encoded):
    for layer, weights in enumerate(weights_of(case)):
        wanted = of_bitsandbytes(weights)
        assert set(wanted) == set(encoded(case))
        for name, array in wanted.items():
            found = encoded(case)[name][layer]
            assert found.dtype == array.numpy().dtype, name
            np.testing.assert_array_equal(bits(found), bits(array), err_msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bitsandbytes_decodes_to_half_precision_by_rounding_the_float32_weights(dtype, encoded):
    (weights, *_), found = weights_of("bfloat16"), encoded("bfloat16")
    half = torch.from_numpy(found["nf4.decoded"][0]).to(dtype)
    assert torch.equal(decoded(*nf4_of(weights, double=True), dtype), half)


def test_tables_are_those_of_bitsandbytes(encoded):
    _, state = nf4_of(weights_of("ties")[0], double=True)
    np.testing.assert_array_equal(encoded("tables")["nf4"], state.code)
    np.testing.assert_array_equal(encoded("tables")["dynamic"], state.state2.code)
    assert (state.blocksize, state.state2.blocksize) == (64, 256)
