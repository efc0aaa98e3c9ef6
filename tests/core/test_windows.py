"""Window statistics by hand-worked numbers, and against the package's own advantage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_pl.core.advantage import group_advantage
from rlvr_pl.core.windows import EPS, RolloutFacts, StepFacts, figures, plain_advantages, tally

NAN = float("nan")


def fact(group, reward, length, kind="eos", **more) -> RolloutFacts:
    return RolloutFacts(group, reward, reward == 1, length, kind != "eos", kind, **more)


# Group 0 is mixed: rewards 1, 0, 0, 0 -> mean 1/4, std (n - 1) = 1/2, A = 0.75/0.5001 and three times -0.25/0.5001.
# Group 1 is uniform. Lengths are chosen so that M- / M+ = 0.25 * (100 + 100 + 40) / (0.75 * 20) = 60 / 15 = 4.
UPDATE = [
    fact(0, 1.0, 20),
    fact(0, 0.0, 100, "truncated"),
    fact(0, 0.0, 100, "soup", detector="surprise"),
    fact(0, 0.0, 40),
    fact(1, 0.0, 100, "loop", detector="periodic-tail"),
    fact(1, 0.0, 30),
    fact(1, 0.0, 100, "soup", detector="incompressible"),
    fact(1, 0.0, 10),
]


def test_shares_and_lengths_of_one_update():
    f = figures([tally(UPDATE)])
    assert f["rollouts"] == 8
    assert f["reward"] == f["accuracy"] == 1 / 8
    assert (f["eos"], f["truncation"], f["loop"], f["soup"]) == (4 / 8, 4 / 8, 1 / 8, 2 / 8)
    assert f["soup_of_truncated"] == 2 / 4
    assert f["soup_by_surprise"] == 1 / 8
    assert f["length"] == 500 / 8
    assert f["length_correct"] == 20
    assert f["length_wrong"] == 480 / 7
    assert f["length_truncated"] == 100
    assert f["mixed_length_correct"] == 20
    assert f["mixed_length_wrong"] == 240 / 3
    assert f["mixed_length_truncated"] == 200 / 2
    assert f["uniform_groups"] == 1 / 2


def test_plain_mass_by_hand():
    f = figures([tally(UPDATE)])
    unit = 1 / (0.5 + EPS)
    assert f["plain_m_plus"] == pytest.approx(15 * unit, rel=1e-15)  # 0.75 * 20
    assert f["plain_m_minus"] == pytest.approx(60 * unit, rel=1e-15)  # 0.25 * 240
    assert f["plain_m_ratio"] == pytest.approx(4, rel=1e-15)
    assert f["plain_m_truncated"] == pytest.approx(200 / 240, rel=1e-15)
    assert f["sequence_ratio"] == pytest.approx(1, rel=1e-15)  # 3 * 0.25 / 0.75: advantages of a group sum to zero
    assert f["m_ratio"] is f["m_plus"] is None  # no weights known


def test_own_mass_under_masking():
    """Masking truncated rollouts leaves positive mass 0.75 * 20 = 15 against 0.25 * 40 = 10."""
    weight = {0: (15.0, 0.0), 3: (0.0, 10.0)}
    masked = [
        RolloutFacts(x.group, x.reward, x.correct, x.length, x.truncated, x.rollout_class, None, *weight.get(i, (0, 0)))
        for i, x in enumerate(UPDATE)
    ]
    f = figures([tally(masked)])
    assert (f["m_plus"], f["m_minus"]) == (15, 10)
    assert f["m_ratio"] == pytest.approx(2 / 3)
    assert f["m_truncated"] == 0
    assert f["plain_m_ratio"] == pytest.approx(4)
    assert f["sequence_ratio"] == pytest.approx(1 / 3)  # one of three negative rollouts carries weight


def test_a_window_pools_rollouts_instead_of_averaging_ratios():
    first = [fact(0, 1.0, 10), fact(0, 0.0, 30)]  # A = +-0.5/(sqrt(0.5) + EPS): M-/M+ = 3
    second = [fact(0, 1.0, 100), fact(0, 0.0, 100, "truncated")]  # M-/M+ = 1
    f = figures([tally(first), tally(second)])
    assert f["plain_m_ratio"] == pytest.approx(130 / 110, rel=1e-15)
    assert f["truncation"] == 1 / 4
    assert f["length_wrong"] == 65


def test_gradient_figures_are_over_updates_with_a_gradient():
    norms = [0.0, 2.0, 1.0, 4.0, 3.0, 0.5]
    steps = [StepFacts(g, g > 1, g / 10) for g in norms]
    f = figures([tally(UPDATE)] * 6, steps)
    assert (f["nonzero"], f["clipped"]) == (5, 3)
    assert f["grad_norm_median"] == 2.0
    # linear between order statistics: 5% of the way through 0.5, 1, 2, 3, 4 is 0.5 + 0.2 * 0.5; 95% is 3 + 0.8 * 1
    assert f["grad_norm_p5"] == pytest.approx(0.6)
    assert f["grad_norm_p95"] == pytest.approx(3.8)
    assert f["changed_share"] == pytest.approx(10.5 / 60)
    empty = figures([tally(UPDATE)], [StepFacts(0.0, False, 0.0)])
    assert empty["grad_norm_median"] is None and empty["nonzero"] == 0


def test_rollouts_without_a_score_leave_reward_and_advantage():
    """Rewards 1, NaN, 0, NaN: the mean is 0.5, not NaN (and not 0.25)."""
    facts = [fact(0, 1.0, 5), fact(0, NAN, 5), fact(0, 0.0, 5), fact(0, NAN, 5)]
    f = figures([tally(facts)])
    assert f["reward"] == 0.5
    assert plain_advantages(facts)[1] == plain_advantages(facts)[3] == 0
    assert all(value is None or math.isfinite(value) for value in f.values())


def test_empty_and_all_truncated_updates_are_finite():
    nothing = figures([tally([])])
    assert nothing["rollouts"] == 0 and nothing["reward"] is None and nothing["m_plus"] == 0
    cut = figures([tally([fact(0, 0.0, 7, "truncated", m_plus=0.0, m_minus=0.0)] * 4)])
    assert cut["truncation"] == 1 and cut["m_ratio"] is None and cut["length_correct"] is None


rewards = st.lists(st.sampled_from([0.0, 1.0, 0.5, NAN]), min_size=8, max_size=8)


@given(rewards)
@settings(deadline=None)
def test_plain_advantage_is_the_supplied_one(values):
    facts = [fact(i // 4, r, 10) for i, r in enumerate(values)]
    # a few FP64 operations on numbers of order 1: differences stay below 1e-12
    np.testing.assert_allclose(plain_advantages(facts), group_advantage(values, 4).numpy(), atol=1e-12)


@given(st.permutations(range(8)), rewards)
@settings(deadline=None)
def test_order_of_rollouts_does_not_matter(order, values):
    facts = [fact(i // 4, r, 10 + i, "truncated" if i % 3 == 0 else "eos") for i, r in enumerate(values)]
    one, two = figures([tally(facts)]), figures([tally([facts[i] for i in order])])
    for name, value in one.items():
        assert value == (None if two[name] is None else pytest.approx(two[name], rel=1e-12)), name
