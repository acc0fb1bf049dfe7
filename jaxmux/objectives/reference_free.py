"""Objectives of preferences without a reference.

The names, defaults and values are those of TRL 1.16, unless a docstring says otherwise. Formulas
are written as in `pairs`.
"""

from typing import Annotated, ClassVar, Literal

import numpy as np
from scipy.special import log_expit

from jaxmux.field_checks import EXACT, Positive, checked_dataclass

from .pairs import (
    Answers,
    NotNegative,
    Paired,
    Pairs,
    Scores,
    Slopes,
    Smoothing,
    hinge,
    logistic,
    of_scores,
    scaled,
    squared,
)
from .token_losses import TokenRule


def _tilted(answers: Answers, by_length: bool, alpha: float) -> Scores:
    """The reward (1 - exp(-alpha x)) / alpha of AlphaPO (Gupta et al. 2025), where x is S, or a if
    `by_length`. For an alpha of 0 it is x."""
    lengths = answers.tokens if by_length else np.ones_like(answers.tokens)
    x = answers.sums / lengths
    if not alpha:
        return Scores(x, np.ones_like(x), lengths)
    return Scores(-np.expm1(-alpha * x) / alpha, np.exp(-alpha * x), lengths)


@checked_dataclass
class CPO(Paired):
    """Contrastive preference optimisation (Xu et al. 2024), which needs no reference.

    Attributes:
      beta: factor of the difference between chosen and rejected answers.
      loss: with u = beta (S_w - S_l): "sigmoid", -log σ(u); "hinge", max(0, 1 - u); or "ipo",
        (a_w - a_l - 1 / (2 beta))².
      cpo_alpha: weight of the mean cross entropy over the chosen tokens of the batch, which is
        added.
      label_smoothing: the share of pairs whose answers are taken to be swapped; used by "sigmoid".
      alpha: not 0 for the rewards of AlphaPO (Gupta et al. 2025): S, or a, becomes
        (1 - exp(-alpha S)) / alpha.

    Raises:
      ValueError: a value is outside its range.
    """

    beta: Positive = 0.1
    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    cpo_alpha: NotNegative = 1.0
    label_smoothing: Smoothing = 0.0
    alpha: Annotated[float, EXACT] = 0.0

    kind: ClassVar[str] = "cpo"

    def _likelihood(self):
        return self.cpo_alpha

    @property
    def rule_of_pairs(self):
        if self.loss == "ipo" or self.alpha:
            return None
        if self.loss == "hinge":
            return TokenRule(beta=self.beta, hinge=1.0)
        smoothing = self.label_smoothing
        return TokenRule(beta=self.beta, sigmoid=1 - smoothing, swapped=smoothing)

    def _slopes(self, chosen, rejected):
        by_length = self.loss == "ipo"
        match self.loss:
            case "ipo":
                of_difference = squared(self.beta)
            case "hinge":
                of_difference = scaled(self.beta, hinge)
            case _:
                of_difference = scaled(self.beta, lambda u: logistic(u, self.label_smoothing))
        scores = (_tilted(answers, by_length, self.alpha) for answers in (chosen, rejected))
        return of_scores(of_difference, *scores)

    def _rewards(self, answers):
        return self.beta * (answers.mean if self.loss == "ipo" else answers.sums)


@checked_dataclass
class SimPO(Paired):
    """Simple preference optimisation (Meng et al. 2024): -log σ(beta (a_w - a_l) - gamma), without
    a reference. TRL's CPOTrainer computes it as `loss_type="simpo"` with `cpo_alpha=0`.

    Attributes:
      beta: factor of the difference between chosen and rejected answers. The paper takes 2 to 2.5,
        and TRL's default is 0.1.
      gamma: the margin by which chosen answers shall win, TRL's `simpo_gamma`.
      cpo_alpha: weight of the mean cross entropy over the chosen tokens of the batch, which is
        added.
      label_smoothing: the share of pairs whose answers are taken to be swapped.
      alpha: not 0 for AlphaPO (Gupta et al. 2025): a becomes (1 - exp(-alpha a)) / alpha.

    Raises:
      ValueError: a value is outside its range.
    """

    beta: Positive = 2.0
    gamma: Annotated[float, EXACT] = 0.5
    cpo_alpha: NotNegative = 0.0
    label_smoothing: Smoothing = 0.0
    alpha: Annotated[float, EXACT] = 0.0

    kind: ClassVar[str] = "simpo"

    def _likelihood(self):
        return self.cpo_alpha

    @property
    def rule_of_pairs(self):
        if self.alpha:
            return None
        return TokenRule(
            beta=self.beta,
            gamma=self.gamma,
            by_length=1.0,
            sigmoid=1 - self.label_smoothing,
            swapped=self.label_smoothing,
        )

    def _slopes(self, chosen, rejected):
        of_difference = scaled(self.beta, lambda u: logistic(u - self.gamma, self.label_smoothing))
        scores = (_tilted(answers, True, self.alpha) for answers in (chosen, rejected))
        return of_scores(of_difference, *scores)

    def _rewards(self, answers):
        return self.beta * answers.mean


@checked_dataclass
class ORPO(Paired):
    """Odds-ratio preference optimisation (Hong et al. 2024), without a reference: the mean cross
    entropy over the chosen tokens of the batch, plus -beta log σ(log odds_w - log odds_l) with
    odds = exp(a) / (1 - exp(a)).

    TRL's cross entropy includes the tokens of the prompt.

    Attributes:
      beta: weight of the odds ratio, lambda in the paper.

    Raises:
      ValueError: a value is outside its range.
    """

    beta: Positive = 0.1

    kind: ClassVar[str] = "orpo"

    @property
    def compared(self):
        return *super().compared, "log_odds_ratio", "log_odds_chosen"

    def _likelihood(self):
        return 1.0

    def _slopes(self, chosen, rejected):
        w, l = chosen.mean, rejected.mean  # noqa: E741
        loss, slope = logistic(_log_odds(w) - _log_odds(l))
        # σ(-difference) / (1 - exp(w)), also for an answer of probability 1, whose odds are
        # infinite.
        of_chosen = -self.beta / (-np.expm1(w) + np.exp(w - _log_odds(l)))
        of_rejected = self.beta * slope / np.expm1(l)
        return Slopes(self.beta * loss, of_chosen / chosen.tokens, of_rejected / rejected.tokens)

    def _rewards(self, answers):
        return self.beta * answers.mean

    def _metrics(self, chosen, rejected):
        difference = _log_odds(chosen.mean) - _log_odds(rejected.mean)
        return super()._metrics(chosen, rejected) | {
            "log_odds_ratio": float(log_expit(difference).mean()),
            "log_odds_chosen": float(difference.mean()),
        }


def _log_odds(a: Pairs) -> Pairs:
    # Of two expressions for log(1 - exp(a)), each is exact where the other one is not.
    complement = np.where(a > -np.log(2), np.log(-np.expm1(a)), np.log1p(-np.exp(a)))
    return a - complement
