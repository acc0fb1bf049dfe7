"""Shows a plan as tables and lines of text on a terminal."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from jaxmux.planner.devices import Deployment, Replica
from jaxmux.planner.numbers import numbered, size_text
from jaxmux.planner.pipeline import Plan, SmallerMicrobatches
from jaxmux.printable import Name

if TYPE_CHECKING:
    from jaxmux.planner.replicas import DeployedPlans

# Explanations of the words in the tables, of one or two lines each on a terminal of 80 columns.
_WORDS = {
    "round": "one global batch of every task, after which the tasks are updated",
    "tokens": "in the first table as max_length counts them; then places in rows, n - 1 for a "
    "sample of n tokens",
    "microbatch": "the rows that one forward and backward pass computes at once",
    "shape class": "rows × tokens of a row; a chunk is a part of a row that belongs to one task, "
    "a sequence is a sample",
    "pairs": "two samples each: the prompt with the chosen and with the rejected answer",
    "answers": "answers that are labelled as desirable or undesirable",
    "padding": "the share of a microbatch that holds no token of a sample",
    "hTask": "tasks that train faster in shared microbatches, joined by plus signs",
    "bucket": "hTasks that are packed into the same microbatches",
    "bubble ratio": "the share of the time in which stages of the pipeline are idle",
    "one task at a time": "each task trains alone, one after another, in the same shape",
    "1F1B per task": "no task shares microbatches; stages do one forward, then one backward pass",
    "batch everything": "all tasks share all microbatches, in the order of 1F1B",
    "kept": "from most to least: 'none' (nothing is computed again), 'norms', 'dots', 'lean', "
    "'full'",
}
_OF_PIPELINES = ("bubble ratio", "1F1B per task", "batch everything")
_OF_ONE_STAGE = ("one task at a time",)
_OF_REPLICAS = ("round", "tokens", "pairs", "answers", "microbatch", "shape class")
# Words that are explained if a task counts its records in them.
_UNITS = "pairs", "answers"
# If an hTask has more tasks than this, only half as many names are shown.
_NAMES = 8


class TrainingFacts(NamedTuple):
    """Facts about the training that a plan predicts.

    Attributes:
      device: kind of the devices. If the plan's costs are for another kind, no times are shown.
      memory_is_known: whether training refuses tasks that do not fit into memory.
      choices: the lines in which training reports the shape of its microbatches.
    """

    device: str
    memory_is_known: bool = True
    choices: tuple[str, ...] = ()

    def has_times(self, plan: Plan) -> bool:
        """Whether the plan's times are those of this kind of device."""
        return plan.costs.device == self.device


def plan_tables(
    plan: Plan,
    smaller: SmallerMicrobatches | None,
    dropped: Mapping[str, int],
    training: TrainingFacts,
) -> Iterator[Table | Text | str]:
    """The tables and lines that describe a plan, in the order of the report. A `Text` is a line
    that must not be wrapped, because it contains a path.

    Args:
      smaller: smaller microbatches that would be faster; None if there are none.
      dropped: by name of the task, the number of records without a sample.
    """
    yield from _heading(plan, plan.replica, training)
    if (shards := plan.replica.shards) > 1:
        yield (
            f"{shards} data shards train different samples at the same time; microbatches and "
            "their tokens are those of the first shard"
        )
    yield _tasks(plan)
    yield from _dropped(plan, dropped)
    yield _buckets(plan)
    yield _shape(plan)
    yield f"\n{plan.costs.kind} costs, over {plan.rounds} rounds:"
    yield _predictions(plan, training)
    yield _memory(plan, training)
    if smaller:
        took = f"{_duration(smaller.round_seconds)} per round"
        if not training.has_times(plan):
            saved = 1 - smaller.round_seconds / plan.prediction.round_seconds
            took = f"{saved:.0%} less time per round"
        yield (
            f"faster: fine_tune.tokens_per_microbatch={smaller.tokens} would take {took}, with "
            f"{smaller.bubble_ratio:.1%} bubbles"
        )
    hidden = _OF_PIPELINES if plan.replica.pp == 1 else _OF_ONE_STAGE
    yield _legend([word for word in _WORDS if word not in hidden], plan)


