"""The bootstrap shared by every interval: how often each unit is drawn, and percentiles of the draws."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

_CHUNK = 2_000_000  # numbers held at once


def resample_counts(counts: Any, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """Draw `resamples` times ``sum(counts)`` units with replacement and say how many fall into each class.

    Units that are alike need not be told apart: a statistic that is a sum over units depends on these numbers alone,
    which follow a multinomial distribution. With ``counts = ones(n)`` every unit is a class of its own.

    Args:
        counts: [m] whole numbers, how many of the units belong to each class.
        resamples: number of draws R, at least 1.
        seed: names the draws.

    Yields:
        Arrays [r, m] of int64 with R rows in all, in pieces that fit in memory.
    """
    counts = np.asarray(counts, dtype=np.float64)
    total = int(counts.sum())
    if total < 1 or resamples < 1:
        raise ValueError(f"nothing to resample: {total} units, {resamples} resamples")
    generator = np.random.default_rng(seed)
    rows = max(1, _CHUNK // len(counts))
    for start in range(0, resamples, rows):
        yield generator.multinomial(total, counts / total, size=min(rows, resamples - start))


def resampled_means(values: Any, resamples: int, seed: int) -> np.ndarray:
    """Means [R, m] of `values` [n, m] over resampled rows."""
    values = np.asarray(values, dtype=np.float64)
    draws = [c @ values for c in resample_counts(np.ones(len(values)), resamples, seed)]
    return np.concatenate(draws) / len(values)


def interval(draws: Any, level: float = 0.95) -> tuple[float, float]:
    """The percentile interval of `draws` [R]."""
    tail = 50 * (1 - level)
    low, high = np.percentile(np.asarray(draws, dtype=np.float64), [tail, 100 - tail])
    return float(low), float(high)
