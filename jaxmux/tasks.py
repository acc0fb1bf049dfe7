"""A task: the fine-tuning job of one tenant."""

import os
import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SkipValidation

from .data import Source
from .errors import InputError
from .field_checks import EXACT, Count, Natural, PathText, Positive, Text, checked_dataclass
from .left_out import why_left_out
from .optimizers import OPTIMIZERS, AdamW, Optimizer
from .peft import SPECIFICATIONS, LoRA

# Files and folders are named after a task, and file systems permit names of 255 bytes.
LONGEST_NAME = 100
TASK_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"


class TaskError(InputError):
    """A task (fine-tuning job) cannot be trained, or no task of a given name exists. The message
    names the task and says what is wrong."""


def _source(value: Any) -> Any:
    """The source for which a path is short; any other value as it is."""
    return Source(os.fspath(value)) if isinstance(value, str | os.PathLike) else value


def _sources(value: Any) -> Any:
    return tuple(map(_source, value)) if isinstance(value, list | tuple) else _source(value)


def _name(name: Any) -> str:
    if not isinstance(name, str) or not re.fullmatch(TASK_NAME, name):
        raise TaskError(
            f"task {name!r}: a name consists of letters, digits, '.', '_' and '-', and begins with "
            "a letter or digit"
        )
    if len(name) > LONGEST_NAME:
        raise TaskError(
            f"task {name!r}: a name has at most {LONGEST_NAME} characters, not {len(name)}"
        )
    return name


