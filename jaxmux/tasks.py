"""A task: the fine-tuning job of one tenant."""

import dataclasses
import os
import re

from .data import Source
from .optimizers import OPTIMIZERS, AdamW, Optimizer
from .peft import LoRA


class TaskError(ValueError):
    """A task (fine-tuning job) cannot be trained, or no task of a given name exists. The message
    names the task and says what is wrong."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One fine-tuning job: its data, adapter, optimizer and length, independent of all other tasks.

    Several tasks train at the same time on one frozen backbone, and none changes the result of
    another (on a GPU, up to rounding). A *global batch* is the samples of one optimizer update. A
    *step* of a task is one global batch with its update.

    Attributes:
      name: name of the task, unique in a training run (one call of `fine_tune`). Files are named
        after the task, so the name consists of letters, digits, ".", "_" and "-", and begins with a
        letter or digit.
      data: the training records. A path is short for `Source(path)`.
      adapter: rank, scale, dropout and target modules of the adapter that is trained.
      optimizer: optimizer of this adapter, with its learning rate and schedule: an `AdamW`, `SGD`
        or `Lion`.
      batch_size: samples in a global batch. The last global batch of an epoch may hold fewer.
      max_length: most tokens of a sample, at least 2, with BOS and EOS. `Source.overlong` of the
        data decides what happens to longer samples: "truncate", "drop" or "error".
      epochs: number of times that the task trains on each of its samples. Give exactly one of
        `epochs` and `steps`.
      steps: number of global batches that the task trains. The data repeats if it has fewer. Give
        exactly one of `epochs` and `steps`.
      eval_data: held-out records, a `Source` or a path. `fine_tune` measures their loss before and
        after training. None stands for no held-out records.
      seed: seed of the shuffling, of the initial adapter and of dropout; not negative.
      resume_from: folder of a Hugging Face PEFT adapter from which training starts. Its rank,
        alpha, rsLoRA setting and target modules must equal those of `adapter`. Only the weights are
        read, so the optimizer and the data begin anew. None starts from a new adapter.
      sample_prompt: a prompt that the backbone completes after training, once without and once with
        the adapter. `fine_tune` prints both completions if the task succeeded. None prints nothing.

    Raises:
      TaskError: a value has the wrong type or is outside its range, or not exactly one of `epochs`
        and `steps` is given.
    """

    name: str
    data: Source | str
    adapter: LoRA = LoRA()
    optimizer: Optimizer = AdamW()
    batch_size: int = 16
    max_length: int = 1024
    epochs: int | None = None
    steps: int | None = None
    eval_data: Source | str | None = None
    seed: int = 0
    resume_from: str | None = None
    sample_prompt: str | None = None

    def __post_init__(self):
        for field in ("data", "eval_data"):
            if isinstance(value := getattr(self, field), str | os.PathLike):
                object.__setattr__(self, field, Source(os.fspath(value)))
        if not isinstance(self.name, str) or not re.fullmatch(
            r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name
        ):
            raise TaskError(
                f"task {self.name!r}: a name consists of letters, digits, '.', '_' "
                "and '-', and begins with a letter or digit"
            )
        if not isinstance(self.data, Source):
            raise self._error(f"data should be a path or a Source, found {self.data!r}")
        if not isinstance(self.eval_data, Source | None):
            raise self._error(f"eval_data should be a path or a Source, found {self.eval_data!r}")
        if not isinstance(self.adapter, LoRA):
            raise self._error(f"adapter should be a LoRA, found {self.adapter!r}")
        if not isinstance(self.optimizer, tuple(OPTIMIZERS.values())):
            known = ", ".join(o.__name__ for o in OPTIMIZERS.values())
            raise self._error(f"unknown optimizer {self.optimizer!r}; known: {known}")
        if (self.epochs is None) == (self.steps is None):
            raise self._error(
                "give epochs or steps, one of the two; "
                f"found epochs={self.epochs}, steps={self.steps}"
            )
        if not isinstance(self.sample_prompt, str | None) or self.sample_prompt == "":
            raise self._error(f"sample_prompt should be a text, found {self.sample_prompt!r}")
        least = {"batch_size": 1, "max_length": 2, "epochs": 1, "steps": 1, "seed": 0}
        for field, minimum in least.items():
            value = getattr(self, field)
            absent = value is None and field in ("epochs", "steps")
            if not absent and (not isinstance(value, int) or value < minimum):
                raise self._error(
                    f"{field} should be an integer of at least {minimum}, found {value!r}"
                )

    def _error(self, message: str) -> TaskError:
        return TaskError(f"task {self.name!r}: {message}")
