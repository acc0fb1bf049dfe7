"""What a task minimises: the interface of all objectives, and supervised fine-tuning.

Every objective is a function of the log-probabilities of target tokens. So its gradient is that of
a cross entropy in which token t has the weight -d objective / d log-probability of t, as long as
the weights are constants. The devices compute that cross entropy for all objectives; an objective
says on the host what the weights are.

To add an objective, write its class and list it in `OBJECTIVES` (`jaxmux/objectives/__init__.py`).
"""

import math
from collections.abc import Mapping, Sequence, Sized
from typing import ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxmux.data.sources import Records
from jaxmux.field_checks import checked_dataclass

from .token_losses import CROSS_ENTROPY, TokenRule, TokenTerms

# The value of an objective, among the metrics of held-out data.
LOSS = "loss"
# The metrics of held-out data by which the adapters of a task can be compared, and whether higher
# values are better. Of other metrics neither is, or they are the same for all adapters.
HIGHER_IS_BETTER: Mapping[str, bool] = {
    LOSS: False,
    "kl": False,
    "nll_loss": False,
    "rewards/chosen": True,
    "rewards/rejected": False,
    "rewards/accuracies": True,
    "rewards/margins": True,
    "logps/chosen": True,
    "logps/rejected": False,
    "log_odds_ratio": True,
    "log_odds_chosen": True,
}

# The form of a `Bound`.
BOUND = r"^[^ ]+ [<>] -?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]{1,2})?$"

# The log-probabilities of a sample's target tokens, in nats.
TargetLogProbs = Float[np.ndarray, " targets"]


class Graded(NamedTuple):
    """The value of an objective.

    Attributes:
      slopes: for each sample, the derivative of the loss with respect to the log-probability of
        each target token.
      metrics: further numbers by name, with the names of TRL.
    """

    loss: float
    slopes: Sequence[Float[np.ndarray, " targets"]]
    metrics: Mapping[str, float]


class Recorded(NamedTuple):
    """What the records of samples say besides their tokens.

    Attributes:
      values: by name, a number for each target token of each sample.
      numbers: by name, a number for each sample.
    """

    values: Mapping[str, Sequence[Float[np.ndarray, " targets"]]]
    numbers: Mapping[str, Float[np.ndarray, " samples"]]


# The reference of samples: a number for each, or one for each target token.
Known = Float[np.ndarray, " samples"] | Sequence[TargetLogProbs]


class Comparison(NamedTuple):
    """How the adapters of a task are compared: by a metric of held-out data, which is a key of
    `HIGHER_IS_BETTER`."""

    metric: str = LOSS

    @property
    def label(self) -> str:
        """The name of the metric in texts."""
        return "held-out loss" if self.metric == LOSS else self.metric

    @property
    def better(self) -> str:
        return "higher" if HIGHER_IS_BETTER[self.metric] else "lower"

    @property
    def best(self) -> str:
        return "highest" if HIGHER_IS_BETTER[self.metric] else "lowest"

    def value(self, loss: float | None, metrics: Mapping[str, float]) -> float | None:
        """The metric of a measurement; None if it has none."""
        return loss if self.metric == LOSS else metrics.get(self.metric)

    def cost(self, value: float | None) -> float:
        """A number that is the lower, the better a value of the metric is. It is infinite if there
        is no value or if it is not finite."""
        if value is None or not math.isfinite(value):
            return math.inf
        return -value if HIGHER_IS_BETTER[self.metric] else value


class Bound(NamedTuple):
    """A bound of a metric, as a text such as "kl > 0.1"."""

    metric: str
    is_upper: bool
    value: float

    @classmethod
    def of(cls, text: str) -> "Bound":
        """The bound that a text of the form `BOUND` stands for."""
        metric, sign, value = text.split(" ")
        return cls(metric, sign == ">", float(value))

    def is_passed(self, value: float) -> bool:
        return value > self.value if self.is_upper else value < self.value


