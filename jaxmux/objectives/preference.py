"""Objectives of preferences: of two answers to a prompt, the chosen one shall become more probable
than the rejected one; or desirable answers shall become more probable, and undesirable ones less.

The names, defaults and values are those of TRL 1.16, unless a docstring says otherwise. In the
formulas S is the log-probability of an answer (the sum over its n target tokens), R the same under
the reference, x = S - R, a = S / n and σ the sigmoid; w is the chosen and l the rejected answer. An
objective is the mean over the pairs, or the labelled answers, of a global batch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
from jaxtyping import Float
from pydantic import Field
from scipy.special import expit, log_expit

from jaxmux.data.preferences import LABEL
from jaxmux.data.sources import Records
from jaxmux.field_checks import EXACT, Positive, checked_dataclass

from .objective import Graded, Objective, TargetLogProbs, token_mean
from .token_losses import PAIR_SUMS, TokenRule, TokenTerms

Pairs = Float[np.ndarray, " pairs"]

_Fraction = Annotated[float, Field(ge=0, le=1), EXACT]
_NotNegative = Annotated[float, Field(ge=0), EXACT]
_Smoothing = Annotated[float, Field(ge=0, lt=0.5), EXACT]


# The metric that says for which share of the pairs the chosen answer has the higher reward.
ACCURACY = "rewards/accuracies"


class _Answers(NamedTuple):
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


class _Slopes(NamedTuple):
    """The losses of all pairs, and their derivatives by S of the chosen and of the rejected
    answer."""

    loss: Pairs
    chosen: Pairs
    rejected: Pairs


class _Scores(NamedTuple):
    """Scores of the chosen or of the rejected answers. The derivative of a score by S is that in
    `derivatives`, divided by `lengths`."""

    values: Pairs
    derivatives: Pairs
    lengths: Pairs


# A function of a difference u between chosen and rejected answers: its value and its derivative.
_OfDifference = Callable[[Pairs], tuple[Pairs, Pairs]]


def _logistic(u: Pairs, smoothing: float = 0.0) -> tuple[Pairs, Pairs]:
    """-log σ(u), of which a fraction is -log σ(-u) (conservative DPO, Mitchell 2023)."""
    if not smoothing:
        # 0 times the infinite log σ(-u) of a rejected answer of probability 0 is NaN.
        return -log_expit(u), -expit(-u)
    value = -(1 - smoothing) * log_expit(u) - smoothing * log_expit(-u)
    return value, -(1 - smoothing) * expit(-u) + smoothing * expit(u)


def _hinge(u: Pairs) -> tuple[Pairs, Pairs]:
    return np.maximum(1 - u, 0), np.where(u < 1, -1.0, 0.0)


@checked_dataclass
class _Paired(Objective):
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
        chosen, rejected = (_Answers(*(x[i::2] for x in (sums, known, tokens))) for i in (0, 1))
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

    def _slopes(self, chosen: _Answers, rejected: _Answers) -> _Slopes:
        raise NotImplementedError

    def _rewards(self, answers: _Answers) -> Pairs:
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

    def _metrics(self, chosen: _Answers, rejected: _Answers) -> dict[str, float]:
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
class DPO(_Paired):
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
    label_smoothing: _Smoothing = 0.0
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
        total = _Slopes(none, none, none)
        for name, weight in self._weights.items():
            if name != _SFT:
                found = _DPO_LOSSES[name](self, chosen, rejected)
                total = _Slopes(*(x + weight * y for x, y in zip(total, found, strict=True)))
        return total

    def _rewards(self, answers):
        return self.beta * answers.ratio

    def scores(self, answers: _Answers, by_length: bool) -> _Scores:
        values, derivatives = self._score(answers.ratio)
        lengths = answers.tokens if by_length else np.ones_like(answers.tokens)
        return _Scores(values / lengths, derivatives, lengths)

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


_DPOLoss = Callable[[DPO, _Answers, _Answers], _Slopes]


def _by_difference(
    of_difference: Callable[[DPO, Pairs], tuple[Pairs, Pairs]], by_length: bool = False
) -> _DPOLoss:
    """A loss of u = beta (score of the chosen answer - score of the rejected answer), each divided
    by its tokens if `by_length`."""

    def slopes(dpo: DPO, chosen: _Answers, rejected: _Answers) -> _Slopes:
        of_u = _scaled(dpo.beta, lambda u: of_difference(dpo, u))
        return _of_scores(of_u, dpo.scores(chosen, by_length), dpo.scores(rejected, by_length))

    return slopes


def _scaled(beta: float, of_difference: _OfDifference) -> _OfDifference:
    """The same function of a difference that is multiplied by `beta`."""

    def scaled(difference: Pairs) -> tuple[Pairs, Pairs]:
        value, slope = of_difference(beta * difference)
        return value, beta * slope

    return scaled


def _squared(beta: float) -> _OfDifference:
    """The square of the distance of a difference from 1 / (2 beta) (IPO)."""

    def squared(difference: Pairs) -> tuple[Pairs, Pairs]:
        distance = difference - 1 / (2 * beta)
        return distance**2, 2 * distance

    return squared


def _of_scores(of_difference: _OfDifference, chosen: _Scores, rejected: _Scores) -> _Slopes:
    """A loss of the difference between the scores of chosen and rejected answers."""
    loss, slope = of_difference(chosen.values - rejected.values)
    of_chosen = _product(slope / chosen.lengths, chosen.derivatives)
    return _Slopes(loss, of_chosen, _product(-slope / rejected.lengths, rejected.derivatives))


def _product(slope: Pairs, derivative: Pairs) -> Pairs:
    """The product, which is 0 where the slope is: an exponential derivative may be infinite there,
    but the slope decreases faster."""
    return np.where(slope == 0, 0, slope * derivative)


def _ipo(dpo: DPO, chosen: _Answers, rejected: _Answers) -> _Slopes:
    return _of_scores(_squared(dpo.beta), dpo.scores(chosen, True), dpo.scores(rejected, True))


def _exo_pair(dpo: DPO, u: Pairs) -> tuple[Pairs, Pairs]:
    smoothing = dpo.label_smoothing
    # 0 times infinity is NaN. Both sigmoids are exact far below this limit.
    u = np.clip(u, -1e4, 1e4)
    wanted, unwanted = np.log1p(-smoothing), np.log(smoothing)
    value = expit(u) * (log_expit(u) - wanted) + expit(-u) * (log_expit(-u) - unwanted)
    return value, expit(u) * expit(-u) * (u - (wanted - unwanted))


def _robust(dpo: DPO, u: Pairs) -> tuple[Pairs, Pairs]:
    if not (smoothing := dpo.label_smoothing):
        return _logistic(u)
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


def _nca_pair(dpo: DPO, chosen: _Answers, rejected: _Answers) -> _Slopes:
    w, l = dpo.beta * chosen.ratio, dpo.beta * rejected.ratio  # noqa: E741
    loss = -log_expit(w) - log_expit(-w) / 2 - log_expit(-l) / 2
    return _Slopes(loss, dpo.beta * (expit(w) / 2 - expit(-w)), dpo.beta * expit(l) / 2)


def _bco_pair(dpo: DPO, chosen: _Answers, rejected: _Answers) -> _Slopes:
    w, l = dpo.beta * chosen.ratio, dpo.beta * rejected.ratio  # noqa: E741
    return _Slopes(-log_expit(w) - log_expit(-l), -dpo.beta * expit(-w), dpo.beta * expit(l))


def _sppo_hard(dpo: DPO, chosen: _Answers, rejected: _Answers) -> _Slopes:
    w, l = chosen.ratio - 0.5 / dpo.beta, rejected.ratio + 0.5 / dpo.beta  # noqa: E741
    return _Slopes(w**2 + l**2, 2 * w, 2 * l)


def _apo_zero(dpo: DPO, chosen: _Answers, rejected: _Answers) -> _Slopes:
    w, l = dpo.beta * chosen.ratio, dpo.beta * rejected.ratio  # noqa: E741
    slope = dpo.beta * expit(l) * expit(-l)
    return _Slopes(1 - expit(w) + expit(l), -dpo.beta * expit(w) * expit(-w), slope)


def _apo_down(dpo: DPO, chosen: _Answers, rejected: _Answers) -> _Slopes:
    w, u = dpo.beta * chosen.ratio, dpo.beta * (chosen.ratio - rejected.ratio)
    slope = dpo.beta * expit(u) * expit(-u)
    return _Slopes(expit(w) + 1 - expit(u), dpo.beta * expit(w) * expit(-w) - slope, slope)


def _aot(dpo: DPO, chosen: _Answers, rejected: _Answers) -> _Slopes:
    policy, reference = chosen.sums - rejected.sums, chosen.reference - rejected.reference
    loss, slopes, _ = _sorted(dpo, policy, reference)
    return _Slopes(loss, slopes, -slopes)


def _aot_unpaired(dpo: DPO, chosen: _Answers, rejected: _Answers) -> _Slopes:
    return _Slopes(*_sorted(dpo, chosen.ratio, rejected.ratio))


def _sorted(dpo: DPO, one: Pairs, other: Pairs) -> tuple[Pairs, Pairs, Pairs]:
    """The losses of the differences between two sorted lists, and their derivatives by each number
    of the two, in the order of the lists as they are given."""
    of_one, of_other = np.argsort(one, kind="stable"), np.argsort(other, kind="stable")
    loss, slope = _logistic(dpo.beta * (one[of_one] - other[of_other]), dpo.label_smoothing)
    by_one, by_other = np.empty_like(slope), np.empty_like(slope)
    by_one[of_one], by_other[of_other] = dpo.beta * slope, -dpo.beta * slope
    return loss, by_one, by_other


_DPO_LOSSES: Mapping[str, _DPOLoss] = {
    "sigmoid": _by_difference(lambda dpo, u: _logistic(u)),
    "sigmoid_norm": _by_difference(lambda dpo, u: _logistic(u), by_length=True),
    "hinge": _by_difference(lambda dpo, u: _hinge(u)),
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


def _tilted(answers: _Answers, by_length: bool, alpha: float) -> _Scores:
    """The reward (1 - exp(-alpha x)) / alpha of AlphaPO (Gupta et al. 2025), where x is S, or a if
    `by_length`. For an alpha of 0 it is x."""
    lengths = answers.tokens if by_length else np.ones_like(answers.tokens)
    x = answers.sums / lengths
    if not alpha:
        return _Scores(x, np.ones_like(x), lengths)
    return _Scores(-np.expm1(-alpha * x) / alpha, np.exp(-alpha * x), lengths)


@checked_dataclass
class CPO(_Paired):
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
    cpo_alpha: _NotNegative = 1.0
    label_smoothing: _Smoothing = 0.0
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
                of_difference = _squared(self.beta)
            case "hinge":
                of_difference = _scaled(self.beta, _hinge)
            case _:
                of_difference = _scaled(self.beta, lambda u: _logistic(u, self.label_smoothing))
        scores = (_tilted(answers, by_length, self.alpha) for answers in (chosen, rejected))
        return _of_scores(of_difference, *scores)

    def _rewards(self, answers):
        return self.beta * (answers.mean if self.loss == "ipo" else answers.sums)


@checked_dataclass
class SimPO(_Paired):
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
    cpo_alpha: _NotNegative = 0.0
    label_smoothing: _Smoothing = 0.0
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
        of_difference = _scaled(
            self.beta, lambda u: _logistic(u - self.gamma, self.label_smoothing)
        )
        scores = (_tilted(answers, True, self.alpha) for answers in (chosen, rejected))
        return _of_scores(of_difference, *scores)

    def _rewards(self, answers):
        return self.beta * answers.mean


@checked_dataclass
class ORPO(_Paired):
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
        loss, slope = _logistic(_log_odds(w) - _log_odds(l))
        # σ(-difference) / (1 - exp(w)), also for an answer of probability 1, whose odds are
        # infinite.
        of_chosen = -self.beta / (-np.expm1(w) + np.exp(w - _log_odds(l)))
        of_rejected = self.beta * slope / np.expm1(l)
        return _Slopes(self.beta * loss, of_chosen / chosen.tokens, of_rejected / rejected.tokens)

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
    desirable_weight: _NotNegative = 1.0
    undesirable_weight: _NotNegative = 1.0

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
