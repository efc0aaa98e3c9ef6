"""Two checkpoints on the same items: gains and losses, bootstrap intervals, McNemar's test, Holm's correction.

Item intervals are conditional on the checkpoints. `compare_seeds` adds training seeds as a second level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlvr_pl.core.bootstrap import interval, resample_counts


@dataclass(frozen=True, slots=True)
class PairedResult:
    """B against A on `n` items. `gained`: right in B only; `lost`: right in A only. Differences and the 95% interval
    are in percentage points of n, B minus A."""

    n: int
    gained: int
    lost: int
    delta_pp: float
    ci_low: float
    ci_high: float
    mcnemar_exact_p: float
    mcnemar_midp: float

    @property
    def discordant(self) -> int:
        """Items on which A and B disagree."""
        return self.gained + self.lost


@dataclass(frozen=True, slots=True)
class SeededResult:
    """Runs of B against runs of A, one a training seed, all on the same `n` items; percentage points, B minus A.

    `ci_low`, `ci_high`: seeds and items resampled. `item_ci_low`, `item_ci_high`: items only, the runs held fixed.
    `per_seed_pp`: difference of each pair of runs (empty when A and B differ in their number of seeds, both above
    one); `seed_sd_pp`: its standard deviation over seeds (ddof 1; None with fewer than two).
    """

    n: int
    seeds_a: int
    seeds_b: int
    delta_pp: float
    ci_low: float
    ci_high: float
    item_ci_low: float
    item_ci_high: float
    per_seed_pp: tuple[float, ...]
    seed_sd_pp: float | None


def compare(correct_a: Any, correct_b: Any, *, resamples: int = 4000, seed: int = 0) -> PairedResult:
    """Compare B with A item by item.

    Args:
        correct_a, correct_b: [n] booleans (or 0 and 1), item i of both is the same question.
        resamples: bootstrap resamples of the items.
        seed: names the bootstrap draws.

    Raises:
        ValueError: lengths differ, no items, or values other than 0 and 1.

    Example:
        >>> found = compare([1, 1, 0, 0], [1, 0, 1, 1])
        >>> found.gained, found.lost, found.delta_pp
        (2, 1, 25.0)
    """
    a, b = outcomes(correct_a), outcomes(correct_b)
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"A and B must be two vectors of one length, not of shapes {a.shape} and {b.shape}")
    return compare_counts(len(a), int((b & ~a).sum()), int((a & ~b).sum()), resamples=resamples, seed=seed)


def compare_counts(n: int, gained: int, lost: int, *, resamples: int = 4000, seed: int = 0) -> PairedResult:
    """`compare` from its sufficient statistics: an item resample is a multinomial draw over gained, lost and tied."""
    if min(n - 1, gained, lost, n - gained - lost) < 0:
        raise ValueError(f"{gained} gained and {lost} lost do not fit in {n} items")
    draws = np.concatenate(list(resample_counts([gained, lost, n - gained - lost], resamples, seed)))
    low, high = interval(100 * (draws[:, 0] - draws[:, 1]) / n)
    exact, mid = mcnemar(gained, lost)
    return PairedResult(n, gained, lost, 100 * (gained - lost) / n, low, high, exact, mid)


def mcnemar(gained: int, lost: int) -> tuple[float, float]:
    """Two-sided p-values of McNemar's test: exact binomial (one tail doubled, at most 1), and its mid-p variant, which
    counts the observed outcome half. Both are 1 when gains equal losses.
    """
    d, k = gained + lost, min(gained, lost)
    point = _binomial_half(d, k)
    if d - 2 * k <= 1:  # the tail up to k is at least half of the distribution
        return 1.0, 1.0 if d == 2 * k else 1.0 - point
    # P(X <= k) = point (1 + k/(d-k+1) + k(k-1)/((d-k+1)(d-k+2)) + ...): terms fall, since k < d/2
    tail, term = 0.0, 1.0
    for i in range(k, -1, -1):
        tail += term
        term *= i / (d - i + 1)
        if term < 1e-18 * tail:
            break
    return min(1.0, 2 * point * tail), min(1.0, 2 * point * tail - point)


def _binomial_half(d: int, k: int) -> float:
    """Chance of k heads in d fair tosses: exact integers rounded once; logarithms (relative error 1e-9) where the
    integers would be slow."""
    if d <= 20_000:
        return math.comb(d, k) / (1 << d)
    return math.exp(math.lgamma(d + 1) - math.lgamma(k + 1) - math.lgamma(d - k + 1) - d * math.log(2))


def compare_seeds(runs_a: Any, runs_b: Any, *, resamples: int = 4000, seed: int = 0) -> SeededResult:
    """Compare two groups of runs, with training seeds as a second level of the bootstrap.

    A resample draws training seeds with replacement, then one panel of items for all of them: the runs share their
    questions, so an item's difficulty does not average out over seeds (the pigeonhole bootstrap of Owen 2007,
    doi:10.1214/07-AOAS122). Equal numbers of runs are taken as pairs (run s of A and run s of B share a seed) and are
    drawn together; otherwise each side draws its own. One run has no seeds to draw: the interval is over items. With S
    seeds the variance between seeds is underestimated by the factor (S - 1)/S.

    Args:
        runs_a: [S_a, n] booleans, one row a run.
        runs_b: [S_b, n] booleans on the same items.
    """
    a, b = outcomes(runs_a), outcomes(runs_b)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or 0 in (len(a), len(b)):
        raise ValueError(f"A and B must be [runs, items] with the same items, not of shapes {a.shape} and {b.shape}")
    n = a.shape[1]
    paired = len(a) == len(b) or 1 in (len(a), len(b))
    generator = np.random.default_rng([seed, 1])
    seeds_b = _seed_weights(len(b), resamples, generator)
    seeds_a = seeds_b if len(a) == len(b) else _seed_weights(len(a), resamples, generator)
    # Items with the same outcomes in all runs are alike, so that only their number matters.
    patterns, counts = np.unique(np.concatenate([a, b]), axis=1, return_counts=True)
    per_run = np.concatenate([c @ patterns.T for c in resample_counts(counts, resamples, seed)]) / n  # [R, S_a + S_b]
    acc_a, acc_b = per_run[:, : len(a)], per_run[:, len(a) :]
    both = 100 * ((seeds_b * acc_b).sum(1) - (seeds_a * acc_a).sum(1))
    items = 100 * (acc_b.mean(1) - acc_a.mean(1))
    per_seed = 100 * (b.mean(1) - a.mean(1)) if paired else np.zeros(0)
    return SeededResult(
        n,
        len(a),
        len(b),
        100 * float(b.mean() - a.mean()),
        *interval(both),
        *interval(items),
        tuple(per_seed.tolist()),
        float(per_seed.std(ddof=1)) if len(per_seed) > 1 else None,
    )


def _seed_weights(runs: int, resamples: int, generator: np.random.Generator) -> np.ndarray:
    """[R, S] share of each run in a resample of the S runs."""
    return generator.multinomial(runs, np.full(runs, 1 / runs), size=resamples) / runs


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given: the i-th smallest of m is multiplied by m - i + 1, and
    none may be smaller than one before it. Controls the chance of any false claim among the m."""
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def outcomes(correct: Any) -> np.ndarray:
    """`correct` as a boolean array; ValueError when it holds anything but 0, 1, False, True."""
    array = np.asarray(correct)
    if array.dtype != bool:
        if array.size and not np.isin(array, (0, 1)).all():
            raise ValueError("outcomes must be booleans, or 0 and 1")
        array = array.astype(bool)
    if array.size == 0:
        raise ValueError("there are no items")
    return array
