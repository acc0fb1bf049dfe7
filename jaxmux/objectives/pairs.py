"""What objectives of pairs share: of two answers to a prompt, the chosen one shall become more
probable than the rejected one.

In the formulas S is the log-probability of an answer (the sum over its n target tokens), R the same
under the reference, x = S - R, a = S / n and σ the sigmoid; w is the chosen and l the rejected
answer. An objective is the mean over the pairs of a global batch.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float
from pydantic import Field
from scipy.special import expit, log_expit

from jaxmux.data.sources import Records
from jaxmux.field_checks import EXACT, checked_dataclass

from .objective import Graded, Objective, TargetLogProbs, token_mean
from .token_losses import PAIR_SUMS, TokenTerms

Pairs = Float[np.ndarray, " pairs"]

NotNegative = Annotated[float, Field(ge=0), EXACT]
Smoothing = Annotated[float, Field(ge=0, lt=0.5), EXACT]


# The metric that says for which share of the pairs the chosen answer has the higher reward.
ACCURACY = "rewards/accuracies"


class Answers(NamedTuple):
    """Numbers of the chosen or of the rejected answers of all pairs.

    Attributes:
      sums: S.
      reference: R; zeros without a reference.
      tokens: n.
    """

    sums: Pairs
    reference: Pairs
    tokens: Pairs

    @property
    def ratio(self) -> Pairs:
        """x."""
        return self.sums - self.reference

    @property
    def mean(self) -> Pairs:
        """a."""
        return self.sums / self.tokens


class Slopes(NamedTuple):
    """The losses of all pairs, and their derivatives by S of the chosen and of the rejected
    answer."""

    loss: Pairs
    chosen: Pairs
    rejected: Pairs


class Scores(NamedTuple):
    """Scores of the chosen or of the rejected answers. The derivative of a score by S is that in
    `derivatives`, divided by `lengths`."""

    values: Pairs
    derivatives: Pairs
    lengths: Pairs


# A function of a difference u between chosen and rejected answers: its value and its derivative.
OfDifference = Callable[[Pairs], tuple[Pairs, Pairs]]


def logistic(u: Pairs, smoothing: float = 0.0) -> tuple[Pairs, Pairs]:
    """-log σ(u), of which a fraction is -log σ(-u) (conservative DPO, Mitchell 2023)."""
    if not smoothing:
        # 0 times the infinite log σ(-u) of a rejected answer of probability 0 is NaN.
        return -log_expit(u), -expit(-u)
    value = -(1 - smoothing) * log_expit(u) - smoothing * log_expit(-u)
    return value, -(1 - smoothing) * expit(-u) + smoothing * expit(u)


def hinge(u: Pairs) -> tuple[Pairs, Pairs]:
    return np.maximum(1 - u, 0), np.where(u < 1, -1.0, 0.0)


@checked_dataclass
class Paired(Objective):
    """What objectives of pairs share."""

    records: ClassVar[Records] = "pairs"
    members: ClassVar[int] = 2
    unit: ClassVar[str] = "pair"

    @property
    def compared(self):
        of_rewards = "rewards/chosen", "rewards/rejected", ACCURACY, "rewards/margins"
        of_pairs = *of_rewards, "logps/chosen", "logps/rejected"
        return (*of_pairs, "nll_loss") if self._likelihood() else of_pairs

    def terms(self, lengths, recorded, reference):
        chosen = sum(lengths[::2])
        likelihood = [
            np.full(n, 0.0 if i % 2 else self._likelihood() / chosen) for i, n in enumerate(lengths)
        ]
        shares = [np.full(n, 2 / len(lengths)) for n in lengths]
        factors = self._factors(lengths)
        signed = [-factor if i % 2 else factor for i, factor in enumerate(factors)]
        return TokenTerms(likelihood, shares, signed, reference)

    def reference_of_tokens(self, lengths, reference):
        """The log-probability of an answer is spread evenly over its target tokens. The first token
        makes up for the rounding of the others to float32."""
        found = []
        for factor, of_answer in zip(self._factors(lengths), reference, strict=True):
            of_tokens = np.full(len(factor), np.float32(of_answer / factor.sum()), float)
            # The factor of the first token is 1.
            of_tokens[0] += of_answer - (factor * of_tokens).sum()
            found.append(of_tokens)
        return found

    def metrics(self, sums, targets, samples, recorded):
        total = dict(zip(PAIR_SUMS, map(float, sums), strict=True))
        metrics = {name: total[name] / (samples // 2) for name in PAIR_SUMS[1:-1]}
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        if weight := self._likelihood():
            metrics["nll_loss"] = total["cross_entropy"] / weight
        return metrics

    def grade(self, log_probs, reference=None, recorded=None, log_squares=None):
        sums, tokens = self.sums(log_probs), np.array([len(each) for each in log_probs], float)
        known = np.zeros(len(sums)) if reference is None else reference
        chosen, rejected = (Answers(*(x[i::2] for x in (sums, known, tokens))) for i in (0, 1))
        pairs, factors = len(chosen.sums), self._factors(tokens)
        # An answer of probability 0 has infinite numbers, which may meet in a difference.
        with np.errstate(all="ignore"):
            slopes = self._slopes(chosen, rejected)
            weights = self._weights_of_pairs(log_probs, log_squares)
            loss, of_chosen, of_rejected = (weights * x for x in slopes)
            total, metrics = float(loss.mean()), self._metrics(chosen, rejected)
            of_samples = np.stack([of_chosen, of_rejected], axis=1).ravel() / pairs
            slopes = [g * factor for g, factor in zip(of_samples, factors, strict=True)]
        return self._with_likelihood(Graded(total, slopes, metrics), log_probs)

    def _weights_of_pairs(
        self,
        log_probs: Sequence[TargetLogProbs],
        log_squares: Sequence[TargetLogProbs] | None,
    ) -> Pairs | float:
        """Constant factors of the losses of pairs."""
        return 1.0

    def _slopes(self, chosen: Answers, rejected: Answers) -> Slopes:
        raise NotImplementedError

    def _rewards(self, answers: Answers) -> Pairs:
        raise NotImplementedError

    def _factors(
        self, tokens: Float[np.ndarray, " samples"]
    ) -> list[Float[np.ndarray, " targets"]]:
        """The factor of each target token of each sample in its sum."""
        return [np.ones(int(n)) for n in tokens]

    def _likelihood(self) -> float:
        """The weight of the mean cross entropy over all chosen tokens of the batch."""
        return 0.0

    def _with_likelihood(self, graded: Graded, log_probs: Sequence[TargetLogProbs]) -> Graded:
        if not (weight := self._likelihood()):
            return graded
        loss, of_chosen = token_mean(log_probs[::2])
        slopes = list(graded.slopes)
        for i, slope in enumerate(of_chosen):
            slopes[2 * i] = slopes[2 * i] + weight * slope
        metrics = {**graded.metrics, "nll_loss": loss}
        return Graded(graded.loss + weight * loss, slopes, metrics)

    def _metrics(self, chosen: Answers, rejected: Answers) -> dict[str, float]:
        of_chosen, of_rejected = self._rewards(chosen), self._rewards(rejected)
        metrics = {
            "rewards/chosen": of_chosen,
            "rewards/rejected": of_rejected,
            ACCURACY: of_chosen > of_rejected,
            "rewards/margins": of_chosen - of_rejected,
            "logps/chosen": chosen.sums,
            "logps/rejected": rejected.sums,
        }
        return {name: float(np.mean(values)) for name, values in metrics.items()}


def scaled(beta: float, of_difference: OfDifference) -> OfDifference:
    """The same function of a difference that is multiplied by `beta`."""

    def scaled(difference: Pairs) -> tuple[Pairs, Pairs]:
        value, slope = of_difference(beta * difference)
        return value, beta * slope

    return scaled


def squared(beta: float) -> OfDifference:
    """The square of the distance of a difference from 1 / (2 beta) (IPO)."""

    def squared(difference: Pairs) -> tuple[Pairs, Pairs]:
        distance = difference - 1 / (2 * beta)
        return distance**2, 2 * distance

    return squared


def of_scores(of_difference: OfDifference, chosen: Scores, rejected: Scores) -> Slopes:
    """A loss of the difference between the scores of chosen and rejected answers."""
    loss, slope = of_difference(chosen.values - rejected.values)
    of_chosen = _product(slope / chosen.lengths, chosen.derivatives)
    return Slopes(loss, of_chosen, _product(-slope / rejected.lengths, rejected.derivatives))


def _product(slope: Pairs, derivative: Pairs) -> Pairs:
    """The product, which is 0 where the slope is: an exponential derivative may be infinite there,
    but the slope decreases faster."""
    return np.where(slope == 0, 0, slope * derivative)
