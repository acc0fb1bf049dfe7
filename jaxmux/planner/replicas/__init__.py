"""Chooses replicas of unlike size and divides the samples of a round among them (LobRA).

In go the lengths of a round's samples, the kinds of replicas to choose from and the time that each
takes for a sequence of each length. Out come length bins, how many replicas of each kind to deploy,
and, round by round, the samples that each replica takes.
"""

from .cost_table import SequenceCosts
from .deployment_choice import choose_replicas
from .deployment_plan import DeploymentPlan, candidate_replicas, plan_replicas, replan
from .length_bins import LengthBins, choose_length_bins
from .sample_dispatch import SampleDispatch, dispatch_samples
from .sequence_costs import ModelledSequenceCosts

__all__ = [
    "DeploymentPlan",
    "LengthBins",
    "ModelledSequenceCosts",
    "SampleDispatch",
    "SequenceCosts",
    "candidate_replicas",
    "choose_length_bins",
    "choose_replicas",
    "dispatch_samples",
    "plan_replicas",
    "replan",
]
