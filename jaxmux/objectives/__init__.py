"""Objectives of tasks: what training minimises, besides cross entropy."""

from collections.abc import Mapping

from .objective import SFT, Graded, Objective
from .preference import ACCURACY, CPO, DPO, ORPO, SimPO

OBJECTIVES: Mapping[str, type[Objective]] = {o.kind: o for o in (SFT, DPO, CPO, SimPO, ORPO)}

__all__ = ["ACCURACY", "CPO", "DPO", "OBJECTIVES", "ORPO", "SFT", "Graded", "Objective", "SimPO"]
