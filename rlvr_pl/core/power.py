"""Power of a paired comparison of two checkpoints, planned from the discordance rate (the paper's section 4.2).

Two checkpoints disagree on a share ``p_d`` of the items; the accuracy difference then has standard error
``sqrt(p_d / n)``, and a two-sided normal test at level ``alpha`` the power computed here. Item uncertainty of one pair
only: the variance between training seeds comes on top.
"""

from __future__ import annotations

import math
from statistics import NormalDist

Z95 = 1.96
"""Two-sided 95% point of the normal distribution, at the precision with which the paper states its half-widths."""

_MOST_ITEMS = 10**15
_NORMAL = NormalDist()


def half_width(discordant: float, n: int | None = None) -> float:
    """95% half-width ``1.96 sqrt(D)`` of the net difference under the paired null, given D discordant items.

    Args:
        discordant: D >= 0, items on which the two checkpoints disagree (a mean over pairs need not be whole).
        n: items of the panel; with it the result is in percentage points of n, without it in items.

    Example:
        >>> round(half_width(49), 2), round(half_width(49, n=350), 2)
        (13.72, 3.92)
    """
    if not (math.isfinite(discordant) and discordant >= 0):
        raise ValueError(f"discordant must be a finite number >= 0, not {discordant}")
    items = Z95 * math.sqrt(discordant)
    if n is None:
        return items
    if n < 1 or discordant > n:
        raise ValueError(f"n = {n} must be at least 1 and at least the discordant items ({discordant})")
    return 100 * items / n


def standard_error(p_d: float, n: int) -> float:
    """``sqrt(p_d / n)``, the standard error of the accuracy difference (a fraction, not percentage points)."""
    _check(p_d, 0.0)
    if n < 1:
        raise ValueError(f"n must be at least 1, not {n}")
    return math.sqrt(p_d / n)


def power(p_d: float, n: int, delta: float, alpha: float = 0.05) -> float:
    """Chance that a two-sided level-`alpha` test finds a true difference of `delta` on `n` items.

    Args:
        p_d: discordance rate, in (0, 1].
        n: items, at least 1.
        delta: true accuracy difference as a fraction; its size cannot exceed `p_d`.
        alpha: level of the test, in (0, 1).

    Example:
        >>> round(power(p_d=0.2, n=350, delta=0.03), 2)
        0.24
    """
    _check(p_d, delta, alpha)
    shift = abs(delta) / standard_error(p_d, n)
    z = _NORMAL.inv_cdf(1 - alpha / 2)
    return _NORMAL.cdf(shift - z) + _NORMAL.cdf(-shift - z)


def sample_size(p_d: float, delta: float, power: float = 0.8, alpha: float = 0.05) -> int:
    """The smallest number of items at which `power(p_d, n, delta, alpha)` reaches the wanted `power`.

    Raises ValueError for ``delta = 0`` or a power outside (alpha, 1): no finite panel, or every panel, has it.

    >>> sample_size(p_d=0.2, delta=0.03)
    1745
    """
    _check(p_d, delta, alpha)
    if delta == 0:
        raise ValueError("delta must not be 0: no panel detects a difference of nothing")
    if not alpha < power < 1:
        raise ValueError(f"power must lie between alpha = {alpha} and 1, not {power}")
    low, high = 0, 1
    while _power(p_d, high, delta, alpha) < power:
        low, high = high, 2 * high
        if high > _MOST_ITEMS:
            raise ValueError(f"delta = {delta} needs more than {_MOST_ITEMS:.0e} items")
    while high - low > 1:
        middle = (low + high) // 2
        if _power(p_d, middle, delta, alpha) < power:
            low = middle
        else:
            high = middle
    return high


_power = power  # `sample_size` has an argument of that name


def _check(p_d: float, delta: float, alpha: float = 0.05) -> None:
    if not 0 < p_d <= 1:
        raise ValueError(f"p_d must lie in (0, 1], not {p_d}")
    if not abs(delta) <= p_d * (1 + 1e-9):
        raise ValueError(f"delta = {delta} cannot exceed the discordance rate p_d = {p_d}")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie in (0, 1), not {alpha}")
