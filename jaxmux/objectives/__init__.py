"""Objectives of tasks: what training minimises."""

from collections.abc import Mapping

from .custom import CustomLoss, LossInputs
from .objective import (
    BOUND,
    HIGHER_IS_BETTER,
    LOSS,
    SFT,
    Bound,
    Comparison,
    Graded,
    Known,
    Objective,
    Recorded,
    TargetLogProbs,
)
from .pairs import ACCURACY
from .policy import Policy
from .preference import DPO, KTO
from .reference_free import CPO, ORPO, SimPO

OBJECTIVES: Mapping[str, type[Objective]] = {
    objective.kind: objective for objective in (SFT, DPO, KTO, CPO, SimPO, ORPO, Policy)
}

__all__ = [
    "ACCURACY",
    "BOUND",
    "CPO",
    "CustomLoss",
    "DPO",
    "HIGHER_IS_BETTER",
    "KTO",
    "LOSS",
    "LossInputs",
    "OBJECTIVES",
    "ORPO",
    "SFT",
    "Bound",
    "Comparison",
    "Graded",
    "Known",
    "Objective",
    "Policy",
    "Recorded",
    "SimPO",
    "TargetLogProbs",
]
