"""The mesh that is planned for: `pp4,tp2` is 4 pipeline stages of 2 devices each."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from .shape_class import PlanningError


class Mesh(NamedTuple):
    """Devices of a plan.

    Attributes:
      pp: pipeline stages.
      tp: devices that share the linears of each stage.
    """

    pp: int = 1
    tp: int = 1

    @property
    def devices(self) -> int:
        return self.pp * self.tp

    def __str__(self) -> str:
        return f"pp{self.pp},tp{self.tp}"

    @classmethod
    def parse(cls, text: str) -> "Mesh":
        """The mesh that a text such as "pp4", "tp2" or "pp4,tp2" names.

        Raises:
          PlanningError: an unknown or repeated axis, or a size that is no positive number.
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            found = re.fullmatch(r"\s*([a-z]+)\s*=?\s*([0-9]+)\s*", part)
            if not found or found[1] not in cls._fields:
                raise PlanningError(
                    f"mesh {text!r}: {part.strip()!r} is no axis with its size, expected e.g. "
                    "pp4,tp2 (pp: pipeline stages, tp: tensor parallelism)"
                )
            axis, size = found[1], int(found[2])
            if axis in sizes:
                raise PlanningError(f"mesh {text!r}: {axis} is given twice")
            if size < 1:
                raise PlanningError(f"mesh {text!r}: {axis} should be at least 1; try {axis}1")
            sizes[axis] = size
        return cls(**sizes)

    def require(self, layers: int, divisible: Mapping[str, int]) -> None:
        """Checks that a backbone can be spread over the mesh.

        Args:
          layers: of the backbone; every stage needs one.
          divisible: by key of its config.json, what tensor parallelism has to divide.

        Raises:
          PlanningError: it cannot; the message names the axis and the nearest size that would do.
        """
        if self.pp > layers:
            raise PlanningError(
                f"mesh {self}: {self.pp} stages for {layers} layers, every stage needs at least "
                f"one; it would fit with pp{layers}"
            )
        for name, size in divisible.items():
            if size % self.tp:
                sizes = range(1, min(divisible.values()) + 1)
                fitting = [tp for tp in sizes if not any(n % tp for n in divisible.values())]
                nearest = min(fitting, key=lambda tp: (abs(tp - self.tp), tp))
                raise PlanningError(
                    f"mesh {self}: tp{self.tp} does not divide {name}={size}; the nearest that "
                    f"divides all of {', '.join(divisible)} is tp{nearest}"
                )