def deployment_tables(
    several: "DeployedPlans", dropped: Mapping[str, int], training: TrainingFacts
) -> Iterator[Table | Text | str]:
    """Like `plan_tables`, for the plans of several replicas."""
    plan = next(plan for plan in several.plans if plan)
    yield from _heading(plan, several.deployment, training)
    yield _tasks(plan)
    yield from _dropped(plan, dropped)
    if any(replica.shards > 1 for replica in several.deployment.replicas):
        yield "microbatches of a replica with data shards are those of the first shard"
    yield f"{plan.costs.kind} costs, over {plan.rounds} rounds:"
    yield _replicas(several, training)
    if training.has_times(plan):
        rate = sum(several.tokens) / several.round_seconds
        yield (
            f"a round takes {_duration(several.round_seconds)}, that is {rate:,.0f} tokens/s, "
            "without the exchange of gradients between replicas"
        )
    for i, replica_plan in enumerate(several.plans):
        if replica_plan is None:
            yield f"replica {i} ({several.deployment.replicas[i]}) trains no sample of these rounds"
    yield _legend(_OF_REPLICAS, plan)


def _legend(words: Iterable[str], plan: Plan) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("", "")
    for word in words:
        if word not in _UNITS or any(word == f"{task.unit}s" for task in plan.tasks):
            table.add_row(word, _WORDS[word])
    return table


def _replicas(several: "DeployedPlans", training: TrainingFacts) -> Table:
    times = training.has_times(next(plan for plan in several.plans if plan))
    table = NumberTable(
        "replica",
        "shape class",
        "tokens\nper round",
        "microbatches\nper round",
        "round\ntime" if times else "part of\na round",
        "memory",
        texts=2,
    )
    shares = zip(several.deployment.replicas, several.plans, several.tokens, strict=True)
    for i, (replica, plan, tokens) in enumerate(shares):
        if plan is None:
            continue
        shape, prediction = plan.shape, plan.prediction
        part = prediction.round_seconds / several.round_seconds
        table.add_row(
            f"{i}: {replica}",
            f"{shape.rows} × {shape.row_len:,}, chunks of {shape.chunk_len}",
            f"{tokens:,.0f}",
            f"{prediction.microbatches:.2f}",
            _duration(prediction.round_seconds) if times else f"{part:.0%}",
            size_text(prediction.memory_bytes),
        )
    return table


def _heading(
    plan: Plan, mesh: Replica | Deployment, training: TrainingFacts
) -> Iterator[str | Text]:
    """The backbone, the devices, the origin of the costs, and the choices of training."""
    costs = plan.costs
    devices = f"{mesh.devices} × {training.device}"
    yield f"{plan.backbone} ({len(plan.remat)} layers) on {mesh}: {devices}"
    if training.has_times(plan):
        origin = f"costs are {costs.kind}: {costs.text}"
        yield Text(origin) if costs.kind == "measured" else origin
    else:
        yield (
            f"no profile of {training.device} for this backbone: costs are estimated for "
            f"{costs.device} and only compare choices, so no times are shown; `jaxmux profile` "
            "measures a profile for --profile=FILE"
        )
    yield from costs.notes
    yield from training.choices


def _tasks(plan: Plan) -> Table:
    table = NumberTable("task", "rank", "batch", "steps", "samples", "tokens", "mean", "longest")
    for task in plan.tasks:
        mean = f"{task.tokens / task.samples:.1f}"
        samples = f"{task.records:,}" + f" {task.unit}s" * (task.unit != "sample")
        table.add_row(
            task.name,
            str(task.rank or "-"),
            f"{task.batch_size:,}",
            f"{task.steps:,}",
            samples,
            f"{task.tokens:,}",
            mean,
            f"{task.longest:,}",
        )
    return table


def _dropped(plan: Plan, dropped: Mapping[str, int]) -> Iterator[str]:
    for task in plan.tasks:
        if count := dropped.get(task.name):
            yield (
                f"task {task.name}: {count:,} of {task.records + count:,} records dropped "
                "(over-long, or no targets left)"
            )


