"""Unbiased pass@k, and the paired comparison of two policies' coverage of the same questions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rlvr_pl.core.bootstrap import interval, resampled_means


@dataclass(frozen=True, slots=True)
class CoverageDelta:
    """pass@k of A and B in percent, and B minus A in percentage points with a 95% interval over questions."""

    k: int
    pass_a: float
    pass_b: float
    delta_pp: float
    ci_low: float
    ci_high: float


@lru_cache(maxsize=65536)
def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance ``1 - C(n-c, k)/C(n, k)`` that k of n samples, drawn without replacement, hold one of the c correct ones.

    The unbiased estimator of Chen et al., arXiv:2107.03374, equation 1, from exact integers.

    Raises:
        ValueError: unless ``1 <= k <= n`` and ``0 <= c <= n``. With fewer than k samples the estimate does not exist.

    Example:
        >>> round(pass_at_k(4, 1, 2), 12)  # 1 - C(3, 2) / C(4, 2)
        0.5
    """
    if not 0 <= c <= n:
        raise ValueError(f"c = {c} correct samples of n = {n}")
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {max(k, 1)} samples and k >= 1; there are n = {n}")
    ways = math.comb(n, k)
    return (ways - math.comb(n - c, k)) / ways


def pass_per_question(counts: Sequence[tuple[int, int]], k: int) -> np.ndarray:
    """[Q] pass@k of each question from its ``(n samples, c correct)``."""
    return np.array([pass_at_k(n, c, k) for n, c in counts])


def mean_pass_at_k(
    counts: Sequence[tuple[int, int]], k: int, *, resamples: int = 4000, seed: int = 0
) -> tuple[float, float, float]:
    """Mean pass@k over questions in percent, with its 95% interval from a bootstrap over questions."""
    values = 100 * pass_per_question(counts, k)
    low, high = interval(resampled_means(values[:, None], resamples, seed))
    return float(values.mean()), low, high


def compare_coverage(
    counts_a: Sequence[tuple[int, int]],
    counts_b: Sequence[tuple[int, int]],
    k: int,
    *,
    resamples: int = 4000,
    seed: int = 0,
) -> CoverageDelta:
    """pass@k of B minus A, paired by question; the numbers of samples may differ, between questions and policies.

    Args:
        counts_a, counts_b: ``(n samples, c correct)`` of each question, the same questions in the same order.
        k: at most the smallest number of samples.
    """
    if len(counts_a) != len(counts_b) or not counts_a:
        raise ValueError(f"A has {len(counts_a)} questions and B has {len(counts_b)}; they must be the same, and some")
    a, b = 100 * pass_per_question(counts_a, k), 100 * pass_per_question(counts_b, k)
    low, high = interval(resampled_means((b - a)[:, None], resamples, seed))
    return CoverageDelta(k, float(a.mean()), float(b.mean()), float((b - a).mean()), low, high)
