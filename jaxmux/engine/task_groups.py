"""The groups of tasks whose microbatches follow each other in a round."""

from collections.abc import Mapping, Sequence

from .batch_lengths import BatchLengths
from .prepared_task import PreparedTask
from .replica_input import ReplicaInput

# For each group, the slots of its tasks.
Groups = Sequence[tuple[int, ...]]

# Rounds after a change of the tasks before new groups are searched. They are more than the rounds
# that are packed ahead, so that while tasks change often, no search is begun in vain.
_ROUNDS_WITHOUT_SEARCH = 8


class TaskGroups:
    """Divides the tasks of a round into groups, whose microbatches follow each other.

    While one group is updated, the others keep a pipeline busy. To find the best groups of many
    tasks takes longer than a round. That is no matter for tasks that end as planned, because rounds
    are packed ahead. After any other change of the tasks the pipeline would become empty meanwhile,
    so the first rounds keep the groups of before, and each new task joins the one with the fewest
    tokens. Later rounds keep them too unless the search finds better ones. Without such changes,
    the groups depend only on which tasks are live, so a training run that goes on has the same.

    Attributes:
      task_by_task: whether every task is a group, which shares no microbatch with others.
    """

    def __init__(self, replicas: Sequence[ReplicaInput]):
        """Chooses no groups yet.

        Args:
          replicas: the replicas. The groups are those that suit the longest pipeline of them, with
            its share of the samples.
        """
        self.task_by_task = any(replica.task_by_task for replica in replicas)
        # Only where rounds follow each other is a pipeline busy during an update.
        streams = [replica for replica in replicas if replica.streams]
        self._longest = max(streams, key=lambda own: own.replica.pp, default=None)
        self._devices = sum(replica.replica.devices for replica in replicas)
        # By the names of the live tasks, with their slots.
        self._known: dict[frozenset[tuple[int, str]], Groups] = {}
        self._last: tuple[frozenset[tuple[int, str]], Groups] = frozenset(), ()
        # The groups since the last change of the tasks, and the rounds left before others are
        # searched.
        self._kept: Groups = ()
        self._rounds_left = 0

    def renumbered(
        self, replicas: Sequence[ReplicaInput], numbers: Mapping[int, int]
    ) -> "TaskGroups":
        """Groups for microbatches of another size and other numbers of the slots. `begin_anew` lets
        the first rounds keep the present groups.

        Args:
          replicas: the replicas, with the new shape class.
          numbers: by old number, the new one of every slot that has a task.
        """
        other, (names, groups) = TaskGroups(replicas), self._last
        kept = [tuple(numbers[slot] for slot in own if slot in numbers) for own in groups]
        other._last = frozenset((numbers[n], name) for n, name in names if n in numbers), kept
        return other

    def begin_anew(self, tasks: Mapping[int, PreparedTask]) -> None:
        """Prepares for rounds of other tasks than those of the last call. Nothing is searched.

        Args:
          tasks: by slot, the live tasks.
        """
        names, (before, groups) = _names(tasks), self._last
        self._known = {names: self._known[names]} if names in self._known else {}
        stay = {slot for slot, _ in names & before}
        kept = [own for group in groups if (own := [slot for slot in group if slot in stay])]
        self._kept, self._rounds_left = (), 0
        if self.task_by_task or names in self._known:
            return
        if len(kept) < 2 or 2 * len(stay) < len(tasks):
            return
        tokens = {slot: sum(_lengths(task)[0]) for slot, task in tasks.items()}
        for slot in sorted(tasks.keys() - stay):
            min(kept, key=lambda group: sum(tokens[own] for own in group)).append(slot)
        self._kept = [tuple(sorted(group)) for group in kept]
        self._rounds_left = _ROUNDS_WITHOUT_SEARCH

    def __call__(self, tasks: Mapping[int, PreparedTask]) -> Groups:
        """The groups of live tasks, by slot."""
        names = _names(tasks)
        kept = self._kept if {slot for own in self._kept for slot in own} == tasks.keys() else ()
        if kept and self._rounds_left:
            self._rounds_left -= 1
            self._last = names, kept
            return kept
        if names not in self._known:
            own = {slot: tasks[slot] for slot in sorted(tasks)}
            self._known[names] = self._choose(own, kept)
        self._last = names, self._known[names]
        return self._known[names]

    def _choose(self, tasks: Mapping[int, PreparedTask], kept: Groups) -> Groups:
        if self.task_by_task:
            return [(slot,) for slot in tasks]
        if self._longest is None or self._longest.replica.pp == 1 or len(tasks) == 1:
            return [tuple(tasks)]
        from jaxmux.planner.pipeline import grouping_of_share

        replica, slots = self._longest.replica, list(tasks)
        lengths = [_lengths(task) for task in tasks.values()]
        present = [tuple(slots.index(slot) for slot in own) for own in kept]
        shape = self._longest.shape
        grouping = grouping_of_share(lengths, replica, shape, self._devices, present)
        return [tuple(slots[i] for i in group) for group in grouping.groups]


def _names(tasks: Mapping[int, PreparedTask]) -> frozenset[tuple[int, str]]:
    return frozenset((slot, task.task.name) for slot, task in tasks.items())


def _lengths(task: PreparedTask) -> BatchLengths:
    return BatchLengths(task.batches, task.steps)
