"""Objectives of reinforcement learning on recorded rollouts: of an answer that was sampled from a
policy, the log-probabilities under that policy and an advantage are known for every token.

In the formulas lp is the log-probability of a token, q that under the policy that sampled it, A its
advantage, r = exp(lp - q), and sg(·) is a constant for the gradient.
"""

from typing import Annotated, ClassVar, Literal

import numpy as np
from jaxtyping import Float
from pydantic import Field

from jaxmux.data.sources import Records
from jaxmux.field_checks import EXACT, Count, Positive, checked_dataclass

from .objective import LOSS, Graded, Objective
from .token_losses import (
    CROSS_ENTROPY,
    SURROGATES,
    TOKEN_SUMS,
    TokenRule,
    TokenTerms,
    divergence,
    log_ratio,
    sums_of,
    surrogate,
    token_losses,
)

_NotNegative = Annotated[float, Field(ge=0), EXACT]

# For each loss: how a token's loss depends on its ratio, and how the losses are added up.
_LOSSES = {
    "cross_entropy": ("cross_entropy", "tokens"),
    "importance_sampling": ("ratio", "sum"),
    "ppo": ("clipped", "sum"),
    "gspo": ("clipped", "sum"),
    "cispo": ("cispo", "sum"),
    "dro": ("dro", "sum"),
    "grpo": ("clipped", "sequences"),
    "sapo": ("sapo", "sequences"),
    "dapo": ("clipped", "tokens"),
    "bnpo": ("clipped", "tokens"),
    "luspo": ("clipped", "batch"),
    "dr_grpo": ("clipped", "longest"),
    # A factor of the whole answer takes the place of the ratio.
    "vespo": ("ratio", "tokens"),
}
_REDUCTIONS = "sum", "tokens", "sequences", "batch", "longest"
_CLIP = {"cispo": (0.0, 4.0)}
_USUAL_CLIP = (0.8, 1.2)
# Of VESPO, bounds of the log-ratio of a token and of an answer, and the exponents (k, lambda) for
# advantages of at least 0 and for others.
_VESPO_TOKEN, _VESPO_ANSWER = (-20.0, 20.0), (np.log(1e-8), 20.0)
_VESPO_ABOVE, _VESPO_BELOW = (2.0, 3.0), (3.0, 2.0)
# What TRL adds to a standard deviation before it divides by it.
_LEAST_DEVIATION = 1e-4


