"""Paired comparison: the paper's rows, exact tests against enumeration, coverage of the intervals by simulation."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr_pl.core.paired import compare, compare_counts, compare_seeds, holm, mcnemar

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "paper_tables.json").read_text())
# Two rows of the paper's Table 1 beside those of the golden file: gained, lost, delta, interval.
ROWS = [(r["gained"], r["lost"], r["delta_pp"], r["ci"]) for r in GOLDEN["paired"]]
ROWS += [(18, 33, -4.3, [-8.3, -0.3]), (21, 35, -4.0, [-8.0, 0.3])]


def vectors(n: int, gained: int, lost: int, both: int) -> tuple[list[bool], list[bool]]:
    """Outcomes with the given counts; `both` items are right in A and in B."""
    a = [False] * gained + [True] * (lost + both) + [False] * (n - gained - lost - both)
    b = [True] * gained + [False] * lost + [True] * both + [False] * (n - gained - lost - both)
    return a, b


@pytest.mark.parametrize(("gained", "lost", "delta", "ci"), ROWS)
def test_the_papers_rows(gained: int, lost: int, delta: float, ci: list[float]) -> None:
    result = compare(*vectors(350, gained, lost, 154 - lost))
    assert (result.n, result.gained, result.lost) == (350, gained, lost)
    assert result.delta_pp == pytest.approx(100 * (gained - lost) / 350, abs=1e-12)
    assert round(result.delta_pp, 1) == delta
    # Both intervals are percentiles of 4,000 draws on a lattice of 100/350 = .29 pp, so an end may differ by one step,
    # and the paper's are rounded to .1: .29 + .05 < .4
    assert result.ci_low == pytest.approx(ci[0], abs=0.4)
    assert result.ci_high == pytest.approx(ci[1], abs=0.4)


def test_hand_worked_mcnemar() -> None:
    # 1 gained, 5 lost: P(X <= 1 | 6, 1/2) = (1 + 6)/64; doubled 14/64; less P(X = 1) = 6/64 gives 8/64
    assert mcnemar(1, 5) == (14 / 64, 8 / 64)
    assert mcnemar(5, 1) == mcnemar(1, 5)
    assert mcnemar(0, 0) == (1.0, 1.0)
    assert mcnemar(7, 7) == (1.0, 1.0)
    # 1 and 2 of 3: P(X <= 1) = 1/2, so exact 1; less 3/8 gives 5/8
    assert mcnemar(1, 2) == (1.0, 5 / 8)


@given(gained=st.integers(0, 60), lost=st.integers(0, 60))
def test_mcnemar_against_enumeration(gained: int, lost: int) -> None:
    d, k = gained + lost, min(gained, lost)
    below = sum(math.comb(d, i) for i in range(k))
    exact = min(1.0, 2 * (below + math.comb(d, k)) / 2**d)
    mid = min(1.0, (2 * below + math.comb(d, k)) / 2**d)
    assert mcnemar(gained, lost) == pytest.approx(
        (exact, mid), rel=1e-13
    )  # at most 61 positive terms, each within 1e-16


def test_mcnemar_beyond_exact_integers_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for gained, lost in [(10_100, 9_900), (12_000, 13_000), (300_000, 301_000), (0, 40_000)]:
        expected = min(1.0, 2 * stats.binom.cdf(min(gained, lost), gained + lost, 0.5))
        assert mcnemar(gained, lost)[0] == pytest.approx(expected, rel=1e-7, abs=1e-300)  # lgamma: 1e-16 x 1e7 nats


def test_same_seed_same_interval_and_swapped_sides_swap_signs() -> None:
    assert compare_counts(350, 31, 32, seed=3) == compare_counts(350, 31, 32, seed=3)
    forward, back = compare_counts(350, 14, 101), compare_counts(350, 101, 14)
    assert back.delta_pp == -forward.delta_pp
    assert back.mcnemar_exact_p == forward.mcnemar_exact_p


def test_identical_runs_have_a_zero_interval() -> None:
    a, _ = vectors(20, 0, 0, 9)
    result = compare(a, a)
    assert (result.delta_pp, result.ci_low, result.ci_high, result.mcnemar_midp) == (0, 0, 0, 1)


def test_lists_arrays_and_tensors_give_the_same() -> None:
    torch = pytest.importorskip("torch")
    a, b = vectors(50, 6, 3, 20)
    expected = compare(a, b)
    assert compare(np.array(a, dtype=np.int8), np.array(b, dtype=float)) == expected
    assert compare(torch.tensor(a), torch.tensor(b)) == expected


@pytest.mark.parametrize(
    ("a", "b"), [([True], [True, False]), ([], []), ([0, 2], [0, 1]), ([[1, 0]], [[1, 0]]), ([0.5, 1], [0, 1])]
)
def test_impossible_outcomes(a: list, b: list) -> None:
    with pytest.raises(ValueError):
        compare(a, b)


def simulated_coverage(panels: int, seed: int) -> float:
    """Share of panels (350 items, 11.5% gained, 8.5% lost, so that delta = 3 pp) whose interval covers the truth."""
    counts = np.random.default_rng(seed).multinomial(350, [0.115, 0.085, 0.8], size=panels)
    results = [compare_counts(350, int(g), int(x), seed=i) for i, (g, x, _) in enumerate(counts)]
    return sum(r.ci_low <= 3.0 <= r.ci_high for r in results) / panels


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    # 500 panels leave a standard error of 1%, so that the band is 1 to 1.5 of them; 1,000 others leave .7%
    assert 0.94 <= simulated_coverage(500, seed=0) <= 0.965
    assert 0.94 <= simulated_coverage(1000, seed=1) <= 0.965


def test_one_run_a_side_is_the_item_bootstrap() -> None:
    a, b = vectors(350, 40, 33, 121)
    seeded = compare_seeds([a], [b])
    assert (seeded.ci_low, seeded.ci_high) == (seeded.item_ci_low, seeded.item_ci_high)
    assert seeded.seed_sd_pp is None and seeded.per_seed_pp == pytest.approx((2.0,))
    plain = compare(a, b)
    # two bootstraps with different draws: an end moves by at most one lattice step of 100/350 pp
    assert seeded.ci_low == pytest.approx(plain.ci_low, abs=0.29)
    assert seeded.ci_high == pytest.approx(plain.ci_high, abs=0.29)


def test_seeds_that_reverse_sign_widen_the_interval() -> None:
    # seed 1: +7 of 100; seed 2: -11 of 100 (two sign-reversing seeds): mean -2, sd |7 + 11| / sqrt 2 = 12.73
    a = [vectors(100, 7, 0, 40)[0], vectors(100, 0, 11, 40)[0]]
    b = [vectors(100, 7, 0, 40)[1], vectors(100, 0, 11, 40)[1]]
    result = compare_seeds(a, b)
    assert result.per_seed_pp == pytest.approx((7.0, -11.0))
    assert result.delta_pp == pytest.approx(-2.0)
    assert result.seed_sd_pp == pytest.approx(18 / math.sqrt(2))
    assert result.ci_low < -10 < result.item_ci_low < result.item_ci_high < 6 < result.ci_high


def test_unequal_numbers_of_seeds() -> None:
    start, _ = vectors(100, 0, 0, 40)
    runs = [vectors(100, 7, 0, 40)[1], vectors(100, 0, 11, 29)[1]]
    one = compare_seeds([start], runs)
    assert (one.seeds_a, one.seeds_b) == (1, 2)
    assert one.per_seed_pp == pytest.approx((7.0, -11.0))
    three = compare_seeds([start, start, start], runs)
    assert three.per_seed_pp == () and three.seed_sd_pp is None
    assert three.delta_pp == pytest.approx(-2.0)


def test_item_intervals_miss_the_variance_between_seeds_and_crossed_ones_do_not() -> None:
    # 3 seeds whose true gains vary by 3 pp, on 350 shared items: 300 studies leave a standard error of 2% at most
    generator = np.random.default_rng(0)
    both = items = 0
    for study in range(300):
        difficulty = generator.beta(2, 2, 350) * 0.8 + 0.05
        effects = 0.03 + generator.normal(0, 0.03, 3)
        a = generator.random((3, 350)) < difficulty
        b = generator.random((3, 350)) < np.clip(difficulty + effects[:, None], 0, 1)
        result = compare_seeds(a, b, resamples=400, seed=study)
        both += result.ci_low <= 3.0 <= result.ci_high
        items += result.item_ci_low <= 3.0 <= result.item_ci_high
    assert both / 300 >= 0.93  # 95% less one standard error
    assert items / 300 <= 0.91  # 95% less two


def test_holm_by_hand() -> None:
    # sorted .01 .02 .04: 3 x .01 = .03; 2 x .02 = .04; 1 x .04 = .04, in the order given
    assert holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=6))
def test_holm_lies_between_raw_and_bonferroni_and_keeps_the_order(p: list[float]) -> None:
    adjusted = holm(p)
    assert all(x <= y <= min(1.0, len(p) * x) for x, y in zip(p, adjusted))
    assert all(adjusted[i] <= adjusted[j] for i in range(len(p)) for j in range(len(p)) if p[i] <= p[j])
