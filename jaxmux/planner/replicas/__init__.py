"""Chooses replicas of different sizes and divides the samples of a round among them (LobRA).

`choose_length_bins` sorts sequences into length bins. `plan_replicas` and `choose_replicas` decide
how many replicas of each configuration to deploy. `dispatch_samples` divides the samples of each
round among the deployed replicas. `make_deployment_plan` plans the rounds of all replicas.
"""

from .cost_table import SequenceCosts, ShapeCosts, TokenCosts
from .deployment_search import (
    DeploymentPlan,
    candidate_replicas,
    choose_replicas,
    plan_replicas,
    replan,
    simulate_rounds,
)
from .length_bins import LengthBins, choose_length_bins
from .make_deployment_plan import (
    DeployedPlans,
    make_deployment_plan,
    predicted_round_seconds,
)
from .sample_dispatch import SampleDispatch, assign_samples, dispatch_samples, round_bins

__all__ = [
    "DeployedPlans",
    "make_deployment_plan",
    "predicted_round_seconds",
    "DeploymentPlan",
    "LengthBins",
    "SampleDispatch",
    "SequenceCosts",
    "ShapeCosts",
    "TokenCosts",
    "assign_samples",
    "candidate_replicas",
    "choose_length_bins",
    "choose_replicas",
    "dispatch_samples",
    "plan_replicas",
    "replan",
    "round_bins",
    "simulate_rounds",
]
