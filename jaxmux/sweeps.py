"""Sweeps: one task in many configurations, which train together in one run."""

import dataclasses
import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import Field, InstanceOf, SkipValidation

from .distributions import DISTRIBUTIONS
from .errors import InputError, without_task
from .field_checks import EXACT, Count, Natural, checked_dataclass
from .planner.numbers import numbered
from .similar_names import did_you_mean
from .tasks import LONGEST_NAME, TASK_NAME, Task, TaskError

# In a task's name, a value with a longer text is replaced by its number in the list.
_LONGEST_LABEL = 24
# Maximum number of configurations of a sweep. Checking more of them would take minutes.
MOST_CONFIGURATIONS = 10_000
# At most this many configurations are drawn for each one that is wanted, to find different ones.
_MOST_DRAWS = 100


class Configuration(NamedTuple):
    """One configuration of a sweep.

    Attributes:
      task: the task of the configuration, with a name that tells its values.
      values: by path of a swept field ("adapter.rank"), the value.
    """

    task: Task
    values: dict[str, Any]


@checked_dataclass
class Sweep:
    """One task in many configurations, which train together on one backbone.

    It stands in the list of tasks of `fine_tune` and of configs. Without `samples` it is a grid:
    all combinations of the values. With `samples`, this number of configurations is drawn.

    With `first_rung`, successive halving (Jamieson & Talwalkar 2016, synchronous) stops bad
    configurations early. The *rungs* are the steps first_rung, first_rung * factor, first_rung *
    factor ** 2 … before the last step of the task. At rung i, the values of `Task.best_metric`
    of all configurations that have reached it are compared. Only the best n / factor ** i of the n
    configurations, rounded down and at least one, train on. The others stop early and keep the
    adapter that they have then. The values are compared when all of them are measured. So the
    choice depends on the values only, and not on the devices or on the number of configurations
    that train at the same time. A configuration that has failed, or whose value or loss is not
    finite, ranks last. A configuration that ended before the rung ranks by its last value. Of two
    equal values, that of the earlier configuration is better.

    Configurations with different seeds hold out the same records by `Task.validation_fraction`:
    they get the seed of `task` as their `Task.validation_seed`.

    Attributes:
      task: the task with the values that are not swept. The names of configurations begin with its
        name.
      space: the values by path of a field of the task ("seed", "data", "adapter.rank",
        "optimizer.learning_rate"): a list, or, with `samples`, a `Uniform`, a `LogUniform` or an
        `Integers`. A value may be anything that the field may hold. So a value of "data" may be a
        list of sources, and a value of "adapter" may be a `LoRA`.
      samples: number of configurations that are drawn from `space`. None takes all combinations.
      seed: seed of the drawing.
      first_rung: number of steps after which configurations are compared for the first time. It
        needs held-out data. None lets all of them train to their ends.
      factor: at each rung, successive halving keeps one of this many configurations.

    Raises:
      TaskError: a value is outside its range, a path or a value does not suit the task, or there
        are more than 10,000 configurations. The message names the task and the path.
    """

    task: Annotated[InstanceOf[Task], Field(json_schema_extra={"$comment": "a Task"})]
    space: SkipValidation[Mapping[str, Any]]
    samples: Count | None = None
    seed: Natural = 0
    first_rung: Count | None = None
    factor: Annotated[int, Field(ge=2), EXACT] = 2

    def __post_init__(self):
        if not isinstance(self.space, Mapping) or not self.space:
            raise self._error(
                "space should be a mapping from paths of fields to their values, such as "
                f"{{'adapter.rank': [4, 8]}}, found {self.space!r}"
            )
        object.__setattr__(self, "space", dict(self.space))
        for path, values in self.space.items():
            self._check_values(path, values)
        if self.first_rung is not None and not (
            self.task.eval_data or self.task.validation_fraction or "eval_data" in self.space
        ):
            raise self._error("first_rung needs eval_data or validation_fraction of the task")
        self._require_moderate()
        # Making the tasks checks all values.
        steps = [task.steps for task in self.tasks()]
        if None not in steps:
            self.require_rung(max(steps))

    @property
    def name(self) -> str:
        """Name of the sweep, which is that of its task."""
        return self.task.name

    def configurations(self) -> list[Configuration]:
        """Returns the configurations in the order in which they are drawn. Those of a grid are in
        the order of the values, and the last path changes fastest.

        Raises:
          TaskError: a value does not suit the task.
        """
        values = list(self._values())
        return [
            Configuration(self._task(chosen, name), chosen)
            for chosen, name in zip(values, self._names(values), strict=True)
        ]

    def tasks(self) -> list[Task]:
        """The tasks of all configurations."""
        return [configuration.task for configuration in self.configurations()]

    def rungs(self, steps: int) -> list[int]:
        """The steps at which configurations are compared, ascending; empty without `first_rung`.

        Args:
          steps: number of steps of the longest configuration.
        """
        rungs, step = [], self.first_rung
        while step is not None and step < steps:
            rungs.append(step)
            step *= self.factor
        return rungs

    def require_rung(self, steps: int) -> None:
        """Raises TaskError if the configurations end before their `first_rung`.

        Args:
          steps: number of steps of the longest configuration.
        """
        if self.first_rung is not None and not self.rungs(steps):
            raise self._error(
                f"first_rung is {self.first_rung}, but its tasks train only "
                f"{numbered(steps, 'step')}; configurations are compared before their last step"
            )

    def _require_moderate(self) -> None:
        """Raises TaskError if there are more configurations than a training run can have."""
        count = self.samples or math.prod(len(values) for values in self.space.values())
        if count > MOST_CONFIGURATIONS:
            which = "samples"
            if not self.samples:
                sizes = {path: len(values) for path, values in self.space.items()}
                which = " x ".join(f"{size} values of {path}" for path, size in sizes.items())
            raise self._error(
                f"{count:,} configurations ({which}), and a sweep has at most "
                f"{MOST_CONFIGURATIONS:,}; give fewer values, or draw some of them with samples"
            )

    def _values(self) -> Iterator[dict[str, Any]]:
        if self.samples is None:
            for combination in itertools.product(*self.space.values()):
                yield dict(zip(self.space, combination, strict=True))
            return
        source = random.Random(self.seed)
        drawn: list[dict[str, Any]] = []
        for _ in range(_MOST_DRAWS * self.samples):
            draw = {
                path: values.draw(source)
                if isinstance(values, DISTRIBUTIONS)
                else values[source.randrange(len(values))]
                for path, values in self.space.items()
            }
            if draw not in drawn:
                drawn.append(draw)
                yield draw
            if len(drawn) == self.samples:
                return
        raise self._error(
            f"samples: {self.samples} different configurations were asked for, and space has only "
            f"{len(drawn)}"
        )

    def _task(self, values: Mapping[str, Any], name: str) -> Task:
        task: Any = dataclasses.replace(self.task, name=name)
        # A whole part comes before fields of it.
        for path in sorted(values, key=lambda path: path.count(".")):
            try:
                task = _replaced(task, path.split("."), values[path])
            except ValueError as e:
                # The message of the sweep names the configuration's value already.
                message = without_task(str(e), name)
                raise self._error(f"space: {path!r} = {values[path]!r}: {message}") from None
        splits = task.validation_fraction is not None and task.validation_seed is None
        if splits and "seed" in values and "validation_seed" not in values:
            # Losses can be compared only if they are losses of the same records.
            task = dataclasses.replace(task, validation_seed=self.task.seed)
        return task

    def _names(self, all_values: Sequence[Mapping[str, Any]]) -> list[str]:
        """Names each configuration by the name of the task and the values."""
        ends = [path.rpartition(".")[2] for path in self.space]
        keys = {p: e if ends.count(e) == 1 else p for p, e in zip(self.space, ends, strict=True)}
        names = []
        for values in all_values:
            parts = [f"{keys[path]}_{self._label(path, value)}" for path, value in values.items()]
            names.append("-".join([self.name, *parts]))
        counts, width = Counter(names), len(str(len(names)))
        for i, name in enumerate(names):
            if len(name) > LONGEST_NAME or counts[name] > 1:
                end = f"-{i + 1:0{width}}"
                whole = name if len(name) + len(end) <= LONGEST_NAME else self.name
                names[i] = whole[: LONGEST_NAME - len(end)] + end
        return names

    def _label(self, path: str, value: Any) -> str:
        """A value as it stands in the name of a task. If it has no short text, its number in the
        list of values stands for it, counted from 1."""
        drawn = isinstance(self.space[path], DISTRIBUTIONS)
        short = _short(value, digits=3 if drawn else None)
        if short is not None and len(short) <= _LONGEST_LABEL:
            others = () if drawn else [_short(other) for other in self.space[path]]
            if list(others).count(short) <= 1:
                return short
        return f"no{_index(self.space[path], value) + 1}"

    def _check_values(self, path: Any, values: Any) -> None:
        if not isinstance(path, str):
            raise self._error(f"space: a path is a string such as 'adapter.rank', found {path!r}")
        if path == "name":
            raise self._error("space: 'name' cannot be swept; configurations are named by values")
        if path == "best_metric":
            raise self._error("space: 'best_metric' cannot be swept; it compares configurations")
        _refuse_unknown(self.task, path, self._error, self.space)
        if isinstance(values, DISTRIBUTIONS):
            if self.samples is None:
                kind = type(values).__name__
                raise self._error(
                    f"space: {path!r}: a grid takes a list of values; with samples=N, N "
                    f"configurations are drawn from {kind}"
                )
            return
        if not isinstance(values, list | tuple) or not values:
            known = ", ".join(cls.__name__ for cls in DISTRIBUTIONS)
            raise self._error(
                f"space: {path!r} should be a list of values, or {known}, found {values!r}"
            )
        for i, value in enumerate(values):
            if _index(values, value) < i:
                raise self._error(f"space: {path!r} has the value {value!r} twice")

    def _error(self, message: str) -> TaskError:
        name = f"sweep {self.task.name!r}" if isinstance(self.task, Task) else "Sweep"
        return TaskError(f"{name}: {message}")


