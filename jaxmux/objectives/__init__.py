"""Objectives of tasks: what training minimises."""

from collections.abc import Mapping

from .objective import SFT, Graded, Known, Objective, Recorded, TargetLogProbs
from .policy import Policy
from .preference import ACCURACY, CPO, DPO, KTO, ORPO, SimPO

OBJECTIVES: Mapping[str, type[Objective]] = {
    objective.kind: objective for objective in (SFT, DPO, KTO, CPO, SimPO, ORPO, Policy)
}

__all__ = [
    "ACCURACY",
    "CPO",
    "DPO",
    "KTO",
    "OBJECTIVES",
    "ORPO",
    "SFT",
    "Graded",
    "Known",
    "Objective",
    "Policy",
    "Recorded",
    "SimPO",
    "TargetLogProbs",
]
