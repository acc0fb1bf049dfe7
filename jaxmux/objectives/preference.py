"""Objectives of preferences with a reference, of pairs of answers and of labelled answers.

The names, defaults and values are those of TRL 1.16, unless a docstring says otherwise. Formulas
are written as in `pairs`.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field
from scipy.special import expit, log_expit

from jaxmux.data.preferences import LABEL
from jaxmux.data.sources import Records
from jaxmux.field_checks import EXACT, Positive, checked_dataclass

from .objective import Graded, Objective
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

_Fraction = Annotated[float, Field(ge=0, le=1), EXACT]
_F_DIVERGENCES = "reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"
# The loss types of DPO. The last one is a cross entropy of the chosen answers.
_SFT = "sft"
_NOT_OF_PAIRS = _SFT, "aot", "aot_unpaired"
_DPO_NAMES = (
    "sigmoid",
    "sigmoid_norm",
    "hinge",
    "ipo",
    "exo_pair",
    "robust",
    "discopop",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "aot",
    "aot_unpaired",
    _SFT,
)
# The largest exponent of the alpha-divergence.
_MOST_EXPONENT = 80.0


@checked_dataclass
class DPO(Paired):
    """Direct preference optimisation (Rafailov et al. 2023) and its descendants.

    The reference is the adapter with which the task begins: a new adapter changes nothing, so it is
    the bare backbone. It is computed before the first update and kept.

    Attributes:
      beta: how strongly the adapter is held at the reference.
      loss: one of the loss types of TRL, or several, which are added with `weights`. With
        u = beta (x_w - x_l):
        "sigmoid": -log σ(u). "sigmoid_norm": the same with x / n.
        "hinge": max(0, 1 - u) (SLiC, Zhao et al. 2023).
        "ipo": (x_w / n_w - x_l / n_l - 1 / (2 beta))² (Azar et al. 2023).
        "exo_pair": the reverse KL divergence to the smoothed preferences (EXO, Ji et al. 2024);
        needs `label_smoothing`.
        "robust": unbiased under wrong labels (Chowdhury et al. 2024); `label_smoothing` is their
        share.
        "discopop": mixes -log σ(u) with exp(-u) (Lu et al. 2024).
        "nca_pair" (Chen et al. 2024), "bco_pair" without its running mean of rewards (Jung et al.
        2024), "sppo_hard" (Wu et al. 2024), "apo_zero" and "apo_down" (D'Oosterlinck et al. 2024).
        "aot", "aot_unpaired": sorted differences of the whole batch (Melnyk et al. 2024).
        "sft": the mean cross entropy over the chosen tokens of the batch.
      weights: a factor for each of several loss types; None for 1 each.
      label_smoothing: the share of pairs whose answers are taken to be swapped; used by "exo_pair",
        "robust", "aot" and "aot_unpaired".
      f_divergence: the divergence from the reference (f-DPO, Wang et al. 2023), which replaces x by
        another function of it.
      f_alpha: the exponent of "alpha_divergence".
      ld_alpha: factor of the target tokens of an answer that is longer than the other one, beyond
        the length of the other (LD-DPO, Liu et al. 2024). None for 1.
      discopop_tau: temperature of "discopop".
      use_weighting: whether the loss of a pair is multiplied by its probability under the present
        adapter (WPO, Zhou et al. 2024): by exp(mean of lp - log Σ p²) of both answers, where lp is
        the log-probability of a target token, and p are those of all tokens in its place. Not for
        "sft", "aot" and "aot_unpaired", which have no losses of pairs.

    Raises:
      ValueError: a value is outside its range, or values do not go together.
    """

    beta: Positive = 0.1
    loss: Literal[*_DPO_NAMES] | tuple[Literal[*_DPO_NAMES], ...] = "sigmoid"
    weights: tuple[Annotated[float, EXACT], ...] | None = None
    label_smoothing: Smoothing = 0.0
    f_divergence: Literal[*_F_DIVERGENCES] = "reverse_kl"
    f_alpha: Annotated[float, EXACT] = 0.5
    ld_alpha: _Fraction | None = None
    discopop_tau: Positive = 0.05
    use_weighting: bool = False

    kind: ClassVar[str] = "dpo"
    needs_reference: ClassVar[bool] = True

    def __post_init__(self):
        if not self.losses:
            raise ValueError(f"loss should name at least one of {', '.join(_DPO_NAMES)}")
        for name in self.losses:
            if self.f_divergence != "reverse_kl" and name in _OF_RATIOS:
                raise ValueError(
                    f"loss {name!r} is not defined for f_divergence={self.f_divergence!r}"
                )
            if self.use_weighting and name in _NOT_OF_PAIRS:
                raise ValueError(f"loss {name!r} is not defined for use_weighting")
        if len(set(self.losses)) < len(self.losses):
            raise ValueError(f"loss names a type twice: {', '.join(self.losses)}")
        if self.weights is not None and len(self.weights) != len(self.losses):
            raise ValueError(
                f"weights should have a number for each loss type ({len(self.losses)}), found "
                f"{len(self.weights)}"
            )
        if "exo_pair" in self.losses and not self.label_smoothing:
            raise ValueError("loss 'exo_pair' needs a label_smoothing above 0")

    @property
    def losses(self) -> tuple[str, ...]:
        return (self.loss,) if isinstance(self.loss, str) else self.loss

    @property
    def _weights(self) -> Mapping[str, float]:
        return dict(zip(self.losses, self.weights or [1.0] * len(self.losses), strict=True))

    def sums(self, log_probs):
        if self.ld_alpha is None:
            return super().sums(log_probs)
        factors = self._factors(np.array([len(each) for each in log_probs]))
        pairs = zip(log_probs, factors, strict=True)
        return np.array([(of_sample * factor).sum() for of_sample, factor in pairs])

    def _factors(self, tokens):
        factors = super()._factors(tokens)
        if self.ld_alpha is not None:
            for chosen, rejected in zip(factors[::2], factors[1::2], strict=True):
                shared = min(len(chosen), len(rejected))
                chosen[shared:] = rejected[shared:] = self.ld_alpha
        return factors

    def _likelihood(self):
        return self._weights.get(_SFT, 0.0)

    @property
    def rule_of_pairs(self):
        weights = {name: weight for name, weight in self._weights.items() if name != _SFT}
        is_plain = self.f_divergence == "reverse_kl" and not self.use_weighting
        if not (is_plain and weights) or weights.keys() - {"sigmoid", "robust", "hinge"}:
            return None
        smoothing = self.label_smoothing
        robust = weights.get("robust", 0.0) / (1 - 2 * smoothing)
        return TokenRule(
            beta=self.beta,
            sigmoid=weights.get("sigmoid", 0.0) + robust * (1 - smoothing),
            swapped=-robust * smoothing,
            hinge=weights.get("hinge", 0.0),
        )

    def _weights_of_pairs(self, log_probs, log_squares):
        if not self.use_weighting:
            return 1.0
        both = zip(log_probs, log_squares, strict=True)
        of_answers = np.exp([np.mean(lp - squares) for lp, squares in both])
        return of_answers[::2] * of_answers[1::2]

    def _slopes(self, chosen, rejected):
        none = np.zeros(len(chosen.sums))
        total = Slopes(none, none, none)
        for name, weight in self._weights.items():
            if name != _SFT:
                found = _DPO_LOSSES[name](self, chosen, rejected)
                total = Slopes(*(x + weight * y for x, y in zip(total, found, strict=True)))
        return total

    def _rewards(self, answers):
        return self.beta * answers.ratio

    def scores(self, answers: Answers, by_length: bool) -> Scores:
        values, derivatives = self._score(answers.ratio)
        lengths = answers.tokens if by_length else np.ones_like(answers.tokens)
        return Scores(values / lengths, derivatives, lengths)

    def _score(self, x: Pairs) -> tuple[Pairs, Pairs]:
        """What `f_divergence` puts in the place of x, and its derivative by x."""
        match self.f_divergence:
            case "forward_kl":
                return 1 - np.exp(-x), np.exp(-x)
            case "js_divergence":
                return np.log(2) + log_expit(x), expit(-x)
            case "alpha_divergence" if self.f_alpha != 1:
                power = self.f_alpha - 1
                exponential = np.exp(np.minimum(power * x, _MOST_EXPONENT))
                derivative = np.where(power * x < _MOST_EXPONENT, exponential, 0)
                return (exponential - 1) / power, derivative
        return x, np.ones_like(x)


_DPOLoss = Callable[[DPO, Answers, Answers], Slopes]


def _by_difference(
    of_difference: Callable[[DPO, Pairs], tuple[Pairs, Pairs]], by_length: bool = False
) -> _DPOLoss:
    """A loss of u = beta (score of the chosen answer - score of the rejected answer), each divided
    by its tokens if `by_length`."""

    def slopes(dpo: DPO, chosen: Answers, rejected: Answers) -> Slopes:
        of_u = scaled(dpo.beta, lambda u: of_difference(dpo, u))
        return of_scores(of_u, dpo.scores(chosen, by_length), dpo.scores(rejected, by_length))

    return slopes


def _ipo(dpo: DPO, chosen: Answers, rejected: Answers) -> Slopes:
    return of_scores(squared(dpo.beta), dpo.scores(chosen, True), dpo.scores(rejected, True))


def _exo_pair(dpo: DPO, u: Pairs) -> tuple[Pairs, Pairs]:
    smoothing = dpo.label_smoothing
    # 0 times infinity is NaN. Both sigmoids are exact far below this limit.
    u = np.clip(u, -1e4, 1e4)
    wanted, unwanted = np.log1p(-smoothing), np.log(smoothing)
    value = expit(u) * (log_expit(u) - wanted) + expit(-u) * (log_expit(-u) - unwanted)
    return value, expit(u) * expit(-u) * (u - (wanted - unwanted))


def _robust(dpo: DPO, u: Pairs) -> tuple[Pairs, Pairs]:
    if not (smoothing := dpo.label_smoothing):
        return logistic(u)
    value = -(1 - smoothing) * log_expit(u) + smoothing * log_expit(-u)
    slope = -(1 - smoothing) * expit(-u) - smoothing * expit(u)
    return value / (1 - 2 * smoothing), slope / (1 - 2 * smoothing)


def _discopop(dpo: DPO, u: Pairs) -> tuple[Pairs, Pairs]:
    share = expit(u / dpo.discopop_tau)
    logistic = -log_expit(u)
    # The product of exp(-u) and `share`, of which exp(-u) alone overflows.
    exponential = np.exp(log_expit(u / dpo.discopop_tau) - u)
    value = logistic * (1 - share) + exponential
    of_share = (exponential - logistic * share) * (1 - share) / dpo.discopop_tau
    return value, -expit(-u) * (1 - share) - exponential + of_share


def _nca_pair(dpo: DPO, chosen: Answers, rejected: Answers) -> Slopes:
    w, l = dpo.beta * chosen.ratio, dpo.beta * rejected.ratio  # noqa: E741
    loss = -log_expit(w) - log_expit(-w) / 2 - log_expit(-l) / 2
    return Slopes(loss, dpo.beta * (expit(w) / 2 - expit(-w)), dpo.beta * expit(l) / 2)


def _bco_pair(dpo: DPO, chosen: Answers, rejected: Answers) -> Slopes:
    w, l = dpo.beta * chosen.ratio, dpo.beta * rejected.ratio  # noqa: E741
    return Slopes(-log_expit(w) - log_expit(-l), -dpo.beta * expit(-w), dpo.beta * expit(l))


def _sppo_hard(dpo: DPO, chosen: Answers, rejected: Answers) -> Slopes:
    w, l = chosen.ratio - 0.5 / dpo.beta, rejected.ratio + 0.5 / dpo.beta  # noqa: E741
    return Slopes(w**2 + l**2, 2 * w, 2 * l)


def _apo_zero(dpo: DPO, chosen: Answers, rejected: Answers) -> Slopes:
    w, l = dpo.beta * chosen.ratio, dpo.beta * rejected.ratio  # noqa: E741
    slope = dpo.beta * expit(l) * expit(-l)
    return Slopes(1 - expit(w) + expit(l), -dpo.beta * expit(w) * expit(-w), slope)


def _apo_down(dpo: DPO, chosen: Answers, rejected: Answers) -> Slopes:
    w, u = dpo.beta * chosen.ratio, dpo.beta * (chosen.ratio - rejected.ratio)
    slope = dpo.beta * expit(u) * expit(-u)
    return Slopes(expit(w) + 1 - expit(u), dpo.beta * expit(w) * expit(-w) - slope, slope)


def _aot(dpo: DPO, chosen: Answers, rejected: Answers) -> Slopes:
    policy, reference = chosen.sums - rejected.sums, chosen.reference - rejected.reference
    loss, slopes, _ = _sorted(dpo, policy, reference)
    return Slopes(loss, slopes, -slopes)


def _aot_unpaired(dpo: DPO, chosen: Answers, rejected: Answers) -> Slopes:
    return Slopes(*_sorted(dpo, chosen.ratio, rejected.ratio))


def _sorted(dpo: DPO, one: Pairs, other: Pairs) -> tuple[Pairs, Pairs, Pairs]:
    """The losses of the differences between two sorted lists, and their derivatives by each number
    of the two, in the order of the lists as they are given."""
    of_one, of_other = np.argsort(one, kind="stable"), np.argsort(other, kind="stable")
    loss, slope = logistic(dpo.beta * (one[of_one] - other[of_other]), dpo.label_smoothing)
    by_one, by_other = np.empty_like(slope), np.empty_like(slope)
    by_one[of_one], by_other[of_other] = dpo.beta * slope, -dpo.beta * slope
    return loss, by_one, by_other


_DPO_LOSSES: Mapping[str, _DPOLoss] = {
    "sigmoid": _by_difference(lambda dpo, u: logistic(u)),
    "sigmoid_norm": _by_difference(lambda dpo, u: logistic(u), by_length=True),
    "hinge": _by_difference(lambda dpo, u: hinge(u)),
    "ipo": _ipo,
    "exo_pair": _by_difference(_exo_pair),
    "robust": _by_difference(_robust),
    "discopop": _by_difference(_discopop),
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
}
# Those that read x itself, so that no other divergence is defined for them.
_OF_RATIOS = frozenset(
    ("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "aot", "aot_unpaired")
)


@checked_dataclass
class KTO(Objective):
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024) of answers that are labelled as
    desirable or undesirable. The reference is that of `DPO`.

    Attributes:
      beta: how strongly the adapter is held at the reference.
      loss: with z0 = max(0, mean of x over the mismatched answers of the global batch), a constant
        for the gradient:
        "kto": 1 - σ(beta (x - z0)) of a desirable answer, 1 - σ(beta (z0 - x)) of an undesirable
        one. A mismatched answer is the prompt of a record with the answer of the one before; it is
        read forward and not trained.
        "apo_zero_unpaired": the same with z0 = 0, without mismatched answers (D'Oosterlinck et al.
        2024).
      desirable_weight: factor of the losses of desirable answers. In the paper, this factor times
        the number of desirable answers is 1 to 4/3 of `undesirable_weight` times the number of
        undesirable ones.
      undesirable_weight: factor of the losses of undesirable answers.

    Raises:
      ValueError: a value is outside its range.
    """

    beta: Positive = 0.1
    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    desirable_weight: NotNegative = 1.0
    undesirable_weight: NotNegative = 1.0

    kind: ClassVar[str] = "kto"
    records: ClassVar[Records] = "labels"
    unit: ClassVar[str] = "answer"
    needs_reference: ClassVar[bool] = True

    @property
    def needs_mismatched(self) -> bool:
        return self.loss == "kto"

    @property
    def members(self) -> int:
        return 2 if self.needs_mismatched else 1

    @property
    def compared(self):
        of_rewards = "rewards/chosen", "rewards/rejected", "rewards/margins"
        of_answers = *of_rewards, "logps/chosen", "logps/rejected"
        return (*of_answers, "kl") if self.needs_mismatched else of_answers

    def grade(self, log_probs, reference=None, recorded=None, log_squares=None):
        sums = self.sums(log_probs)
        with np.errstate(all="ignore"):
            ratios = sums - reference
            # Of a reference that is not finite. The losses below would be finite.
            ratios[ratios == np.inf] = np.nan
            x, sums = self.trained(ratios), self.trained(sums)
            z0 = np.maximum(ratios[1::2].mean(), 0) if self.needs_mismatched else 0.0
            is_desirable = self.trained(recorded.numbers[LABEL]) > 0
            sign = np.where(is_desirable, 1, -1)
            factor = np.where(is_desirable, self.desirable_weight, self.undesirable_weight)
            v = sign * self.beta * (x - z0)
            loss = factor * expit(-v)
            of_answers = -sign * factor * self.beta * expit(v) * expit(-v) / len(x)
        slopes = [np.zeros(len(of_sample)) for of_sample in log_probs]
        for slope, of_answer in zip(self.trained(slopes), of_answers, strict=True):
            slope[:] = of_answer
        metrics = {"kl": float(z0)} if self.needs_mismatched else {}
        for name, chosen in (("chosen", is_desirable), ("rejected", ~is_desirable)):
            if chosen.any():
                metrics[f"rewards/{name}"] = float(self.beta * x[chosen].mean())
                metrics[f"logps/{name}"] = float(sums[chosen].mean())
        if is_desirable.any() and not is_desirable.all():
            margin = metrics["rewards/chosen"] - metrics["rewards/rejected"]
            metrics["rewards/margins"] = margin
        return Graded(float(loss.mean()), slopes, metrics)
