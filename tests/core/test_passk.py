"""pass@k against enumeration of every subset, and paired coverage on hand-made panels."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr_pl.core.passk import compare_coverage, mean_pass_at_k, pass_at_k


@pytest.mark.parametrize("n", range(1, 8))
def test_every_small_case_by_enumeration(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(combinations(range(n), k))  # samples 0..c-1 are the correct ones
            assert pass_at_k(n, c, k) == sum(min(s) < c for s in subsets) / len(subsets)


def test_known_cases() -> None:
    assert [pass_at_k(4, 1, 4), pass_at_k(4, 1, 2), pass_at_k(4, 0, 4), pass_at_k(64, 0, 64)] == [1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(("n", "c", "k"), [(2, 0, 5), (4, 5, 1), (4, -1, 1), (4, 1, 0), (0, 0, 1)])
def test_an_estimate_that_does_not_exist_is_an_error(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


@given(n=st.integers(1, 400), data=st.data())
def test_pass_at_1_is_the_rate_and_pass_grows_with_k(n: int, data: st.DataObject) -> None:
    c = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    assert pass_at_k(n, c, 1) == c / n
    assert pass_at_k(n, c, k) <= pass_at_k(n, c, min(n, k + 1)) <= 1.0
    assert (pass_at_k(n, c, n) == 1.0) == (c > 0)


def test_unbiased_for_a_known_rate() -> None:
    # p = .3: pass@4 = 1 - .7^4 = .7599. 20,000 draws of 16 samples; the estimate's sd is below .25, so its mean is
    # within 4 x .25 / sqrt(20000) = .007
    counts = [(16, int(c)) for c in np.random.default_rng(0).binomial(16, 0.3, 20_000)]
    assert np.mean([pass_at_k(n, c, 4) for n, c in counts]) == pytest.approx(1 - 0.7**4, abs=0.007)


def test_mean_over_questions_with_unequal_sample_counts() -> None:
    # pass@2: of 4 samples with 1 correct, 3 of 6 pairs hold it; both of 2 do; none of 8 do: mean (1/2 + 1 + 0)/3
    value, low, high = mean_pass_at_k([(4, 1), (2, 2), (8, 0)], 2)
    assert value == pytest.approx(50.0)
    assert 0 <= low <= value <= high <= 100


def test_paired_difference_by_hand() -> None:
    # pass@1 of A: 1/4, 0, 1; of B: 1/2, 0, 1/2 (2 samples): differences .25, 0, -.5, mean -1/12
    result = compare_coverage([(4, 1), (4, 0), (4, 4)], [(2, 1), (2, 0), (2, 1)], 1)
    assert (result.pass_a, result.pass_b) == pytest.approx((125 / 3, 100 / 3))
    assert result.delta_pp == pytest.approx(-25 / 3)
    assert result.ci_low == pytest.approx(-50) and result.ci_high == pytest.approx(
        25
    )  # all three draws one question: 1/27


def test_equal_policies_differ_by_nothing_exactly() -> None:
    counts = [(16, c) for c in range(17)]
    result = compare_coverage(counts, counts, 4)
    assert (result.delta_pp, result.ci_low, result.ci_high) == (0, 0, 0)


def test_other_questions_are_refused() -> None:
    with pytest.raises(ValueError):
        compare_coverage([(4, 1)], [(4, 1), (4, 2)], 1)