def expanded(tasks: Sequence[Task | Sweep]) -> list[Task]:
    """Replaces each sweep in a list of tasks by the tasks of its configurations."""
    return [t for each in tasks for t in (each.tasks() if isinstance(each, Sweep) else [each])]


def sweeps_of(tasks: Sequence[Task | Sweep]) -> list[Sweep]:
    """Returns the sweeps in a list of tasks and sweeps.

    Raises:
      TaskError: two sweeps have the same name.
    """
    sweeps = [each for each in tasks if isinstance(each, Sweep)]
    names = [sweep.name for sweep in sweeps]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise TaskError(f"sweep {repeated[0]!r}: {names.count(repeated[0])} sweeps have this name")
    return sweeps


def shown_value(value: Any) -> str:
    """A swept value as tables and plots show it."""
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(shown_value, value))
    if dataclasses.is_dataclass(value):
        changed = [
            f"{f.name}={shown_value(getattr(value, f.name))}"
            for f in dataclasses.fields(value)
            if getattr(value, f.name) != f.default
        ]
        path = getattr(value, "path", None)
        return path.rpartition("/")[2] if path else f"{type(value).__name__}({', '.join(changed)})"
    return str(value)


def _refuse_unknown(task: Task, path: str, error: Any, space: Mapping[str, Any]) -> None:
    """Raises `error` if a task has no field of this path. If `space` has values of a whole part,
    such as "adapter", the fields of the part are checked with each of these values."""
    part: Any = task
    names = path.split(".")
    for i, name in enumerate(names):
        above = ".".join(names[:i])
        if above in space:
            return
        if not dataclasses.is_dataclass(part):
            raise error(f"space: {path!r}: {above} of the task is {part!r}, which has no fields")
        known = [field.name for field in dataclasses.fields(part)]
        if name not in known:
            of = f"{above} ({type(part).__name__})" if above else "a task"
            hint = did_you_mean(name, known) or f"there are {', '.join(known)}"
            raise error(f"space: {path!r}: {of} has no field {name!r}; {hint}")
        part = getattr(part, name)


