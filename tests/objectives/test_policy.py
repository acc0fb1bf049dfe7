"""Token losses against differences, and on the device against float64; advantages and reductions by
hand."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmux.models import TokenLosses, chunk_losses
from jaxmux.objectives import Policy, Recorded
from jaxmux.objectives.token_losses import SUMS, TokenRule, TokenTerms
from jaxmux.pallas_kernels.frozen_weight import FrozenWeight

LENGTHS = 5, 1, 9
POLICIES = {
    "weighted": Policy("cross_entropy"),
    "importance sampling": Policy("importance_sampling"),
    "ppo": Policy("ppo"),
    "cispo": Policy("cispo", clip_high=1.1),
    "dro": Policy("dro", dro_beta=0.3),
    "sapo": Policy("sapo"),
    "two sides": Policy("grpo", delta=1.5, clip_low=0.7),
    "biased divergence": Policy("dapo", kl_coef=0.4, unbiased_kl=False),
    "divergence": Policy("dr_grpo", kl_coef=0.4, max_completion_length=7),
    "gspo": Policy("gspo"),
    "vespo": Policy("vespo"),
    "sequences": Policy("luspo", level="sequence", kl_coef=0.2),
}


def batch(rng):
    """Log-probabilities, those of the reference, and what records say. A token has no advantage and
    a ratio that overflows."""
    log_probs, sampled, reference = (
        [scale * rng.normal(size=n) - 2 for n in LENGTHS] for scale in (1.0, 0.4, 1.0)
    )
    sampled = [of_log_probs + 0.4 * x for of_log_probs, x in zip(log_probs, sampled, strict=True)]
    advantages = [np.full(n, a) for n, a in zip(LENGTHS, (1.3, -0.7, -1.1), strict=True)]
    return log_probs, reference, Recorded({"logprobs": sampled, "advantages": advantages}, {})


@pytest.mark.parametrize("name", POLICIES)
def test_slopes_are_differences_of_the_loss(name):
    policy, (log_probs, reference, recorded) = POLICIES[name], batch(np.random.default_rng(2))
    graded, step = policy.grade(log_probs, reference, recorded), 1e-6
    # The clipped ratio of cispo, and the mean ratio of gspo but for the own token, are constants.
    if name in ("cispo", "gspo", "vespo"):
        return
    for i, of_sample in enumerate(log_probs):
        for t in range(len(of_sample)):
            moved = []
            for sign in (-1, 1):
                changed = [x.copy() for x in log_probs]
                changed[i][t] += sign * step
                moved.append(policy.grade(changed, reference, recorded).loss)
            assert (moved[1] - moved[0]) / (2 * step) == pytest.approx(
                graded.slopes[i][t], rel=1e-5, abs=1e-8
            )


@pytest.mark.parametrize("name", POLICIES)
def test_adapters_can_be_compared_by_the_divergence_if_there_is_one(name):
    log_probs, reference, recorded = batch(np.random.default_rng(2))
    metrics = POLICIES[name].grade(log_probs, reference, recorded).metrics
    assert set(POLICIES[name].compared) == {"kl"} & set(metrics)


def test_constant_ratios_have_no_slope():
    """The clipped ratio of CISPO, and in GSPO that of the answer but for the token itself."""
    log_probs, _, recorded = batch(np.random.default_rng(2))
    lp, q, a = map(
        np.concatenate, (log_probs, recorded.values["logprobs"], recorded.values["advantages"])
    )
    found = POLICIES["cispo"].grade(log_probs, None, recorded).slopes
    np.testing.assert_allclose(np.concatenate(found), -np.clip(np.exp(lp - q), 0, 1.1) * a)
    found = Policy("gspo", clip_low=0.0, clip_high=9.0).grade(log_probs, None, recorded).slopes
    for slopes, of_answer, x, y in zip(
        found, recorded.values["advantages"], log_probs, recorded.values["logprobs"], strict=True
    ):
        np.testing.assert_allclose(slopes, -np.exp((x - y).mean()) * of_answer)


@pytest.mark.parametrize("name", [name for name, x in POLICIES.items() if not x.needs_log_probs])
def test_devices_compute_the_losses_of_tokens(name):
    """In a chunk beside one of plain cross entropy; a token without weight has infinite numbers."""
    policy, rng = POLICIES[name], np.random.default_rng(5)
    tokens, width, vocab = sum(LENGTHS) + 1, 8, 31
    hidden, head = rng.normal(size=(2 * tokens, width)), rng.normal(size=(width, vocab))
    targets = rng.integers(vocab, size=2 * tokens).astype(np.int32)
    logits = hidden @ head
    all_log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    lp = all_log_probs[np.arange(2 * tokens), targets]
    log_probs = np.split(lp[: tokens - 1], np.cumsum(LENGTHS)[:-1])
    _, reference, recorded = batch(rng)
    recorded.values["logprobs"][:] = [x + 0.3 * rng.normal(size=len(x)) for x in log_probs]
    reference = [x + 0.3 * rng.normal(size=len(x)) for x in log_probs]
    graded = policy.grade(log_probs, reference, recorded)
    given = map(np.concatenate, policy.terms(LENGTHS, recorded, reference))
    unweighted = 0.0, -1e4, np.inf, np.inf
    plain = rng.random(tokens)
    terms = TokenTerms(
        *(
            np.concatenate([x, [y], plain if i == 0 else np.zeros(tokens)]).astype(np.float32)
            for i, (x, y) in enumerate(zip(given, unweighted, strict=True))
        )
    )
    rules = TokenRule.table(dict.fromkeys(range(tokens), policy.rule), 2 * tokens)
    owners = np.arange(2, dtype=np.int32)

    def sums_of(hidden):
        weight = FrozenWeight.of(jnp.asarray(head, jnp.float32))
        losses = TokenLosses(terms, rules, jnp.zeros(2 * tokens))
        return chunk_losses(hidden, weight, targets, losses, owners)

    sums, pull = jax.vjp(sums_of, jnp.asarray(hidden, jnp.float32))
    (found,) = pull(jnp.ones_like(sums))
    assert sums.shape == (2, SUMS)
    assert float(sums[0, 0]) == pytest.approx(graded.loss, rel=1e-5)
    assert float(sums[1, 0]) == pytest.approx(-(plain * lp[tokens:]).sum(), rel=1e-5)
    assert policy.metrics(sums[0], sum(LENGTHS), len(LENGTHS), recorded) == pytest.approx(
        graded.metrics, rel=1e-5
    )
    weights = np.concatenate([*(-x for x in graded.slopes), [0.0], plain])
    is_target = np.arange(vocab) == targets[:, None]
    expected = weights[:, None] * (np.exp(all_log_probs) - is_target) @ head.T
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-6)


TRL = {
    "grpo": {},
    "dapo": {"delta": 1.4, "kl_coef": 0.3},
    "bnpo": {"kl_coef": 0.3, "unbiased_kl": False},
    "dr_grpo": {"max_completion_length": 11},
    "luspo": {"level": "sequence", "kl_coef": 0.2},
    "sapo": {},
    "vespo": {"kl_coef": 0.1},
}
TINKER = "importance_sampling", "ppo", "cispo", "dro", "gspo"


@pytest.fixture(scope="module")
def known(shared_dir):
    """Implementations that were compared with TRL's and with those of Tinker's documentation."""
    folder = shared_dir / "references" / "objectives"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        spec = importlib.util.spec_from_file_location("policy_reference", folder / "policy.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("loss", [*TRL, *TINKER])
def test_losses_are_those_of_other_trainers(loss, known):
    log_probs, reference, recorded = batch(np.random.default_rng(7))
    mask = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]

    def padded(parts):
        whole = np.zeros(mask.shape)
        whole[mask] = np.concatenate(parts)
        return whole

    lp, q, a, ref = map(
        padded, (log_probs, recorded.values["logprobs"], recorded.values["advantages"], reference)
    )
    if loss in TINKER:
        of_tokens, gradient = known.tinker(loss, lp, q, a, ratio_mask=mask)
        value, fields = (of_tokens * mask).sum(), {}
    else:
        fields = TRL[loss]
        names = {"kl_coef": "beta", "unbiased_kl": "bias_correction"}
        settings = {names.get(name, name): x for name, x in fields.items()}
        value, gradient = known.grpo_loss(lp, q, a, mask, loss, ref=ref, **settings)
    graded = Policy(loss, **fields).grade(log_probs, reference, recorded)
    assert graded.loss == pytest.approx(value, rel=1e-10)
    np.testing.assert_allclose(np.concatenate(graded.slopes), gradient[mask], rtol=1e-9, atol=1e-14)


def test_rewards_are_weights_or_are_scaled_in_their_batch():
    rewards = np.array([1.0, 3.0, np.nan])
    np.testing.assert_array_equal(Policy("cross_entropy").advantages(rewards, np.zeros(3)), rewards)
    nothing = [np.full(n, np.nan) for n in LENGTHS]
    recorded = Recorded(
        {"logprobs": nothing, "advantages": nothing},
        {"reward": np.array([1.0, 3, 8]), "advantage": np.array([-1.0, 1, 0])},
    )
    found = Policy(scale_rewards="batch").terms(LENGTHS, recorded, nothing).advantage
    deviation = np.std([1, 3, 8], ddof=1) + 1e-4
    for of_answer, n, expected in zip(found, LENGTHS, (-1, 1, 0), strict=True):
        np.testing.assert_allclose(of_answer, np.full(n, expected / deviation))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"clip_low": 1.3}, "clip_low is 1.3, above clip_high"),
        ({"loss": "ppo", "level": "sequence"}, "'sequence' is not defined for the loss 'ppo'"),
        ({"loss": "dr_grpo"}, "needs max_completion_length"),
        ({"loss": "cross_entropy", "kl_coef": 0.1}, "kl_coef is not defined"),
    ],
)
def test_values_that_do_not_go_together_are_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        Policy(**fields)
