"""One linear of a quantised checkpoint: its tensors, and how they are stored."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Array

from jaxmux.pallas_kernels.frozen_weight import FrozenWeight

from ..checkpoint_files import CheckpointTensors
from ..errors import BackboneError
from .settings import WHAT_TO_DO


class StoredLinear(NamedTuple):
    """How a checkpoint stores the weight of one linear.

    Attributes:
      weights: takes the arrays of `parts` and this description, and can be traced by JAX. It
        returns the weight [k, n] in each format in which the weight can be kept, first in a format
        that is decoded for products; in float32 if there is no such format.
      size: n and k, output and input width.
      parts: the tensors that `weights` needs; each is named by the part of its name after the
        linear's name.
      rounding: see `FrozenWeight.rounding`.
      block: numbers of rows and columns that share a scale; None if the shapes of scales determine
        them.
      nested_block: number of scales that share a scale, for codes of 4 bits.
    """

    weights: Callable[[dict[str, Array], "StoredLinear"], tuple[FrozenWeight, ...]]
    size: tuple[int, int]
    parts: tuple[str, ...]
    rounding: str | None = None
    block: tuple[int, int] | None = None
    nested_block: int = 0


class LinearTensors:
    """The tensors of a linear P, whose names begin with "P."; `parts` are the rest of their names.
    `size` is n and k, the output and input width."""

    def __init__(self, files: CheckpointTensors, name: str, size: tuple[int, int]):
        self._files, self._name, self.size = files, name, size
        self.parts = {tensor.removeprefix(f"{name}.") for tensor in files.of_module(name)}

    def refused(self, part: str, reason: str) -> BackboneError:
        return BackboneError(f"{self._files.folder}: tensor {self._name}.{part}: {reason}")

    def require(self, part: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> str:
        """Checks that a tensor exists, with one of these dtypes and, if any are given, one of these
        shapes. Returns its dtype as safetensors names it. Raises BackboneError if the check
        fails."""
        if part not in self.parts:
            raise self.refused(part, "is missing")
        dtype, shape = self._files.dtype(f"{self._name}.{part}"), self.shape(part)
        if dtype not in dtypes:
            raise self.refused(part, f"the dtype {dtype} is not supported; {WHAT_TO_DO}")
        if shapes and shape not in shapes:
            known = " or ".join(str(list(each)) for each in shapes)
            raise self.refused(part, f"has the shape {list(shape)}; its linear needs {known}")
        return dtype

    def shape(self, part: str) -> tuple[int, ...]:
        return self._files.shape(f"{self._name}.{part}")

    def dtype(self, part: str) -> np.dtype:
        return self._files.array_dtype(f"{self._name}.{part}")

    def read(self, part: str) -> np.ndarray:
        return self._files.read(f"{self._name}.{part}")
