"""The first-order decomposition by hand, its identities, and its intervals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr_pl.core.entropy_gradient import CLASSES, class_rates, cosine, effect, rollout_classes

# Two mixed groups and a uniform one. Slopes per token: -6 for right answers, -9 and -3 for wrong ones.
GROUPS = ["a", "a", "a", "b", "b", "u"]
ADVANTAGE = [1.0, 1.0, -2.0, 1.0, -1.0, 0.0]
LENGTHS = [10, 20, 40, 30, 50, 60]
TRUNCATED = [False, False, True, False, False, False]
SLOPES = [-60.0, -120.0, -120.0, -180.0, -450.0, 999.0]


def test_classes() -> None:
    assert rollout_classes([1, 1, -1, -1, 0], [False, True, False, True, True]).tolist() == [0, 0, 1, 2, -1]


def test_rates_by_hand() -> None:
    rates = class_rates(GROUPS, ADVANTAGE, LENGTHS, TRUNCATED, SLOPES)
    # positive: (60 + 120 + 180) / (10 + 20 + 30) = 6; EOS: 450 / 50 = 9; truncated: 2 x 120 / (2 x 40) = 3
    assert [rates[c].rate for c in CLASSES] == pytest.approx([-6, -9, -3])
    assert [rates[c].relative for c in CLASSES] == pytest.approx([1, 1.5, 0.5])
    assert [rates[c].mass for c in CLASSES] == [60, 50, 80]
    assert [rates[c].rollouts for c in CLASSES] == [3, 1, 1]
    assert rates["positive"].mean_tokens == 20 and rates["positive"].ci_low is None
    # within each group the ratio is the same, so that every resample that holds group b gives exactly 1.5
    assert (rates["negative_eos"].ci_low, rates["negative_eos"].ci_high) == pytest.approx((1.5, 1.5))


def test_a_class_without_rollouts_has_no_rate() -> None:
    rate = class_rates(["a", "a"], [1, -1], [10, 10], [False, False], [-60, -60])["negative_truncated"]
    assert (rate.rollouts, rate.mean_tokens, rate.rate, rate.relative, rate.ci_low) == (0, None, None, None, None)


def test_effect_by_hand() -> None:
    # supplied weights 1/6: contributions A_i s_i / 6 = -10, -20, 40, -30, 75, 0: positive -60, EOS 75, truncated 40
    contributions = [a * s / 6 for a, s in zip(ADVANTAGE, SLOPES)]
    found = effect(GROUPS, contributions, ADVANTAGE, TRUNCATED)
    assert found.slope == pytest.approx(55)
    assert [found.by_class[c] for c in CLASSES] == pytest.approx([-60, 75, 40])
    # groups contribute 10 and 45, and the uniform one is not resampled: two draws give 20, 55 or 90
    assert (found.ci_low, found.ci_high) == pytest.approx((20, 90))


def test_contributions_in_a_uniform_group_are_resampled_but_in_no_class() -> None:
    found = effect(["a", "a", "u"], [1.0, 2.0, 6.0], [1.0, -1.0, 0.0], [False] * 3)
    assert found.slope == pytest.approx(9) and sum(found.by_class.values()) == pytest.approx(3)
    assert (found.ci_low, found.ci_high) == pytest.approx((6, 12))


@given(st.integers(2, 12), st.integers(0, 2**32 - 1))
def test_classes_add_up_and_scale(groups: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    uids = [g for g in range(groups) for _ in range(4)]
    advantage = generator.choice([-1.0, 0.5, 1.5], 4 * groups)
    truncated = generator.random(4 * groups) < 0.3
    contributions = generator.normal(size=4 * groups)
    found = effect(uids, contributions, advantage, truncated, resamples=50)
    assert sum(found.by_class.values()) == pytest.approx(found.slope, abs=1e-12)  # sums of at most 48 numbers near 1
    double = effect(uids, 2 * contributions, advantage, truncated, resamples=50)
    assert (double.ci_low, double.ci_high) == pytest.approx((2 * found.ci_low, 2 * found.ci_high), abs=1e-12)


def test_cosine() -> None:
    assert cosine(6.0, 3.0, 4.0) == 0.5
    assert cosine(0.0, 0.0, 4.0) is None


def test_nothing_to_measure() -> None:
    with pytest.raises(ValueError, match="every group is uniform"):
        class_rates(["a", "a"], [0, 0], [1, 1], [False, False], [1, 1])
    with pytest.raises(ValueError, match="do not fit"):
        effect(["a"], [1.0, 2.0], [1.0, -1.0], [False, False])