@checked_dataclass
class Objective:
    """The interface of all objectives. A subclass adds its numbers as fields, and may override the
    class variables.

    Attributes:
      kind: name in configs and checkpoints.
      records: what the records of its data are, as in `load_samples`.
      members: number of samples that a record becomes, which follow each other: 2 for a pair of a
        chosen and a rejected answer, and for an answer with a mismatched one.
      unit: what such a record is called where records are counted.
      needs_mismatched: whether each sample is followed by a mismatched one, the same prompt with
        the answer to another one, as `load_samples` makes them.
      needs_log_probs: whether the weight of a token depends on log-probabilities of other tokens
        or in another way than `rule` says, so that a forward pass precedes the training of each
        global batch, unless the batch is trained by `rule_of_pairs`.
      needs_reference: whether they depend on the log-probabilities under the adapter with which the
        task begins.
      by_token: whether the objective knows its reference by token; otherwise it knows `sums`.

    Raises:
      ValueError: a value is outside its range, or values do not go together.
    """

    kind: ClassVar[str]
    records: ClassVar[Records] = "answers"
    members: ClassVar[int] = 1
    unit: ClassVar[str] = "sample"
    needs_mismatched: ClassVar[bool] = False
    needs_log_probs: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = False
    by_token: ClassVar[bool] = False

    @property
    def compared(self) -> tuple[str, ...]:
        """The metrics that `grade` returns and by which adapters can be compared, besides the
        loss."""
        return ()

    def grade(
        self,
        log_probs: Sequence[TargetLogProbs],
        reference: Known | None = None,
        recorded: Recorded | None = None,
        log_squares: Sequence[TargetLogProbs] | None = None,
    ) -> Graded:
        """The objective of a global batch, or of all held-out samples, in float64.

        Args:
          log_probs: of each sample, float64.
          reference: the result of `known` for the same samples under the reference; None if the
            objective needs none.
          recorded: what the records of the samples say; None for answers and pairs.
          log_squares: for each target token log Σ p² over the probabilities p of all tokens in its
            place.
        """
        raise NotImplementedError

    def known(self, log_probs: Sequence[TargetLogProbs]) -> Known:
        """What the objective knows of its reference, from the log-probabilities under it."""
        return log_probs if self.by_token else self.sums(log_probs)

    @property
    def rule(self) -> TokenRule:
        """The losses of tokens that the devices compute."""
        return CROSS_ENTROPY

    @property
    def rule_of_pairs(self) -> TokenRule | None:
        """The losses of pairs, and of their tokens, that the devices compute if both answers of
        each pair lie in the same microbatch; None if such losses do not give the objective."""
        return None

    def terms(
        self,
        lengths: Sequence[int],
        recorded: Recorded | None,
        reference: Sequence[Float[np.ndarray, " targets"]],
    ) -> TokenTerms | None:
        """What `rule` or `rule_of_pairs` reads of a global batch: in each field, for each sample an
        array with a number for each target token. None if all tokens of the batch have the same
        weight. Not called if the objective needs log-probabilities and has no `rule_of_pairs`.

        Args:
          lengths: number of target tokens of each sample.
          recorded: as for `grade`.
          reference: the result of `reference_of_tokens`.
        """
        return None

    def reference_of_tokens(
        self, lengths: Sequence[int], reference: Known
    ) -> Sequence[Float[np.ndarray, " targets"]]:
        """For each sample, what `terms` says of the reference of its target tokens, from the result
        of `known`."""
        return reference

    def metrics(
        self, sums: Sequence[float], targets: int, samples: int, recorded: Recorded | None
    ) -> Mapping[str, float]:
        """The metrics of a global batch with these numbers of target tokens and of samples, from
        what the devices have added up for it (`TOKEN_SUMS`, or `PAIR_SUMS`)."""
        return {}

    def trained[Samples: Sequence](self, samples: Samples) -> Samples:
        """Those of some records' samples that are trained. The others are only read forward, so
        their slopes are 0."""
        return samples[:: self.members] if self.needs_mismatched else samples

    def count(self, samples: Sized) -> int:
        """The number of records that have become these samples."""
        return len(samples) // self.members

    def sums(self, log_probs: Sequence[TargetLogProbs]) -> Float[np.ndarray, " samples"]:
        """The log-probability of each sample."""
        return np.array([of_sample.sum() for of_sample in log_probs])

    def _error(self, message: str) -> ValueError:
        return ValueError(f"{self.kind}: {message}")


@checked_dataclass
class SFT(Objective):
    """Supervised fine-tuning: the mean cross entropy over the target tokens of a global batch.

    It is the default of `Task.objective`.
    """

    kind: ClassVar[str] = "sft"
    needs_log_probs: ClassVar[bool] = False

    def grade(self, log_probs, reference=None, recorded=None, log_squares=None):
        loss, slopes = token_mean(log_probs)
        return Graded(loss, slopes, {})


def token_mean(
    log_probs: Sequence[TargetLogProbs],
) -> tuple[float, list[Float[np.ndarray, " targets"]]]:
    """The mean cross entropy over all target tokens of samples, and its slopes as in `Graded`."""
    targets = sum(map(len, log_probs))
    # One sum for each sample, in their order.
    loss = -sum(float(of_sample.sum()) for of_sample in log_probs) / targets
    return loss, [np.full(len(of_sample), -1 / targets) for of_sample in log_probs]
