"""Random jobs with the rates and durations of MuxTune 5.4.

MuxTune replays a trace of a cluster of which it states the mean and the standard deviation of the
durations and the mean arrival rate. Here jobs arrive as a Poisson process, and durations are
lognormal with these two moments: most jobs are short and a few are very long, as in the trace.
"""

import math
from collections.abc import Sequence

import numpy as np

from .replay import Job

# MuxTune 5.4: mean and standard deviation of the durations in minutes, and arrivals per minute.
MEAN_MINUTES, DEVIATION_MINUTES, ARRIVALS_PER_MINUTE = 372.6, 612.9, 2.59


def random_jobs(
    rng: np.random.Generator,
    seconds_alone: Sequence[float],
    minutes: float = 24 * 60,
    arrivals_per_minute: float = ARRIVALS_PER_MINUTE,
    mean: float = MEAN_MINUTES,
    deviation: float = DEVIATION_MINUTES,
) -> list[Job]:
    """Returns the jobs that arrive in a span of time, in the order of their arrivals.

    The duration of a job is the time that it takes alone on a GPU. A job has the rounds that it
    trains alone in this time. All kinds are equally likely, and independent of the durations.

    Args:
      rng: source of the random numbers.
      seconds_alone: for each kind of task, the seconds of a round alone on a GPU.
      minutes: length of the span in minutes.
      arrivals_per_minute: mean number of arrivals per minute.
      mean: mean duration in minutes.
      deviation: standard deviation of the durations in minutes.
    """
    count = rng.poisson(arrivals_per_minute * minutes)
    arrivals = np.sort(rng.uniform(0, 60 * minutes, count))
    variance = math.log1p((deviation / mean) ** 2)
    durations = 60 * rng.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), count)
    kinds = rng.integers(len(seconds_alone), size=count)
    rounds = durations / np.asarray(seconds_alone)[kinds]
    return [
        Job(*job) for job in zip(arrivals.tolist(), kinds.tolist(), rounds.tolist(), strict=True)
    ]
