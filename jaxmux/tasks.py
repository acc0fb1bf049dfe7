"""A task: the fine-tuning job of one tenant."""

import dataclasses
import os
import re

from .data import Source
from .optimizers import OPTIMIZERS, AdamW, Optimizer
from .peft import LoRA


class TaskError(ValueError):
    """A task cannot be trained. The message begins with the task's name."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One fine-tuning job, independent of all others that train beside it.

    Attributes:
      name: name of the task, unique in a training run. It names files, so it consists of letters,
        digits, ".", "_" and "-".
      data: the training records. A path stands for `Source(path)`.
      adapter: the adapter that is trained.
      optimizer: the optimizer that trains it, with its learning rate and schedule.
      batch_size: samples in a global batch. Every global batch ends in one optimizer update.
      max_length: tokens of the longest sample; `data.overlong` decides what happens to longer ones.
      epochs: how often the task trains on each of its samples. Give either `epochs` or `steps`.
      steps: number of global batches that the task trains. Give either `epochs` or `steps`.
      eval_data: held-out records, whose loss is measured before and after training.
      seed: seed of the shuffling, of the initial adapter and of dropout.
      resume_from: folder of a Hugging Face PEFT adapter from which training starts; None starts
        from a new adapter.
      sample_prompt: a prompt that the backbone completes after training, once without and once with
        the adapter; both completions are printed. None prints nothing.

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
