"""When held-out losses are measured, and when tasks stop because of their time."""

from collections.abc import Sequence
from concurrent.futures import Executor as Threads

from .executor import Executor
from .results import DispatchedEvaluation, Results
from .rounds import RoundPlan
from .slots import Slots


class HeldOut:
    """Dispatches the measurements of held-out losses. Their results arrive with those of updates,
    which decide whether a task stops early."""

    def __init__(self, slots: Slots, results: Results, executor: Executor, copies: Threads):
        """Starts without measurements.

        Args:
          slots: the slots, with the tasks that are trained.
          results: gets what has been dispatched.
          executor: runs the measurements.
          copies: the thread that waits for copies on their way to the host.
        """
        self._slots, self._results = slots, results
        self._executor, self._copies = executor, copies

    def end_round(self, plan: RoundPlan, begun: RoundPlan | None, rounds: int) -> None:
        """Stops tasks that have trained for their longest time, and measures those tasks whose
        turn it is.

        Args:
          plan: the round that has been dispatched.
          begun: the round after it, if it has begun.
          rounds: number of rounds that have been dispatched.
        """
        self._stop_in_time(plan, begun)
        updated = {n: plan.steps[n] for n in plan.steps if n in plan.ends and self._slots.runs(n)}
        due = [n for n, step in updated.items() if self._slots[n].is_measured_after(step + 1)]
        self.measure(due, rounds)

    def measure(self, numbers: Sequence[int], rounds: int) -> None:
        """Begins to measure the held-out losses of tasks, with the adapters that they have after
        everything that has been dispatched.

        Args:
          numbers: slots of the tasks. Tasks without held-out samples are left out.
          rounds: number of rounds that have been dispatched.
        """
        tasks = {n: self._slots[n] for n in numbers if self._slots[n].prepared.eval_samples}
        if not tasks:
            return
        steps = {
            n: slot.progress.step + self._results.steps_awaited(slot) for n, slot in tasks.items()
        }
        adapters = {
            n: self._copies.submit(self._slots.copy_to_host(slot.name, ("adapter",))).result
            for n, slot in tasks.items()
            if slot.prepared.task.keep_best and steps[n]
        }
        measured = self._executor.evaluate({n: slot.prepared for n, slot in tasks.items()})
        self._results.add_evaluation(
            DispatchedEvaluation(rounds, steps, tasks, adapters, *measured)
        )

    def _stop_in_time(self, plan: RoundPlan, begun: RoundPlan | None) -> None:
        """Lets tasks stop that have trained for their longest time: after the step that has been
        dispatched, or that has begun."""
        trained = plan.steps | (begun.steps if begun else {})
        for number, step in trained.items():
            if not self._slots.runs(number):
                continue
            slot = self._slots[number]
            longest = slot.prepared.task.max_seconds
            if longest and slot.stop_after is None and slot.progress.seconds >= longest:
                slot.stop_after = step + 1