@checked_dataclass
class Task:
    """One fine-tuning job: its data, adapter, optimizer and length, independent of all other tasks.

    Several tasks train at the same time on one frozen backbone, and none changes the result of
    another (on a GPU, up to rounding). A *global batch* is the samples of one optimizer update. A
    *step* of a task is one global batch with its update.

    Attributes:
      name: name of the task, unique in a training run (one call of `fine_tune`). Files are named
        after the task, so the name consists of letters, digits, ".", "_" and "-", begins with a
        letter or digit, and has at most 100 characters.
      data: the training records: a `Source`, or a list of sources that are mixed. An epoch has the
        samples of all of them, each as often as its `Source.repeat` or `Source.weight` says, in
        one random order. A path is short for `Source(path)`.
      adapter: what is trained: a `LoRA`, a `DoRA`, an `IA3`, an `LNTuning`, a `Bottleneck`, a
        `DiffPruning`, a `SparseDiff`, a `VeRA`, a `PromptTuning` or a `TrainedTokens`. Tasks with
        different kinds of adapters train together.
      optimizer: optimizer of this adapter, with its learning rate and schedule: an `AdamW`, `SGD`
        or `Lion`.
      batch_size: samples in a global batch. The last global batch of an epoch may hold fewer.
      max_length: most tokens of a sample, at least 2, with BOS and EOS. `Source.overlong` of the
        data decides what happens to longer samples: "truncate", "drop" or "error".
      epochs: number of times that the task trains on each of its samples. Give exactly one of
        `epochs` and `steps`.
      steps: number of global batches that the task trains. The data repeats if it has fewer. Give
        exactly one of `epochs` and `steps`.
      eval_data: held-out records, a `Source` or a path. Their loss is measured before and after
        training. None stands for no held-out records, unless `validation_fraction` takes them from
        `data`.
      validation_fraction: fraction of the records of `data` that is held out and not trained on, if
        there is no `eval_data`. Which ones depends on their numbers in the source and on
        `validation_seed` only. None holds out none.
      eval_every: number of steps from one measurement of the held-out loss to the next. None
        measures it only before and after training.
      keep_best: True exports the adapter with the lowest held-out loss that was measured after a
        step; False exports the last one. It needs `eval_every`.
      patience: training ends, and the task has succeeded, when so many measurements one after
        another have found no lower held-out loss. It needs `eval_every`. None trains all steps.
      max_seconds: training ends, and the task has succeeded, with the step after which the task has
        trained for so many seconds, waiting not included. None trains all steps.
      validation_seed: seed of the choice of these records. None takes `seed`; the configurations of
        a `Sweep` over "seed" take that of its task.
      seed: seed of the shuffling, of the initial adapter and of dropout; not negative.
      resume_from: folder of an adapter from which training starts, of Hugging Face PEFT, or of
        AdapterHub for a `Bottleneck`. What it computes (for LoRA rank, alpha, rsLoRA setting and
        target modules) must equal `adapter`. Only the weights are read, so the optimizer and the
        data begin anew. None starts from a new adapter.
      sample_prompt: a prompt that the backbone completes after training, once without and once with
        the adapter. If the task has an adapter, `fine_tune` prints both completions and writes them
        to samples.jsonl. None prints nothing.

    Raises:
      TaskError: a value has the wrong type or is outside its range, or not exactly one of `epochs`
        and `steps` is given.
    """

    name: Annotated[str, BeforeValidator(_name)]
    data: Annotated[
        Source | Annotated[tuple[Source, ...], Field(min_length=1)],
        BeforeValidator(_sources),
        Field(json_schema_extra={"$comment": "a path or a Source, or a list of them"}),
    ]
    adapter: SkipValidation[Any] = LoRA()
    optimizer: SkipValidation[Optimizer] = AdamW()
    batch_size: Count = 16
    max_length: Annotated[int, Field(ge=2), EXACT] = 1024
    epochs: Count | None = None
    steps: Count | None = None
    eval_data: Annotated[
        Source | None,
        BeforeValidator(_source),
        Field(json_schema_extra={"$comment": "a path or a Source"}),
    ] = None
    eval_every: Count | None = None
    keep_best: bool = False
    patience: Count | None = None
    max_seconds: Positive | None = None
    seed: Natural = 0
    resume_from: PathText | None = None
    sample_prompt: Text | None = None
    validation_fraction: Annotated[float, Field(gt=0, lt=1), EXACT] | None = None
    validation_seed: Natural | None = None

    def __post_init__(self):
        self._check_mixture()
        if not isinstance(self.adapter, tuple(SPECIFICATIONS.values())):
            is_class = isinstance(self.adapter, type)
            hint = "; write it with parentheses" if is_class else ""
            cls = self.adapter if is_class else type(self.adapter)
            name = self.adapter if isinstance(self.adapter, str) else cls.__name__
            if reason := why_left_out(name):
                hint = f"; {reason}"
            known = ", ".join(sorted(own.__name__ for own in SPECIFICATIONS.values()))
            raise self._error(
                f"adapter should be a specification ({known}), found {self.adapter!r}{hint}"
            )
        if not isinstance(self.optimizer, tuple(OPTIMIZERS.values())):
            known = ", ".join(o.__name__ for o in OPTIMIZERS.values())
            raise self._error(f"unknown optimizer {self.optimizer!r}; known: {known}")
        if (self.epochs is None) == (self.steps is None):
            found = "neither" if self.steps is None else "both"
            raise self._error(f"give epochs or steps, one of the two; found {found}")

        if self.eval_every is None:
            for field in ("keep_best", "patience"):
                if getattr(self, field):
                    raise self._error(f"{field} needs eval_every")
        elif self.eval_data is None and self.validation_fraction is None:
            raise self._error("eval_every needs eval_data or validation_fraction")
        if self.eval_data is not None and self.validation_fraction is not None:
            raise self._error(
                "give eval_data or validation_fraction, not both: each says which records are held "
                "out"
            )
        if self.validation_seed is not None and self.validation_fraction is None:
            raise self._error("validation_seed needs validation_fraction")

    def _check_mixture(self) -> None:
        for field in ("repeat", "weight"):
            if self.eval_data and getattr(self.eval_data, field) is not None:
                raise self._error(f"eval_data: {field} is for training data only")
        weighted = [source.path for source in self.sources if source.weight is not None]
        others = [source.path for source in self.sources if source.weight is None]
        if weighted and len(self.sources) == 1:
            raise self._error("data: a weight is a share beside other sources, and there is one")
        if weighted and others:
            raise self._error(
                f"data: {weighted[0]} has a weight and {others[0]} has none; give all sources of a "
                "task a weight, or none"
            )

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources of the training records, one or more."""
        return self.data if isinstance(self.data, tuple) else (self.data,)

    @property
    def split_seed(self) -> int:
        """Seed of the choice of the records that `validation_fraction` holds out."""
        return self.seed if self.validation_seed is None else self.validation_seed

    def _error(self, message: str) -> TaskError:
        return TaskError(f"task {self.name!r}: {message}")
