"""A task: one tenant's fine-tuning job."""

import dataclasses
import os
import re

from .data import Source
from .optimizers import OPTIMIZERS, AdamW, Optimizer
from .peft import LoRA


class TaskError(ValueError):
    """A task cannot be run; the message begins with the task's name."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One fine-tuning job, independent of all others that train beside it.

    Attributes:
      name: unique in a run; names files, so letters, digits, ".", "_" and "-".
      data: training records; a path stands for `Source(path)`.
      adapter: what is trained.
      optimizer: how.
      batch_size: samples of a global batch, the unit of one optimizer update.
      max_length: longest sample in tokens; `data.overlong` says what becomes of longer ones.
      epochs, steps: how long; exactly one of them. A step is one global batch.
      eval_data: held-out records, evaluated before and after training.
      seed: of the shuffling, the initial adapter and dropout.
      resume_from: folder of a Hugging Face PEFT adapter to go on training, instead of a fresh one.
      sample_prompt: completed at the end of a run by the bare backbone and with the adapter, and
        shown.

    Raises:
      TaskError: a value is outside its range.
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
