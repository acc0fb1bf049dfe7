"""Losses of tokens that depend on the token's own log-probability alone, and of pairs of answers
that depend on the difference between the two.

The devices compute them, and the weights of the cross entropy that have the same gradient, in the
pass that trains. The host computes those of tokens in float64 for measurements, and for objectives
in which the tokens of an answer share a ratio. So every function here takes `numpy` or
`jax.numpy`, and the numbers of an objective are data: the tasks of a program differ only in them.

In the formulas lp is the log-probability of a token, q that under the policy that sampled it, A its
advantage, R its log-probability under the reference, and r = exp(lp - q).
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

# How a token's loss depends on its ratio; the index of a name is `TokenRule.surrogate`.
SURROGATES = "cross_entropy", "ratio", "clipped", "cispo", "dro", "sapo"
# The sums over the target tokens of a global batch that the devices keep for each task: the loss,
# and what metrics are computed from. TRL's names.
TOKEN_SUMS = "loss", "clip_ratio/low_mean", "clip_ratio/high_mean", "ratio/mean", "kl"
# The sums of a task whose losses are those of pairs, in the place of `TOKEN_SUMS`: the loss, sums
# over pairs, and the part of the loss that is a cross entropy of tokens.
PAIR_SUMS = (
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
    "cross_entropy",
)
# Number of sums of every task.
SUMS = max(len(TOKEN_SUMS), len(PAIR_SUMS))
# Temperatures of SAPO for advantages above 0 and for others.
_SAPO_ABOVE, _SAPO_BELOW = 1.0, 1.05


class TokenRule(NamedTuple):
    """The token loss of an objective, and the loss of its pairs. Each number may also be an array
    with one for each token.

    The loss of a pair is a function of v = beta (x_w - x_l) - gamma, where x is the sum of lp - R
    over the target tokens of an answer, w the chosen and l the rejected one:
    sigmoid (-log σ(v)) + swapped (-log σ(-v)) + hinge max(0, 1 - v).

    Attributes:
      surrogate: index in `SURROGATES`.
      low, high: bounds of r.
      delta: another upper bound of r, which holds where A is negative too.
      kl_coef: factor of exp(R - lp) - (R - lp) - 1, the divergence from the reference.
      unbiased_kl: 1 if that divergence is multiplied by r, else 0.
      dro_beta: strength of the quadratic penalty of "dro".
      beta: factor of the difference between the answers of a pair; 0 without pairs.
      gamma: the margin by which the chosen answer shall win.
      by_length: 1 if x is divided by the number of target tokens, else 0.
      sigmoid, swapped, hinge: factors of the parts of the loss.
    """

    surrogate: Any = 0
    low: Any = 0.0
    high: Any = np.inf
    delta: Any = np.inf
    kl_coef: Any = 0.0
    unbiased_kl: Any = 0.0
    dro_beta: Any = 0.0
    beta: Any = 0.0
    gamma: Any = 0.0
    by_length: Any = 0.0
    sigmoid: Any = 0.0
    swapped: Any = 0.0
    hinge: Any = 0.0

    @classmethod
    def table(cls, rules: Mapping[int, "TokenRule"], size: int) -> "TokenRule":
        """The rules by index as arrays, float32 [size]. Other indices have the cross entropy."""
        every = [rules.get(i, CROSS_ENTROPY) for i in range(size)]
        return cls(*(np.array(x, np.float32) for x in zip(*every, strict=True)))


# Weighted cross entropy, whose weights the host knows.
CROSS_ENTROPY = TokenRule()


class TokenTerms(NamedTuple):
    """What a token's loss depends on besides its log-probability, an array each.

    Of a pair, the loss of tokens is a cross entropy that is added to the loss of the pair.

    Attributes:
      weight: factor of the loss.
      sampled: q; NaN stands for lp itself without its gradient, so that r = 1. In a pair, the
        factor of the pair's loss.
      advantage: A; unused in a cross entropy. In a pair, the factor of the token in x, with a
        minus in the rejected answer; 0 of a token that x does not count.
      reference: R; unused if `kl_coef` is 0. In a pair, only the sum of R over an answer matters.
    """

    weight: Any
    sampled: Any
    advantage: Any
    reference: Any


def log_ratio(xp: ModuleType, lp: Any, sampled: Any) -> Any:
    """lp - q."""
    return lp - xp.where(xp.isnan(sampled), lp, sampled)


def surrogate(
    xp: ModuleType, rule: TokenRule, lp: Any, log_ratio: Any, ratio: Any, a: Any
) -> tuple[Any, Any]:
    """The losses of tokens without the divergence, and their derivatives: by lp, or by the
    logarithm of the ratio if that is another one than exp(lp - q)."""
    within = (ratio >= rule.low) & (ratio <= rule.high)
    bounded, clipped = xp.minimum(ratio, rule.delta), xp.clip(ratio, rule.low, rule.high)
    free, bound = bounded * a, clipped * a
    # Where both are the same number, half of the gradient flows through each.
    both = (bounded == ratio) / 2 + within / 2
    moves = xp.where(free == bound, both, xp.where(free < bound, bounded == ratio, within))
    penalty = rule.dro_beta * log_ratio
    t = xp.where(a > 0, _SAPO_ABOVE, _SAPO_BELOW)
    share, rest = _sigmoid(xp, t * (ratio - 1)), _sigmoid(xp, -t * (ratio - 1))
    found = {
        "ratio": (-ratio * a, -ratio * a),
        "clipped": (-xp.minimum(free, bound), -ratio * a * moves),
        "cispo": (-bound * lp, -bound),
        "dro": (-(lp * a - penalty * log_ratio / 2), penalty - a),
        "sapo": (-4 / t * share * a, -4 * share * rest * ratio * a),
    }
    loss, slope = -a * lp, -a
    for name, (of_name, slope_of_name) in found.items():
        chosen = rule.surrogate == SURROGATES.index(name)
        loss, slope = xp.where(chosen, of_name, loss), xp.where(chosen, slope_of_name, slope)
    return loss, slope


def _sigmoid(xp: ModuleType, x: Any) -> Any:
    return (1 + xp.tanh(x / 2)) / 2


def divergence(
    xp: ModuleType, rule: TokenRule, lp: Any, ratio: Any, reference: Any
) -> tuple[Any, Any, Any]:
    """The divergence k = exp(R - lp) - (R - lp) - 1 of tokens; its part of the loss; and the
    derivatives of that part by lp if r is constant, and by the logarithm of r."""
    is_unbiased, penalised = rule.unbiased_kl > 0, rule.kl_coef > 0
    difference = reference - lp
    k = xp.where(penalised, xp.exp(difference) - difference - 1, 0.0)
    factor = rule.kl_coef * xp.where(is_unbiased, ratio, 1.0)
    # A ratio may be infinite.
    loss = xp.where(penalised, k * factor, 0.0)
    slope = xp.where(penalised, (1 - xp.exp(difference)) * factor, 0.0)
    return k, (loss, slope), xp.where(is_unbiased, loss, 0.0)


def sums_of(xp: ModuleType, rule: TokenRule, ratio: Any, a: Any, k: Any) -> tuple[Any, ...]:
    """What tokens add to `TOKEN_SUMS` besides the loss."""
    below, above = (ratio < rule.low) & (a < 0), (ratio > rule.high) & (a > 0)
    return tuple(x.astype(ratio.dtype) for x in (below, above)) + (ratio, k)


def token_losses(xp: ModuleType, rule: TokenRule, lp: Any, terms: TokenTerms) -> tuple[Any, Any]:
    """The losses of tokens, and the weights of the cross entropy -lp with the same gradient.

    A token without a weight has neither, whatever its other numbers are.

    Returns:
      For each token, what it adds to `TOKEN_SUMS`, or of a pair to `PAIR_SUMS` without the pair's
      loss, [..., sums]; and its weight, also without the pair's loss.
    """
    a, difference = terms.advantage, log_ratio(xp, lp, terms.sampled)
    ratio = xp.exp(difference)
    loss, slope = surrogate(xp, rule, lp, difference, ratio, a)
    k, (of_divergence, direct), through_ratio = divergence(xp, rule, lp, ratio, terms.reference)
    # A token without an advantage has no loss, although its ratio may be infinite.
    loss = xp.where(a != 0, loss, 0.0) + of_divergence
    slope = xp.where(a != 0, slope, 0.0) + direct + through_ratio
    is_plain = rule.surrogate == SURROGATES.index("cross_entropy")
    metrics = (xp.where(is_plain, 0.0, x) for x in sums_of(xp, rule, ratio, a, k))
    weight = terms.weight * xp.where(is_plain, 1.0, -slope)
    loss = terms.weight * xp.where(is_plain, -lp, loss)
    others = [xp.zeros_like(loss)] * (SUMS - len(TOKEN_SUMS) - 1)
    of_token = loss, *metrics, *others, xp.where(rule.beta > 0, loss, 0.0)
    counted = terms.weight != 0
    sums = xp.stack([xp.where(counted, x, 0.0) for x in of_token], axis=-1)
    return sums, xp.where(counted, weight, 0.0)


class AnswerSums(NamedTuple):
    """Sums over the target tokens of the chosen or of the rejected answers of pairs, an array each.

    Attributes:
      count: the factors of the tokens, without sign.
      log_prob: factor times lp.
      ratio: factor times lp - R.
    """

    count: Any
    log_prob: Any
    ratio: Any


def token_parts(xp: ModuleType, lp: Any, terms: TokenTerms, rejected: bool) -> AnswerSums:
    """What tokens add to the sums of their answer: the chosen one, or the `rejected` one."""
    factor = -terms.advantage if rejected else terms.advantage
    counted = factor > 0
    parts = factor, factor * lp, factor * (lp - terms.reference)
    return AnswerSums(*(xp.where(counted, part, 0.0) for part in parts))


def pair_losses(
    xp: ModuleType, rule: TokenRule, share: Any, chosen: AnswerSums, rejected: AnswerSums
) -> tuple[Any, Any, Any]:
    """The losses of pairs, and their slopes.

    Args:
      rule: numbers, or arrays with one for each pair.
      share: the factors of the losses of pairs.

    Returns:
      For each pair, what it adds to `PAIR_SUMS`, [..., sums]; and the weights that the tokens of
      the chosen and of the rejected answer get in the cross entropy for each unit of
      `TokenTerms.advantage`.
    """
    lengths = [xp.where(rule.by_length > 0, each.count, 1.0) for each in (chosen, rejected)]
    x_w, x_l = (x / n for x, n in zip((chosen.ratio, rejected.ratio), lengths, strict=True))
    v = rule.beta * (x_w - x_l) - rule.gamma
    of_sigmoid, of_swapped = xp.logaddexp(0.0, -v), xp.logaddexp(0.0, v)
    # A part whose factor is 0 may be infinite.
    parts = (
        (rule.sigmoid, of_sigmoid, -xp.exp(-of_swapped)),
        (rule.swapped, of_swapped, xp.exp(-of_sigmoid)),
        (rule.hinge, xp.maximum(1 - v, 0.0), xp.where(v < 1, -1.0, 0.0)),
    )
    loss = sum(xp.where(factor != 0, factor * value, 0.0) for factor, value, _ in parts)
    slope = sum(xp.where(factor != 0, factor * of_v, 0.0) for factor, _, of_v in parts)
    right = (rule.beta * x_w > rule.beta * x_l).astype(loss.dtype)
    numbers = share * loss, rule.beta * x_w, rule.beta * x_l, right
    log_probs = chosen.log_prob, rejected.log_prob, xp.zeros_like(loss)
    of_tokens = -share * rule.beta * slope
    return xp.stack([*numbers, *log_probs], axis=-1), *(of_tokens / n for n in lengths)
