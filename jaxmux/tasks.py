"""A task: the fine-tuning job of one tenant."""

from typing import Annotated, Any

from pydantic import Field

from .data import Source
from .errors import InputError
from .field_checks import (
    EXACT,
    Count,
    Natural,
    Part,
    PathText,
    Positive,
    Rule,
    Text,
    checked_dataclass,
)
from .objectives import BOUND, HIGHER_IS_BETTER, LOSS, OBJECTIVES, SFT, Bound, Objective
from .optimizers import OPTIMIZERS, AdamW, Optimizer
from .peft import SPECIFICATIONS, LoRA
from .similar_names import did_you_mean

# Files and folders are named after a task, and file systems permit names of 255 bytes.
LONGEST_NAME = 100
TASK_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"


class TaskError(InputError):
    """A task (fine-tuning job) cannot be trained, or no task of a given name exists. The message
    names the task and says what is wrong."""


_SOURCE = {"": Source}
_HELD_OUT = "eval_data", "validation_fraction"


@checked_dataclass(
    rules=(
        Rule("give epochs or steps, one of the two", ("epochs", "steps"), required=True),
        Rule("keep_best needs eval_every", ("eval_every",), needed_by="keep_best"),
        Rule("patience needs eval_every", ("eval_every",), needed_by="patience"),
        Rule("stop_when needs eval_every", ("eval_every",), needed_by="stop_when"),
        Rule(
            "eval_every needs eval_data or validation_fraction", _HELD_OUT, needed_by="eval_every"
        ),
        Rule(
            "best_metric needs eval_data or validation_fraction", _HELD_OUT, needed_by="best_metric"
        ),
        Rule(
            "give eval_data or validation_fraction, not both: each says which records are held out",
            _HELD_OUT,
        ),
        Rule(
            "validation_seed needs validation_fraction",
            ("validation_fraction",),
            needed_by="validation_seed",
        ),
    )
)
class Task:
    """One fine-tuning job: its data, adapter, optimizer and length, independent of all other tasks.

    Several tasks train at the same time on one frozen backbone, and none changes the result of
    another (on a GPU, up to rounding). A *global batch* is the set of samples of one optimizer
    update. A *step* of a task is one global batch with its update.

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
      batch_size: samples or pairs in a global batch. The last global batch of an epoch may hold
        fewer.
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
        there is no `eval_data`. The choice depends only on the numbers of the records in the source
        and on `validation_seed`. None holds out none.
      eval_every: number of steps from one measurement of the held-out loss to the next. None
        measures it only before and after training.
      keep_best: True exports the adapter with the best value of `best_metric` that was measured
        after a step, of equal ones the earliest; False exports the last one. It needs
        `eval_every`.
      patience: number of measurements in a row without a better value of `best_metric` after which
        training ends. The task has then succeeded. It needs `eval_every`. None trains all steps.
      max_seconds: training ends with the first step at which the task has trained for this many
        seconds, without the time that it waited. The task has then succeeded. None trains all
        steps.
      validation_seed: seed of the choice of the records that `validation_fraction` holds out. None
        takes `seed`; the configurations of a `Sweep` over "seed" take the seed of its task.
      seed: seed of the shuffling, of the initial adapter and of dropout; not negative.
      resume_from: folder of an adapter from which training starts, of Hugging Face PEFT, or of
        AdapterHub for a `Bottleneck`. It must compute the same as `adapter` (for LoRA: the same
        rank, alpha, rsLoRA setting and target modules). Only the weights are read, so the optimizer
        and the data begin anew. None starts from a new adapter.
      sample_prompt: a prompt that the backbone completes after training, once without and once with
        the adapter. If the task has an adapter, `fine_tune` prints both completions and writes them
        to samples.jsonl. None prints nothing.
      objective: what training minimises: an `SFT`; for records with a chosen and a rejected answer
        a `DPO`, `CPO`, `SimPO` or `ORPO`, of which a pair counts as one sample of `batch_size`;
        for labelled answers a `KTO`; for rollouts a `Policy`. Python code may
        also give a function (`CustomLoss`).
      best_metric: the metric of the held-out records by which adapters are compared, for
        `keep_best`, `patience` and the configurations of a `Sweep`: "loss", the value of the
        objective, or another metric of the objective, such as "rewards/accuracies" or "kl". Whether
        higher or lower values are better follows from the metric.
      stop_when: a bound such as "kl > 0.1" or "rewards/accuracies > 0.95", of a metric that
        `best_metric` may name. Training ends with the first measurement after a step that passes
        it. The task has then succeeded. It needs `eval_every`. None trains all steps.

    Raises:
      TaskError: a value has the wrong type or is outside its range, not exactly one of `epochs`
        and `steps` is given, or the objective does not have the metric of `best_metric` or of
        `stop_when`.
    """

    name: Annotated[
        str,
        Field(
            pattern=f"^{TASK_NAME}$",
            max_length=LONGEST_NAME,
            json_schema_extra={
                "$comment": f"a name of at most {LONGEST_NAME} letters, digits, '.', '_' and '-' "
                "that begins with a letter or digit"
            },
        ),
    ]
    data: Annotated[
        Source | tuple[Source, ...],
        Part(_SOURCE, "a path or a Source, or a list of them", short="path", several=True),
    ]
    adapter: Annotated[Any, Part(SPECIFICATIONS)] = LoRA()
    optimizer: Annotated[Optimizer, Part(OPTIMIZERS)] = AdamW()
    batch_size: Count = 16
    max_length: Annotated[int, Field(ge=2), EXACT] = 1024
    epochs: Count | None = None
    steps: Count | None = None
    eval_data: Annotated[
        Source | None, Part(_SOURCE, "a path or a Source", short="path", optional=True)
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
    objective: Annotated[Objective, Part(OBJECTIVES, base=Objective)] = SFT()
    best_metric: Annotated[str, Field(json_schema_extra={"enum": [*HIGHER_IS_BETTER]})] = LOSS
    stop_when: (
        Annotated[
            str,
            Field(
                pattern=BOUND,
                json_schema_extra={"$comment": "a bound of a metric, such as 'kl > 0.1'"},
            ),
        ]
        | None
    ) = None

    def __post_init__(self):
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
        self._require_metric("best_metric", self.best_metric)
        if self.stop_when is not None:
            self._require_metric("the metric of stop_when", Bound.of(self.stop_when).metric)

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources of the training records, at least one."""
        return self.data if isinstance(self.data, tuple) else (self.data,)

    def _require_metric(self, what: str, metric: str) -> None:
        metrics = LOSS, *self.objective.compared
        if metric not in metrics:
            hint = did_you_mean(metric, metrics)
            raise self._error(
                f"{what} should be one of {', '.join(metrics)}, by which adapters of this "
                f"{type(self.objective).__name__} can be compared, found {metric!r}"
                f"{hint and f'; {hint}'}"
            )

    @property
    def split_seed(self) -> int:
        """The seed with which `validation_fraction` chooses records."""
        return self.seed if self.validation_seed is None else self.validation_seed

    def _error(self, message: str) -> TaskError:
        return TaskError(f"task {self.name!r}: {message}")