def _replaced(part: Any, names: Sequence[str], value: Any) -> Any:
    """Returns a specification in which the field of this path has another value."""
    first, *rest = names
    known = [f.name for f in dataclasses.fields(part)] if dataclasses.is_dataclass(part) else []
    if first not in known:
        hint = did_you_mean(first, known) or f"there are {', '.join(known) or 'none'}"
        raise InputError(f"{type(part).__name__} has no field {first!r}; {hint}")
    value = _replaced(getattr(part, first), rest, value) if rest else value
    return dataclasses.replace(part, **{first: value})


def _index(values: Sequence[Any], value: Any) -> int:
    """The index of a value in a list. Values of different types, such as 1 and True, differ."""
    return next(i for i, v in enumerate(values) if type(v) is type(value) and v == value)


def _short(value: Any, digits: int | None = None) -> str | None:
    """Writes a value in the characters that names of tasks may have; None if that is impossible."""
    if isinstance(value, float):
        return f"{value:.{digits}g}".replace("+", "") if digits else repr(value).replace("+", "")
    if isinstance(value, bool | int | None):
        return str(value)
    if isinstance(value, list | tuple):
        parts = [_short(part) for part in value]
        return ".".join(parts) if parts and None not in parts else None
    if isinstance(value, str):
        # The last part of a path tells most.
        name = re.sub(r"\.jsonl?$", "", value.rpartition("/")[2])
        return name if re.fullmatch(TASK_NAME, name) else None
    return None
