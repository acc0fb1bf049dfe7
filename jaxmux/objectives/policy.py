"""Objectives of reinforcement learning on recorded rollouts: of an answer that was sampled from a
policy, the log-probabilities under that policy and an advantage are known for every token.

In the formulas lp is the log-probability of a token, q that under the policy that sampled it, A its
advantage, r = exp(lp - q), and sg(·) is a constant for the gradient.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
from jaxtyping import Float
from pydantic import Field
from scipy.special import expit

from jaxmux.field_checks import EXACT, Count, Positive, checked_dataclass

from .objective import Graded, Objective

Tokens = Float[np.ndarray, " tokens"]

_NotNegative = Annotated[float, Field(ge=0), EXACT]

# For each loss: how a token's loss depends on its ratio, and how the losses are added up.
_LOSSES = {
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
}
_REDUCTIONS = "sum", "tokens", "sequences", "batch", "longest"
_CLIP = {"cispo": (0.0, 4.0)}
_USUAL_CLIP = (0.8, 1.2)
# What TRL adds to a standard deviation before it divides by it.
_LEAST_DEVIATION = 1e-4
# Temperatures of SAPO for advantages above and below 0.
_SAPO_ABOVE, _SAPO_BELOW = 1.0, 1.05


class _Loss(NamedTuple):
    """Losses of tokens, and their derivatives: `own` by the token's own lp, and `shared` by the
    logarithm of the ratio of its sequence."""

    loss: Tokens
    own: Tokens
    shared: Tokens


@checked_dataclass
class Policy(Objective):
    """Policy gradients on recorded rollouts.

    Without `logprobs` in the records, q is the present policy's own log-probability, so r = 1.
    Advantages are those of the records, or an answer's reward less the mean reward of its group.

    Attributes:
      loss: of Tinker's losses, which are added up over all tokens: "importance_sampling", -r A;
        "ppo", -min(r A, clip(r) A); "cispo", -sg(clip(r)) A lp; "dro",
        -(A lp - dro_beta (lp - q)² / 2); and "gspo", as "ppo" with r = sg(exp(mean of lp - q over
        the answer)). Of the losses of TRL's GRPO: "grpo" (Shao et al. 2024), "dapo" (Yu et al.
        2025), "dr_grpo" (Liu et al. 2025), "bnpo" and "luspo", which differ in `reduction`; and
        "sapo", -4/t σ(t (r - 1)) A with t = 1, or 1.05 where A is not above 0.
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
      scale_rewards: whether advantages from rewards are divided by the standard deviation of the
        group, plus 1e-4.
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

    scale_rewards: bool = True
    leave_one_out: bool = False

    kind: ClassVar[str] = "policy"
    by_token: ClassVar[bool] = True
    rollouts: ClassVar[bool] = True

    def __post_init__(self):
        low, high = self._clip
        if low > high:
            raise ValueError(f"clip_low is {low:g}, above clip_high, which is {high:g}")
        of_grpo = self._surrogate in ("clipped", "sapo") and self.loss not in ("ppo", "gspo")
        if self.level == "sequence" and not of_grpo:
            raise ValueError(f"level 'sequence' is not defined for the loss {self.loss!r}")
        if self._reduction == "longest" and self.max_completion_length is None:
            raise ValueError("the reduction 'longest' needs max_completion_length")

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def compared(self):
        return ("kl",) if self.kl_coef else ()

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
        others of its group, has 0, and one without a reward has NaN."""
        found = np.full(len(rewards), np.nan)
        there = ~np.isnan(rewards)
        rewards = rewards[there]
        numbers = np.unique(groups[there], return_inverse=True)[1]
        sizes = np.bincount(numbers)[numbers]
        others = np.maximum(sizes - 1, 1)
        differences = rewards - (np.bincount(numbers, rewards) / np.bincount(numbers))[numbers]
        result = differences * sizes / others if self.leave_one_out else differences
        if self.scale_rewards:
            deviations = np.sqrt(np.bincount(numbers, differences**2)[numbers] / others)
            result = result / (deviations + _LEAST_DEVIATION)
        found[there] = result
        return found

    def grade(self, log_probs, reference=None, recorded=None):
        lengths = np.array([len(each) for each in log_probs])
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        lp, sampled, given = map(
            np.concatenate,
            (log_probs, recorded.values["logprobs"], recorded.values["advantages"]),
        )
        q = np.where(np.isnan(sampled), lp, sampled)
        from_rewards = recorded.numbers.get("advantage", np.full(len(lengths), np.nan))
        advantages = np.where(np.isnan(given), from_rewards[sequence], given)
        weight = self._weights(lengths)[sequence]
        # Tokens without an advantage take part in the mean ratio of their answer only.
        with np.errstate(all="ignore"):
            log_ratio = lp - q
            means = np.bincount(sequence, log_ratio) / lengths
            by_sequence = self.level == "sequence" or self.loss == "gspo"
            ratio = np.exp(means[sequence] if by_sequence else log_ratio)
            found = self._of_tokens(lp, log_ratio, ratio, advantages)
            divergence = np.zeros_like(lp)
            if reference is not None and self.kl_coef:
                difference = np.concatenate(reference) - lp
                divergence = np.exp(difference) - difference - 1
                found = self._with_divergence(found, difference, divergence, ratio)
            loss, slopes = weight * found.loss, weight * found.own
            if self.level == "sequence":
                through_mean = np.bincount(sequence, weight * found.shared) / lengths
                slopes = slopes + through_mean[sequence]
        counted = (advantages != 0) | (self.kl_coef > 0) | (self.level == "sequence")
        loss, slopes = np.where(counted, loss, 0), np.where(counted, slopes, 0)
        metrics = self._metrics(ratio, advantages, divergence, recorded.numbers)
        ends = np.cumsum(lengths)[:-1]
        return Graded(float(loss.sum()), np.split(slopes, ends), metrics)

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

    def _of_tokens(self, lp: Tokens, log_ratio: Tokens, ratio: Tokens, a: Tokens) -> _Loss:
        low, high = self._clip
        none = np.zeros_like(lp)
        match self._surrogate:
            case "ratio":
                return _Loss(-ratio * a, -ratio * a, none)
            case "dro":
                penalty = self.dro_beta * log_ratio
                return _Loss(-(lp * a - penalty * log_ratio / 2), penalty - a, none)
            case "cispo":
                factor = np.clip(ratio, low, high) * a
                return _Loss(-factor * lp, -factor, none)
            case "sapo":
                t = np.where(a > 0, _SAPO_ABOVE, _SAPO_BELOW)
                share = expit(t * (ratio - 1))
                loss, slope = -4 / t * share * a, -4 * share * (1 - share) * ratio * a
            case _:
                bounded = ratio if self.delta is None else np.minimum(ratio, self.delta)
                free, clipped = bounded * a, np.clip(ratio, low, high) * a
                loss, slope = -np.minimum(free, clipped), -ratio * a
                moves = np.where(free < clipped, bounded == ratio, (ratio >= low) & (ratio <= high))
                # Where both are the same number, half of the gradient flows through each.
                both = (bounded == ratio) / 2 + ((ratio >= low) & (ratio <= high)) / 2
                slope = slope * np.where(free == clipped, both, moves)
        if self.level == "sequence":
            return _Loss(loss, none, slope)
        return _Loss(loss, slope, none)

    def _with_divergence(
        self, found: _Loss, difference: Tokens, divergence: Tokens, ratio: Tokens
    ) -> _Loss:
        factor = ratio if self.unbiased_kl else np.ones_like(ratio)
        own = self.kl_coef * (1 - np.exp(difference)) * factor
        through_ratio = self.kl_coef * divergence * ratio if self.unbiased_kl else 0.0
        loss = found.loss + self.kl_coef * divergence * factor
        if self.level == "sequence":
            return _Loss(loss, found.own + own, found.shared + through_ratio)
        return _Loss(loss, found.own + own + through_ratio, found.shared)

    def _metrics(
        self,
        ratio: Tokens,
        a: Tokens,
        divergence: Tokens,
        numbers: Mapping[str, Float[np.ndarray, " samples"]],
    ) -> dict[str, float]:
        low, high = self._clip
        metrics = {
            "clip_ratio/low_mean": np.mean((ratio < low) & (a < 0)),
            "clip_ratio/high_mean": np.mean((ratio > high) & (a > 0)),
            "ratio/mean": np.mean(ratio),
        }
        if self.kl_coef:
            metrics["kl"] = np.mean(divergence)
        if not np.isnan(rewards := numbers.get("reward", np.array(np.nan))).all():
            metrics["reward"] = np.nanmean(rewards)
        return {name: float(value) for name, value in metrics.items()}
