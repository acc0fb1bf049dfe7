"""sweep.png: the configurations of sweeps."""

from collections.abc import Mapping, Sequence


def plot_sweeps(sweeps, summary, held_out, path):
    pass
