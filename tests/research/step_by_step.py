"""An independent replay for comparison: it keeps the remaining rounds of every job and moves from
event to event over plain lists.

Times are exact fractions, so simultaneous events coincide. No job arrives before second 0.
"""

from fractions import Fraction
from math import inf


def replay_step_by_step(jobs, policy, gpus, round_seconds):
    """The starts, the ends and the GPUs of the jobs, and the GPU seconds, all but the GPUs as
    fractions."""
    left = {}
    starts, ends, places = ({} for _ in range(3))
    busy, now, queue = Fraction(0), Fraction(-1), list(range(len(jobs)))

    def members(gpu):
        return [job for job in left if places[job] == gpu]

    def tasks(gpu):
        return tuple(sorted(jobs[job].kind for job in members(gpu)))

    while queue or left:
        speed = {
            job: 1 / Fraction(round_seconds(tasks(gpu)))
            for gpu in range(gpus)
            for job in members(gpu)
        }
        next_end = min((left[job] / speed[job] for job in left), default=inf)
        arrivals = [Fraction(jobs[job].arrival) for job in queue if jobs[job].arrival > now]
        passed = min([next_end, *(arrival - now for arrival in arrivals)])
        if passed != inf:
            for gpu in range(gpus):
                busy += passed * bool(members(gpu))
            for job in left:
                left[job] -= passed * speed[job]
            now += passed
        for job in [job for job in left if left[job] == 0]:
            ends[job] = now
            del left[job]
        while queue and jobs[queue[0]].arrival <= now:
            place = policy([tasks(gpu) for gpu in range(gpus)], jobs[queue[0]].kind)
            if place is None:
                break
            job = queue.pop(0)
            starts[job], places[job], left[job] = now, place, Fraction(jobs[job].rounds)
    order = range(len(jobs))
    return [starts[i] for i in order], [ends[i] for i in order], [places[i] for i in order], busy
