"""Looks for replicas, equal or not, that train a run faster than one layout of all devices (LobRA
4)."""

import logging
from collections.abc import Sequence

from jaxmux.engine import PreparedTask
from jaxmux.engine.backbone_size import mesh_sizes
from jaxmux.engine.batch_lengths import BatchLengths
from jaxmux.models import BackboneConfig
from jaxmux.planner import PlanningError
from jaxmux.planner.devices import Deployment, Replica
from jaxmux.planner.packing import sample_rounds
from jaxmux.planner.replicas import (
    ShapeCosts,
    candidate_replicas,
    choose_replicas,
    round_bins,
    simulate_rounds,
)

from .replica_fit import ReplicaFit, fit_longest
from .run_options import RunOptions

_log = logging.getLogger("jaxmux")


def choose_unlike(
    tasks: Sequence[PreparedTask],
    config: BackboneConfig,
    options: RunOptions,
    devices: int,
    single: ReplicaFit,
) -> tuple[Deployment, float] | None:
    """Chooses replicas by simulating a sample of rounds, and compares them with a single one.

    Args:
      tasks: the tasks of the training run.
      config: configuration of the backbone.
      options: settings of the training run.
      devices: number of devices.
      single: the single replica that all devices would form, in which all tasks fit.

    Returns:
      The replicas, those with most devices first, and the predicted seconds of a round divided by
      those of the single replica; None if some sample fits no replica.
    """
    fits = {}
    for replica in candidate_replicas(devices):
        try:
            replica.require(config.num_layers, mesh_sizes(config))
            shares = devices // replica.devices
            fits[replica] = fit_longest(tasks, config, options, replica, shares)
        except PlanningError as e:
            _log.info("replica %s: %s", replica, e)
    costs = ShapeCosts({r: (f.costs, f.shape) for r, f in (fits | {_of(single): single}).items()})
    sampled = sample_rounds([BatchLengths(task.batches, task.steps) for task in tasks])
    rounds = [[length for own in a_round.values() for length in own] for a_round in sampled]
    bins = [round_bins(lengths) for lengths in rounds]
    together = round_bins([length for lengths in rounds for length in lengths])
    try:
        plan = choose_replicas(devices, list(fits), together, bins, costs, len(rounds))
    except PlanningError as e:
        _log.info("replicas: %s", e)
        return None
    largest_first = sorted(plan.replicas.items(), key=lambda own: -own[0].devices)
    deployment = Deployment.of_counts(dict(largest_first))
    # Held-out samples have to fit too.
    longest = max(task.longest for task in tasks)
    if longest > max(fits[replica].shape.row_len for replica in plan.replicas):
        return None
    seconds = [
        simulate_rounds(replicas, devices, bins, costs)
        for replicas in (plan.replicas, {_of(single): 1})
    ]
    return deployment, seconds[0] / seconds[1]


def _of(fit: ReplicaFit) -> Replica:
    return fit.costs.replica