def _fused(names: list[str]) -> str:
    """The tasks of an hTask; if there are many, as in a sweep, only the first ones."""
    shown = names if len(names) <= _NAMES else names[: _NAMES // 2]
    left = len(names) - len(shown)
    return " + ".join([*shown, *([f"{left} more"] if left else [])])


def _buckets(plan: Plan) -> Table:
    table = NumberTable(
        "bucket",
        "hTasks (+: fused)",
        "tokens\nper round",
        "microbatches\nper round",
        "padding",
        texts=2,
    )
    tokens = np.array(plan.tokens_by_microbatch)
    buckets = np.array([microbatch.bucket for microbatch in plan.schedule.microbatches])
    slot_tokens: Counter[int] = Counter()
    for placed in plan.microbatches:
        for sample in placed:
            slot_tokens[sample.slot] += sample.tokens

    def add_row(name: str, htasks: str, counted: int, tokens: np.ndarray) -> None:
        table.add_row(
            name,
            htasks,
            f"{counted / plan.rounds:,.0f}",
            f"{len(tokens) / plan.rounds:.2f}",
            f"{1 - tokens.sum() / (len(tokens) * plan.shape.tokens):.1%}",
        )

    for i, bucket in enumerate(plan.buckets):
        htasks = [_fused([plan.tasks[slot].name for slot in plan.htasks[h]]) for h in bucket]
        # The bucket's microbatches may also hold samples of the next bucket. Tokens are therefore
        # counted by slot, and padding by microbatch.
        counted = sum(slot_tokens[slot] for h in bucket for slot in plan.htasks[h])
        add_row(str(i), ", ".join(htasks), counted, tokens[buckets == i])
    if len(plan.buckets) > 1:
        table.add_section()
        add_row("all", "", tokens.sum(), tokens)
    return table


def _shape(plan: Plan) -> str:
    shape = plan.shape
    sequences = "one sequence" if shape.max_sequences == 1 else f"{shape.max_sequences} sequences"
    return (
        f"shape class: {numbered(shape.rows, 'row')} × {shape.row_len:,} = {shape.tokens:,} "
        f"tokens, chunks of {shape.chunk_len}, at most {sequences} a row"
    )


def _predictions(plan: Plan, training: TrainingFacts) -> Table:
    """The plan and its baselines, with bubble ratios if there is a pipeline."""
    bubbles, times = plan.replica.pp > 1, training.has_times(plan)
    # Headings of several lines leave room for the method in 80 columns.
    table = NumberTable(
        "method",
        *(["bubble\nratio"] if bubbles else []),
        "microbatches\nper round",
        *(["round\ntime", "tokens/s"] if times else []),
        "time against\nthe plan's",
    )
    tokens = plan.replica.shards * sum(plan.tokens_by_microbatch) / plan.rounds
    prediction = plan.prediction
    for name, method in [("this plan", prediction), *((b.name, b) for b in plan.baselines)]:
        seconds = method.round_seconds
        table.add_row(
            name,
            *([f"{method.bubble_ratio:.1%}"] if bubbles else []),
            f"{method.microbatches:.2f}",
            *([_duration(seconds), f"{tokens / seconds:,.0f}"] if times else []),
            f"{seconds / prediction.round_seconds:.2f}x",
        )
    return table


def _memory(plan: Plan, training: TrainingFacts) -> str:
    peak, memory = plan.prediction.memory_bytes, plan.costs.memory_bytes
    policies = ", ".join(f"{p!r} in {n} layers" for p, n in Counter(plan.remat).items())
    limit = (
        f"of {size_text(memory)}"
        if training.memory_is_known
        else f"(what {training.device} has is unknown, so nothing is refused)"
    )
    return (
        f"memory per device ({plan.costs.kind}): {size_text(peak)} {limit}\n"
        f"kept for the backward pass: {policies}"
    )


class NumberTable(Table):
    """A table whose first columns hold text and whose other columns hold numbers. If the table is
    too wide, only text is wrapped."""

    def __init__(self, *columns: str, texts: int = 1):
        super().__init__(box=box.SIMPLE_HEAD)
        self._texts = texts
        for i, column in enumerate(columns):
            if i < texts:
                self.add_column(column)
            else:
                self.add_column(column, justify="right", no_wrap=True)

    def add_row(self, *cells: str, **options) -> None:
        texts = map(Name, cells[: self._texts])
        super().add_row(*texts, *cells[self._texts :], **options)


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def bucket_labels(plan: Plan) -> dict[int, str]:
    """For each bucket, the names of at most three of its tasks, for the legend of a picture."""
    labels = {}
    for i, slots in enumerate(plan.groups):
        names = [plan.tasks[slot].name for slot in slots]
        labels[i] = ", ".join([*names[:3], *([f"{len(names) - 3} more"] if names[3:] else [])])
    return labels
