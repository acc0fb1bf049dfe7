"""Objectives of preferences as functions of log-probabilities: slopes against differences and
autodiff, extreme values, and errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn import log_sigmoid, sigmoid

from jaxmux.data import Sample, fill_microbatch
from jaxmux.models.head import microbatch_losses
from jaxmux.objectives import (
    ACCURACY,
    CPO,
    DPO,
    HIGHER_IS_BETTER,
    KTO,
    OBJECTIVES,
    ORPO,
    SFT,
    Comparison,
    Recorded,
    SimPO,
)
from jaxmux.objectives.token_losses import TokenRule
from jaxmux.pallas_kernels.frozen_weight import FrozenWeight

BETA = 0.4
LOSSES = (
    *("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "discopop", "nca_pair", "bco_pair"),
    *("sppo_hard", "apo_zero", "apo_down", "aot", "aot_unpaired", "sft"),
)
OF_DIFFERENCES = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "discopop", "exo_pair")
DIVERGENCES = ("forward_kl", "js_divergence", "alpha_divergence")
CASES = {
    **{name: DPO(BETA, name) for name in LOSSES},
    **{
        f"{name}, smoothed": DPO(BETA, name, label_smoothing=0.2)
        for name in ("exo_pair", "robust", "aot", "aot_unpaired")
    },
    **{
        f"{name}, {f}": DPO(
            BETA, name, label_smoothing=0.1 if name == "exo_pair" else 0.0, f_divergence=f
        )
        for name in OF_DIFFERENCES
        for f in DIVERGENCES
    },
    "alpha of 1": DPO(BETA, f_divergence="alpha_divergence", f_alpha=1.0),
    "alpha of 2": DPO(BETA, f_divergence="alpha_divergence", f_alpha=2.0),
    "ld": DPO(BETA, ld_alpha=0.3),
    "ld of 0": DPO(BETA, "ipo", ld_alpha=0.0),
    "mixture": DPO(BETA, ("sigmoid", "bco_pair", "sft"), (0.8, 0.2, 1.0)),
    "mixture of one pass": DPO(
        BETA,
        ("hinge", "robust", "sigmoid", "sft"),
        (0.7, 0.2, 0.4, -0.3),
        label_smoothing=0.1,
        ld_alpha=0.3,
    ),
    "mixture, ld": DPO(BETA, ("ipo", "sft", "aot"), (0.1, -0.5, 2.0), ld_alpha=0.6),
    **{f"cpo, {name}": CPO(BETA, name) for name in ("sigmoid", "hinge", "ipo")},
    "cpo, smoothed": CPO(BETA, cpo_alpha=0.0, label_smoothing=0.2),
    "alphapo": CPO(BETA, cpo_alpha=0.5, alpha=0.1),
    "alphapo, ipo": CPO(BETA, "ipo", alpha=-0.2),
    "simpo": SimPO(),
    "simpo, cross entropy": SimPO(1.5, 0.3, cpo_alpha=0.4, label_smoothing=0.2),
    "simpo, smoothed": SimPO(1.5, 0.3, cpo_alpha=0.4, label_smoothing=0.2, alpha=0.25),
    "orpo": ORPO(BETA),
}
# The chosen answer of one pair is longer, that of another one shorter, and two are equally long.
LENGTHS = (5, 3, 2, 6, 4, 4, 1, 2)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def log_probs(rng):
    return [-rng.uniform(0.05, 3, n) for n in LENGTHS]


@pytest.fixture
def reference(rng):
    return [-rng.uniform(0.05, 3, n) for n in LENGTHS]


@pytest.mark.parametrize("name", CASES)
def test_slopes_are_central_differences(name, log_probs, reference):
    objective, step = CASES[name], 1e-5
    kept = objective.sums(reference)
    slopes = objective.grade(log_probs, kept).slopes
    assert [len(of_sample) for of_sample in slopes] == list(LENGTHS)
    for i, of_sample in enumerate(slopes):
        for t, slope in enumerate(of_sample):
            losses = []
            for change in (step, -step):
                changed = [each.copy() for each in log_probs]
                changed[i][t] += change
                losses.append(objective.grade(changed, kept).loss)
            expected = (losses[0] - losses[1]) / (2 * step)
            assert slope == pytest.approx(expected, rel=1e-6, abs=1e-9)


def difference(s, r):
    return BETA * ((s[::2] - r[::2]) - (s[1::2] - r[1::2]))


def odds_ratio(a):
    log_odds = a - jnp.log(1 - jnp.exp(a))
    return log_odds[::2] - log_odds[1::2]


def sorted_difference(s, r):
    return BETA * (jnp.sort(s[::2] - r[::2]) - jnp.sort(s[1::2] - r[1::2]))


# By case, the losses of pairs as a function of S, R and n of all samples; no cross entropy.
PLAIN = {
    "sigmoid": lambda s, r, n: -log_sigmoid(difference(s, r)),
    "sigmoid_norm": lambda s, r, n: -log_sigmoid(difference(s / n, r / n)),
    "hinge": lambda s, r, n: jax.nn.relu(1 - difference(s, r)),
    "ipo": lambda s, r, n: (difference(s / n, r / n) / BETA - 1 / (2 * BETA)) ** 2,
    "robust, smoothed": lambda s, r, n: (
        (-0.8 * log_sigmoid(difference(s, r)) + 0.2 * log_sigmoid(-difference(s, r))) / 0.6
    ),
    "sppo_hard": lambda s, r, n: (
        (s[::2] - r[::2] - 0.5 / BETA) ** 2 + (s[1::2] - r[1::2] + 0.5 / BETA) ** 2
    ),
    "apo_zero": lambda s, r, n: (
        1 - sigmoid(BETA * (s[::2] - r[::2])) + sigmoid(BETA * (s[1::2] - r[1::2]))
    ),
    "aot_unpaired": lambda s, r, n: -log_sigmoid(sorted_difference(s, r)),
    "cpo, smoothed": lambda s, r, n: (
        -0.8 * log_sigmoid(difference(s, 0 * r)) - 0.2 * log_sigmoid(-difference(s, 0 * r))
    ),
    "simpo": lambda s, r, n: -log_sigmoid(2.0 * (s[::2] / n[::2] - s[1::2] / n[1::2]) - 0.5),
    "orpo": lambda s, r, n: -BETA * log_sigmoid(odds_ratio(s / n)) - s[::2].sum() / n[::2].sum(),
}


@pytest.mark.parametrize("name", PLAIN)
def test_losses_and_slopes_are_those_of_autodiff(name, log_probs, reference):
    objective = CASES[name]
    graded = objective.grade(log_probs, objective.sums(reference))
    with jax.enable_x64(True):
        s, r = (jnp.array([each.sum() for each in of]) for of in (log_probs, reference))
        n = jnp.array(LENGTHS, float)
        loss, gradient = jax.value_and_grad(lambda s: PLAIN[name](s, r, n).mean())(s)
    assert graded.loss == pytest.approx(float(loss), rel=1e-12)
    for of_sample, expected in zip(graded.slopes, gradient, strict=True):
        np.testing.assert_allclose(of_sample, float(expected), rtol=1e-10, atol=1e-15)


# Squares of an infinite log-ratio are infinite, and so is the loss of a label that is believed to
# be wrong.
UNBOUNDED = {
    *("ipo", "sppo_hard", "ld of 0", "mixture, ld", "cpo, ipo", "alphapo, ipo"),
    *("robust, smoothed", "aot, smoothed", "aot_unpaired, smoothed"),
    *("cpo, smoothed", "simpo, smoothed", *(f"ipo, {f}" for f in DIVERGENCES)),
    *("mixture of one pass", "simpo, cross entropy"),
}
# Sigmoids and their divergence are at most 1 or -log(label_smoothing).
BOUNDED = {
    *("apo_zero", "apo_down", "exo_pair, smoothed", *(f"exo_pair, {f}" for f in DIVERGENCES))
}


@pytest.mark.parametrize("name", sorted(CASES.keys() - UNBOUNDED))
def test_a_rejected_answer_of_probability_0_has_no_weight(name, log_probs, reference):
    objective = CASES[name]
    log_probs[3][0] = -np.inf
    graded = objective.grade(log_probs, objective.sums(reference))
    assert np.isfinite(graded.loss)
    assert (graded.slopes[3] == 0).all()
    assert all(np.isfinite(of_sample).all() for of_sample in graded.slopes)


@pytest.mark.parametrize("name", CASES)
def test_a_chosen_answer_of_probability_0_makes_the_loss_infinite(name, log_probs, reference):
    objective = CASES[name]
    log_probs[2][0] = -np.inf
    loss = objective.grade(log_probs, objective.sums(reference)).loss
    # The divergence alpha is cut at its largest exponent.
    if name not in BOUNDED and "alpha" not in name:
        assert not np.isfinite(loss)


# These losses grow exponentially with the ratio.
EXPONENTIAL = {
    *("alpha of 2", "alphapo", "alphapo, ipo"),
    *(f"{name}, forward_kl" for name in OF_DIFFERENCES),
}


@pytest.mark.parametrize("name", sorted(CASES.keys() - EXPONENTIAL))
@pytest.mark.parametrize("sign", [1, -1])
def test_huge_ratios_do_not_overflow(name, sign, log_probs, reference):
    objective = CASES[name]
    # S - R of chosen and rejected answers is about 2,000, of opposite signs.
    for of, first in ((log_probs, sign < 0), (reference, sign > 0)):
        for i in range(len(LENGTHS)):
            of[i][0] -= 2000.0 * ((i % 2 == 0) == first)
    graded = objective.grade(log_probs, objective.sums(reference))
    assert np.isfinite(graded.loss)
    assert all(np.isfinite(of_sample).all() for of_sample in graded.slopes)


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"sft"}))
def test_nan_reaches_the_loss(name, log_probs, reference):
    objective = CASES[name]
    log_probs[1][1] = np.nan
    assert np.isnan(objective.grade(log_probs, objective.sums(reference)).loss)


def test_the_odds_ratio_of_a_chosen_answer_of_probability_1_has_a_slope(log_probs):
    certain = [each.copy() for each in log_probs]
    log_probs[0][:], certain[0][:] = -1e-12, 0
    expected, found = (ORPO(BETA).grade(each) for each in (log_probs, certain))
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    for one, other in zip(found.slopes, expected.slopes, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-12)


def test_beyond_the_shorter_answer_tokens_have_the_factor_ld_alpha(log_probs, reference):
    objective = CASES["ld"]
    slopes = objective.grade(log_probs, objective.sums(reference)).slopes
    np.testing.assert_allclose(slopes[0] / slopes[0][0], [1, 1, 1, 0.3, 0.3])
    assert (slopes[1] == slopes[1][0]).all()


def test_a_policy_that_is_its_reference_has_no_margin(log_probs):
    graded = DPO().grade(log_probs, DPO().sums(log_probs))
    assert graded.loss == pytest.approx(np.log(2), rel=1e-15)
    assert graded.metrics["rewards/margins"] == graded.metrics[ACCURACY] == 0


def test_a_mixture_is_the_weighted_sum_of_its_types(log_probs, reference):
    mixture = CASES["mixture"]
    kept = mixture.sums(reference)
    parts = [DPO(BETA, name).grade(log_probs, kept) for name in mixture.loss]
    graded = mixture.grade(log_probs, kept)
    assert graded.loss == pytest.approx(np.dot(mixture.weights, [p.loss for p in parts]))
    for i, of_sample in enumerate(graded.slopes):
        expected = sum(w * p.slopes[i] for w, p in zip(mixture.weights, parts, strict=True))
        np.testing.assert_allclose(of_sample, expected)


def test_a_pair_counts_as_much_as_it_is_probable(log_probs, reference, rng):
    squares = [-rng.uniform(0.05, 3, n) for n in LENGTHS]
    plain, weighted = (
        DPO(BETA, use_weighting=w).grade(log_probs, DPO().sums(reference), None, squares)
        for w in (False, True)
    )
    answers = [np.exp((lp - x).mean()) for lp, x in zip(log_probs, squares, strict=True)]
    weights = np.repeat(np.prod(np.reshape(answers, (-1, 2)), axis=1), 2)
    for slopes, of_plain, weight in zip(weighted.slopes, plain.slopes, weights, strict=True):
        np.testing.assert_allclose(slopes, weight * of_plain)
    of_pairs = [
        DPO(BETA).grade(log_probs[i : i + 2], DPO().sums(reference[i : i + 2])).loss
        for i in range(0, len(LENGTHS), 2)
    ]
    assert weighted.loss == pytest.approx(np.mean(weights[::2] * of_pairs))


@pytest.mark.parametrize("name", ["sigmoid", "mixture", "cpo, sigmoid", "simpo", "orpo"])
def test_adapters_can_be_compared_by_all_metrics(name, log_probs, reference):
    metrics = CASES[name].grade(log_probs, CASES[name].sums(reference)).metrics
    assert set(CASES[name].compared) == set(metrics) <= set(HIGHER_IS_BETTER)
    assert all(Comparison(metric).value(1.0, metrics) == metrics[metric] for metric in metrics)


def test_values_that_are_not_finite_are_the_worst():
    for metric in ("loss", "rewards/margins"):
        costs = [Comparison(metric).cost(x) for x in (None, np.nan, np.inf, -np.inf)]
        assert costs == [np.inf] * 4
    assert Comparison("kl").cost(1.0) < Comparison("kl").cost(2.0)
    assert Comparison("rewards/margins").cost(2.0) < Comparison("rewards/margins").cost(1.0)


def test_sft_is_the_mean_over_all_tokens(log_probs):
    graded = SFT().grade(log_probs)
    tokens = np.concatenate(log_probs)
    assert graded.loss == pytest.approx(-tokens.mean())
    np.testing.assert_allclose(np.concatenate(graded.slopes), -1 / len(tokens))


LABELLED = {
    "kto": KTO(BETA, desirable_weight=1.3, undesirable_weight=0.7),
    "apo": KTO(BETA, "apo_zero_unpaired", undesirable_weight=2.0),
}


def graded_answers(objective, labels, log_probs, reference):
    """The value of answers with these labels; with mismatched ones, every second one is such."""
    recorded = Recorded({}, {"label": np.repeat(labels, objective.members).astype(float)})
    return objective.grade(log_probs, objective.sums(reference), recorded)


@pytest.mark.parametrize("name", LABELLED)
def test_labelled_answers_can_be_compared_by_all_metrics(name, log_probs, reference):
    objective = LABELLED[name]
    labels = np.arange(len(log_probs) // objective.members) % 2
    metrics = graded_answers(objective, labels, log_probs, reference).metrics
    assert set(objective.compared) == set(metrics) <= set(HIGHER_IS_BETTER)


@pytest.mark.parametrize("name", LABELLED)
@pytest.mark.parametrize("mismatched", [3.0, -3.0])
def test_labelled_answers_are_pulled_from_the_reference(name, mismatched, log_probs, reference):
    objective = LABELLED[name]
    answers = range(0, len(LENGTHS), objective.members)
    labels = [i % 3 != 1 for i in range(len(answers))]
    if name == "kto":
        for i in range(1, len(LENGTHS), 2):
            log_probs[i][0] = reference[i].sum() - log_probs[i][1:].sum() + mismatched
    graded = graded_answers(objective, labels, log_probs, reference)
    z0 = max(0, mismatched) if name == "kto" else 0
    losses, rewards = [], {True: [], False: []}
    for i, label in zip(answers, labels, strict=True):
        x = log_probs[i].sum() - reference[i].sum()
        v = BETA * (x - z0) if label else BETA * (z0 - x)
        weight = objective.desirable_weight if label else objective.undesirable_weight
        losses.append(weight / (1 + np.exp(v)))
        rewards[label].append(BETA * x)
    assert graded.loss == pytest.approx(np.mean(losses), rel=1e-12)
    means = {label: np.mean(of_label) for label, of_label in rewards.items()}
    assert graded.metrics["rewards/chosen"] == pytest.approx(means[True])
    assert graded.metrics["rewards/margins"] == pytest.approx(means[True] - means[False])
    assert graded.metrics.get("kl", 0) == pytest.approx(z0, abs=1e-12)
    # z0 is a constant for the gradient.
    assert all((graded.slopes[i] == 0).all() for i in range(len(LENGTHS)) if i not in answers)
    for i in answers:
        for t, slope in enumerate(graded.slopes[i]):
            values = []
            for change in (1e-5, -1e-5):
                changed = [each.copy() for each in log_probs]
                changed[i][t] += change
                values.append(graded_answers(objective, labels, changed, reference).loss)
            assert slope == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", LABELLED)
def test_labelled_answers_may_be_improbable_but_not_unknown(name, log_probs, reference):
    objective = LABELLED[name]
    labels = np.arange(len(LENGTHS) // objective.members) % 2 == 0
    second = objective.members
    log_probs[second][0] = -np.inf
    graded = graded_answers(objective, labels, log_probs, reference)
    assert np.isfinite(graded.loss) and (graded.slopes[second] == 0).all()
    assert all(np.isfinite(of_sample).all() for of_sample in graded.slopes)
    for values in (log_probs, reference):
        ruined = [each.copy() for each in values]
        ruined[0][0] = -np.inf if values is reference else np.nan
        parts = (ruined, reference) if values is log_probs else (log_probs, ruined)
        assert np.isnan(graded_answers(objective, labels, *parts).loss)


def test_answers_of_one_label_have_no_margin(log_probs, reference):
    graded = graded_answers(LABELLED["kto"], [True] * 4, log_probs, reference)
    assert graded.metrics.keys() == {"kl", "rewards/chosen", "logps/chosen"}
    same = graded_answers(LABELLED["kto"], [True] * 4, log_probs, log_probs)
    assert same.metrics["kl"] == 0 and same.loss == pytest.approx(1.3 / 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DPO(0.0), "beta"),
        (lambda: DPO(float("nan")), "beta"),
        (lambda: DPO(loss="kto"), "loss"),
        (lambda: DPO(loss=()), "should name at least one of sigmoid"),
        (lambda: DPO(loss=("ipo", "ipo")), "names a type twice: ipo, ipo"),
        (lambda: DPO(loss=("ipo", "sft"), weights=(1.0,)), r"each loss type \(2\), found 1"),
        (lambda: DPO(loss="exo_pair"), "needs a label_smoothing above 0"),
        (lambda: DPO(label_smoothing=0.5), "label_smoothing"),
        (lambda: DPO(ld_alpha=1.5), "ld_alpha"),
        (lambda: DPO(f_divergence="kl"), "f_divergence"),
        (lambda: DPO(loss="aot", f_divergence="forward_kl"), "'aot' is not defined for f_diverg"),
        (lambda: DPO(loss="aot", use_weighting=True), "'aot' is not defined for use_weighting"),
        (lambda: DPO(discopop_tau=0.0), "discopop_tau"),
        (lambda: CPO(loss="simpo"), "loss"),
        (lambda: CPO(cpo_alpha=-1.0), "cpo_alpha"),
        (lambda: SimPO(beta=-2.0), "beta"),
        (lambda: ORPO(beta=0.0), "beta"),
        (lambda: KTO(loss="apo_zero"), "loss"),
        (lambda: KTO(undesirable_weight=-0.1), "undesirable_weight"),
    ],
)
def test_wrong_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_kinds_have_names_and_values_can_be_replaced():
    assert list(OBJECTIVES) == ["sft", "dpo", "kto", "cpo", "simpo", "orpo", "policy"]
    assert dataclasses.replace(DPO(), beta=0.2) == DPO(0.2)


@pytest.mark.parametrize("name", [name for name, x in CASES.items() if x.rule_of_pairs])
def test_devices_compute_the_losses_of_pairs(name, rng):
    """Beside a task of plain cross entropy, and a pair of another task that is not finite."""
    objective, width, vocab, row_len = CASES[name], 8, 31, 64
    batch = [
        Sample(rng.integers(1, vocab, n + 2).astype(np.int32), np.arange(n + 2) > 1, i)
        for i, n in enumerate(LENGTHS)
    ]
    begins = np.cumsum([0, *(sample.stream_length for sample in batch)]).tolist()
    places = [(0, i, 0, begins[i]) for i in range(6)]
    places += [(0, i, 1, 16 + begins[i] - begins[6]) for i in (6, 7)]
    places += [(1, 0, 1, 0), (2, 6, 1, 48), (2, 7, 1, 48 + batch[6].stream_length)]
    reference = objective.known([-rng.uniform(0.05, 3, n) for n in LENGTHS])
    of_tokens = objective.reference_of_tokens(LENGTHS, reference)
    for factors, of_answer, total in zip(
        objective._factors(LENGTHS), of_tokens, reference, strict=True
    ):
        assert (factors * of_answer.astype(np.float32)).sum() == pytest.approx(total, rel=2e-7)
    if not objective.needs_reference:
        reference, of_tokens = None, [np.zeros(n) for n in LENGTHS]
    terms = objective.terms(LENGTHS, None, of_tokens)
    microbatch = fill_microbatch(
        sorted(places, key=lambda place: place[2:]),
        {0: batch, 1: batch[:1], 2: batch},
        {0: terms, 2: terms},
        rows=2,
        row_len=row_len,
        chunk_len=16,
        max_pairs=4,
        paired=(0, 2),
    )
    assert microbatch.pair_spans[:, :3].tolist() == [
        *([[begins[i], begins[i + 2] - begins[i]] for i in (0, 2, 4)],),
        [[16, 5], [48, 5], [0, 0]],
    ]
    hidden, head = rng.normal(size=(2 * row_len, width)), rng.normal(size=(width, vocab))
    is_ruined = np.repeat(microbatch.chunk_slot == 2, 16)
    flat = microbatch.targets.ravel()
    logits = hidden @ head
    all_log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    at = {
        (slot, i): row * row_len + offset + 1 + np.arange(LENGTHS[i])
        for slot, i, row, offset in places
    }
    log_probs = [all_log_probs[at[0, i], flat[at[0, i]]] for i in range(8)]
    graded = objective.grade(log_probs, reference)

    arrays = jax.tree.map(jnp.asarray, microbatch)

    @jax.jit
    def sums_of(hidden):
        weights = {"lm_head": {"kernel": FrozenWeight.of(jnp.asarray(head, jnp.float32))}}
        of_tasks = {n: objective.rule_of_pairs for n in (0, 2)}
        rules = jax.tree.map(jnp.asarray, TokenRule.table(of_tasks, 3))
        return microbatch_losses(weights, hidden, jnp.ones(8, bool), arrays, rules=rules)

    ruined = np.where(is_ruined[:, None], np.nan, hidden).astype(np.float32)
    sums, pull = jax.vjp(sums_of, jnp.asarray(ruined))
    (found,) = pull(jnp.ones_like(sums))
    by_slot = [np.asarray(sums)[microbatch.chunk_slot == slot].sum(axis=0) for slot in range(3)]
    assert by_slot[0][0] == pytest.approx(graded.loss, rel=1e-5)
    metrics = objective.metrics(by_slot[0], sum(LENGTHS), len(LENGTHS), None)
    assert metrics == pytest.approx(graded.metrics, rel=1e-5, abs=1e-5)
    plain = all_log_probs[at[1, 0], flat[at[1, 0]]]
    assert by_slot[1][0] == pytest.approx(-plain.mean(), rel=1e-5)
    assert np.isnan(by_slot[2][0])
    weight = np.zeros(2 * row_len)
    for i, slopes in enumerate(graded.slopes):
        weight[at[0, i]] = -slopes
    weight[at[1, 0]] = 1 / LENGTHS[0]
    is_target = np.arange(vocab) == flat[:, None]
    expected = weight[:, None] * (np.exp(all_log_probs) - is_target) @ head.T
    np.testing.assert_allclose(found[~is_ruined], expected[~is_ruined], rtol=1e-4, atol=2e-6)