@checked_dataclass
class Policy(Objective):
    """Policy gradients on recorded rollouts.

    Without `logprobs` in the records, q is the present policy's own log-probability, so r = 1.
    Advantages are those of the records, or an answer's reward less the mean reward of its group.

    Attributes:
      loss: "cross_entropy", -A lp, where A may also be a reward as it is (reward-weighted
        fine-tuning). Of Tinker's losses, which are added up over all tokens:
        "importance_sampling", -r A; "ppo", -min(r A, clip(r) A); "cispo", -sg(clip(r)) A lp; "dro",
        -(A lp - dro_beta (lp - q)² / 2); and "gspo", as "ppo" with r = sg(exp(mean of lp - q over
        the answer)). Of the losses of TRL's GRPO: "grpo" (Shao et al. 2024), "dapo" (Yu et al.
        2025), "dr_grpo" (Liu et al. 2025), "bnpo" and "luspo", which differ in `reduction`; and
        "sapo", -4/t σ(t (r - 1)) A with t = 1, or 1.05 where A is not above 0; and "vespo",
        -sg(exp(λ + k w - λ exp(w))) A lp with the log-ratio w of the answer, (k, λ) = (2, 3), or
        (3, 2) where A is below 0.
      clip_low: lower bound of r, TRL's 1 - epsilon. None for 0.8, for "cispo" 0.
      clip_high: upper bound of r, TRL's 1 + epsilon_high. None for 1.2, for "cispo" 4. For "cispo",
        TRL takes epsilon_high itself as this bound, and the reduction "tokens".
      delta: another upper bound of r, which holds where A is negative too (two-sided clipping).
        None for no such bound.
      level: "token", or "sequence" for r = exp(mean of lp - q over the answer), through whose mean
        the gradient flows (GSPO, Zheng et al. 2025); for losses of GRPO.
      kl_coef: weight of the KL divergence from the reference, exp(R - lp) - (R - lp) - 1 with the
        reference's log-probability R of the token.
      unbiased_kl: whether that divergence is multiplied by r (TRL's use_bias_correction_kl).
      dro_beta: strength of the quadratic penalty of "dro".
      reduction: "sum" of all tokens; "tokens", divided by the tokens of the batch; "sequences", the
        mean over answers of their means; "batch", divided by the number of answers; "longest",
        divided by that number and `max_completion_length`. None for the one of the loss.
      max_completion_length: for the reduction "longest".
      scale_rewards: "group" if advantages from rewards are divided by the standard deviation of the
        rewards of the group, plus 1e-4; "batch" if by that of the global batch; or "none".
      leave_one_out: whether the mean is that of the other answers of the group (RLOO, Ahmadian et
        al. 2024).

    Raises:
      ValueError: a value is outside its range, or values do not go together.
    """

    loss: Literal[*_LOSSES] = "dapo"
    clip_low: _NotNegative | None = None
    clip_high: _NotNegative | None = None
    delta: Positive | None = None
    level: Literal["token", "sequence"] = "token"
    kl_coef: _NotNegative = 0.0
    unbiased_kl: bool = True
    dro_beta: _NotNegative = 0.05
    reduction: Literal[*_REDUCTIONS] | None = None
    max_completion_length: Count | None = None

    scale_rewards: Literal["group", "batch", "none"] = "group"
    leave_one_out: bool = False

    kind: ClassVar[str] = "policy"
    records: ClassVar[Records] = "rollouts"
    by_token: ClassVar[bool] = True

    def __post_init__(self):
        low, high = self._clip
        if low > high:
            raise ValueError(f"clip_low is {low:g}, above clip_high, which is {high:g}")
        of_grpo = self._surrogate in ("clipped", "sapo") and self.loss not in ("ppo", "gspo")
        if self.level == "sequence" and not of_grpo:
            raise ValueError(f"level 'sequence' is not defined for the loss {self.loss!r}")
        if self.loss == "cross_entropy" and self.kl_coef:
            raise ValueError("kl_coef is not defined for the loss 'cross_entropy'")
        if self._reduction == "longest" and self.max_completion_length is None:
            raise ValueError("the reduction 'longest' needs max_completion_length")

    @property
    def needs_log_probs(self) -> bool:
        return self.level == "sequence" or self.loss in ("gspo", "vespo")

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def compared(self):
        return ("kl",) if self.kl_coef and self.loss != "cross_entropy" else ()

    @property
    def rule(self) -> TokenRule:
        return CROSS_ENTROPY if self.needs_log_probs else self._rule

    @property
    def _rule(self) -> TokenRule:
        return TokenRule(
            SURROGATES.index(self._surrogate),
            *self._clip,
            np.inf if self.delta is None else self.delta,
            self.kl_coef,
            float(self.unbiased_kl),
            self.dro_beta,
        )

    @property
    def _surrogate(self) -> str:
        return _LOSSES[self.loss][0]

    @property
    def _reduction(self) -> str:
        return self.reduction or _LOSSES[self.loss][1]

    @property
    def _clip(self) -> tuple[float, float]:
        low, high = _CLIP.get(self.loss, _USUAL_CLIP)
        return (
            low if self.clip_low is None else self.clip_low,
            high if self.clip_high is None else self.clip_high,
        )

    def advantages(
        self, rewards: Float[np.ndarray, " samples"], groups: Float[np.ndarray, " samples"]
    ) -> Float[np.ndarray, " samples"]:
        """The advantage of each answer in its group. An answer that is alone, or as good as all
        others of its group, has 0, and one without a reward has NaN. With the loss "cross_entropy",
        rewards are weights as they are."""
        if self.loss == "cross_entropy":
            return rewards
        found = np.full(len(rewards), np.nan)
        there = ~np.isnan(rewards)
        rewards = rewards[there]
        numbers = np.unique(groups[there], return_inverse=True)[1]
        sizes = np.bincount(numbers)[numbers]
        others = np.maximum(sizes - 1, 1)
        differences = rewards - (np.bincount(numbers, rewards) / np.bincount(numbers))[numbers]
        result = differences * sizes / others if self.leave_one_out else differences
        if self.scale_rewards == "group":
            deviations = np.sqrt(np.bincount(numbers, differences**2)[numbers] / others)
            result = result / (deviations + _LEAST_DEVIATION)
        found[there] = result
        return found

    def grade(self, log_probs, reference=None, recorded=None, log_squares=None):
        lengths = np.array([len(each) for each in log_probs])
        ends = np.cumsum(lengths)[:-1]
        known = [np.zeros(n) for n in lengths] if reference is None else reference
        terms = TokenTerms(*map(np.concatenate, self.terms(lengths, recorded, known)))
        lp = np.concatenate(log_probs)
        # Ratios of tokens without an advantage may be infinite.
        with np.errstate(all="ignore"):
            grade = self._by_sequence if self.needs_log_probs else self._by_token
            sums, slopes = grade(lp, terms, lengths)
        metrics = self.metrics(sums, len(lp), len(lengths), recorded)
        return Graded(float(sums[0]), np.split(slopes, ends), metrics)

    def terms(self, lengths, recorded, reference):
        weights = self._weights(np.asarray(lengths))
        given = recorded.values["advantages"]
        unknown = np.full(len(lengths), np.nan)
        from_rewards = recorded.numbers.get("advantage", unknown)
        if self.scale_rewards == "batch" and self.loss != "cross_entropy":
            rewards = recorded.numbers.get("reward", unknown)
            rewards = rewards[~np.isnan(rewards)]
            deviation = np.std(rewards, ddof=1) if len(rewards) > 1 else 0.0
            from_rewards = from_rewards / (deviation + _LEAST_DEVIATION)
        advantages = [
            np.where(np.isnan(of_sample), of_answer, of_sample)
            for of_sample, of_answer in zip(given, from_rewards, strict=True)
        ]
        sampled = recorded.values["logprobs"]
        repeated = [np.full(n, weight) for n, weight in zip(lengths, weights, strict=True)]
        if self.loss == "cross_entropy":
            # The advantages are the weights.
            repeated = [w * a for w, a in zip(repeated, advantages, strict=True)]
        return TokenTerms(repeated, sampled, advantages, reference)

    def metrics(self, sums, targets, samples, recorded):
        named = zip(TOKEN_SUMS, np.asarray(sums, float) / targets, strict=False)
        means = {name: mean for name, mean in named if name != LOSS}
        if self.loss == "cross_entropy":
            means = {}
        elif not self.kl_coef:
            del means["kl"]
        if not np.isnan(rewards := recorded.numbers.get("reward", np.array(np.nan))).all():
            means["reward"] = np.nanmean(rewards)
        return {name: float(value) for name, value in means.items()}

    def _by_token(self, lp, terms, lengths):
        sums, weights = token_losses(np, self._rule, lp, terms)
        return sums.sum(axis=0), -weights

    def _by_sequence(self, lp, terms, lengths):
        """What the tokens of an answer have in common is computed from all of them, also from those
        without an advantage."""
        sequence, a = np.repeat(np.arange(len(lengths)), lengths), terms.advantage
        difference = log_ratio(np, lp, terms.sampled)
        ratio = np.exp(difference)
        if self.loss == "vespo":
            of_answers = np.bincount(sequence, np.clip(difference, *_VESPO_TOKEN))
            slope = -_vespo(of_answers[sequence], a) * a
            loss = slope * lp
        else:
            ratio = np.exp((np.bincount(sequence, difference) / lengths)[sequence])
            loss, slope = surrogate(np, self._rule, lp, difference, ratio, a)
        loss, slope = np.where(a != 0, loss, 0.0), np.where(a != 0, slope, 0.0)
        k, (of_divergence, direct), through_ratio = divergence(
            np, self._rule, lp, ratio, terms.reference
        )
        loss, slope = loss + of_divergence, slope + through_ratio
        if self.level == "sequence":
            through_mean = np.bincount(sequence, terms.weight * slope) / lengths
            slopes = terms.weight * direct + through_mean[sequence]
        else:
            slopes = terms.weight * (direct + slope)
        sums = [each.sum() for each in sums_of(np, self._rule, ratio, a, k)]
        return np.array([(terms.weight * loss).sum(), *sums]), slopes

    def _weights(self, lengths: Float[np.ndarray, " samples"]) -> Float[np.ndarray, " samples"]:
        """The factor of the tokens of each answer in the loss."""
        count = len(lengths)
        match self._reduction:
            case "tokens":
                return np.full(count, 1 / lengths.sum())
            case "sequences":
                return 1 / (count * lengths)
            case "batch":
                return np.full(count, 1 / count)
            case "longest":
                return np.full(count, 1 / (count * self.max_completion_length))
        return np.ones(count)


def _vespo(log_ratio: Float[np.ndarray, " tokens"], a: Float[np.ndarray, " tokens"]):
    """The factor of tokens whose answers have this logarithm of their ratio."""
    w = np.clip(log_ratio, *_VESPO_ANSWER)
    k, scale = (np.where(a >= 0, *x) for x in zip(_VESPO_ABOVE, _VESPO_BELOW, strict=True))
    return np.exp(scale + k * w - scale * np.exp(w))
