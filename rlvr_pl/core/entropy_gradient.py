"""First-order effect of rollouts and objectives on the entropy H of fixed contexts (the paper's section 4.4, Table 5).

The slope of a rollout is ``s_i = <grad H, grad log p(o_i)>``: the change of H per unit step along the gradient of its
log-prob. A loss ``-sum_it w_it log p_it`` descends along ``d = sum_it w_it grad log p_it``, so that under SGD

    dH/d(eta) = <grad H, d> = sum_it w_it s_it

splits exactly into contributions of rollouts. Arrays are [N] over the measured rollouts; `groups` names the question of
each, and intervals resample groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlvr_pl.core.bootstrap import interval, resample_counts

CLASSES = ("positive", "negative_eos", "negative_truncated")


@dataclass(frozen=True, slots=True)
class ClassRate:
    """Effect per token of one class of rollouts.

    `mass`: sum of \\|A_i\\| \\|o_i\\|. `rate`: sum of \\|A_i\\| s_i over the mass, in nats per unit step and token.
    `relative`: rate over that of the positive class, with its 95% interval over groups. None where undefined.
    """

    rollouts: int
    mean_tokens: float | None
    mass: float
    rate: float | None
    relative: float | None
    ci_low: float | None
    ci_high: float | None


@dataclass(frozen=True, slots=True)
class Effect:
    """dH/d(eta) along one direction, its 95% interval over groups, and the part of each class."""

    slope: float
    ci_low: float
    ci_high: float
    by_class: dict[str, float]


def rollout_classes(advantage: Any, truncated: Any) -> np.ndarray:
    """[N] index into `CLASSES`, -1 where the advantage is 0. A truncated rollout of positive advantage is positive."""
    advantage, truncated = np.asarray(advantage, dtype=float), np.asarray(truncated, dtype=bool)
    return np.select([advantage > 0, (advantage < 0) & ~truncated, (advantage < 0) & truncated], [0, 1, 2], default=-1)


def class_rates(
    groups: Sequence[Any],
    advantage: Any,
    lengths: Any,
    truncated: Any,
    slopes: Any,
    *,
    resamples: int = 4000,
    seed: int = 0,
) -> dict[str, ClassRate]:
    """The per-token rate of each class (Table 5a).

    Args:
        groups: [N] question of each rollout; groups without any advantage take no part.
        advantage, lengths, truncated: [N].
        slopes: [N] s_i.

    Raises:
        ValueError: lengths of the arguments differ, or no rollout has an advantage.
    """
    advantage, lengths, slopes = (np.asarray(x, dtype=float) for x in (advantage, lengths, slopes))
    kinds = rollout_classes(advantage, truncated)
    index = _group_index(groups, advantage, lengths, kinds, slopes, active=advantage != 0)
    size = np.abs(advantage)
    # [G, classes, 2]: sums of |A| s and of |A| |o| in each group
    sums = np.zeros((index.max() + 1, len(CLASSES), 2))
    used = kinds >= 0
    np.add.at(sums, (index[used], kinds[used]), np.stack([size * slopes, size * lengths], 1)[used])
    sums = sums[sums.any((1, 2))]
    total = sums.sum(0)
    draws = np.concatenate(
        [np.tensordot(c, sums, (1, 0)) for c in resample_counts(np.ones(len(sums)), resamples, seed)]
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = total[:, 0] / total[:, 1]
        relative = rates / rates[0]
        drawn = draws[..., 0] / draws[..., 1]
        drawn = drawn / drawn[:, :1]
    result = {}
    for c, name in enumerate(CLASSES):
        mine = kinds == c
        ratios = drawn[np.isfinite(drawn[:, c]), c]
        low, high = interval(ratios) if c > 0 and len(ratios) else (None, None)
        result[name] = ClassRate(
            int(mine.sum()),
            float(lengths[mine].mean()) if mine.any() else None,
            float(total[c, 1]),
            _finite(rates[c]),
            _finite(relative[c]),
            low,
            high,
        )
    return result


def effect(
    groups: Sequence[Any],
    contributions: Any,
    advantage: Any,
    truncated: Any,
    *,
    resamples: int = 4000,
    seed: int = 0,
) -> Effect:
    """dH/d(eta) from the rollouts' contributions (Table 5b).

    Args:
        groups: [N] question of each rollout; resampled are those with an advantage or a contribution.
        contributions: [N] ``sum_t w_it s_it``, the weights divided as the loss needs.
        advantage, truncated: [N], for the classes. Contributions of rollouts without advantage are in no class.
    """
    contributions, advantage = np.asarray(contributions, dtype=float), np.asarray(advantage, dtype=float)
    kinds = rollout_classes(advantage, truncated)
    index = _group_index(groups, contributions, advantage, kinds, active=(advantage != 0) | (contributions != 0))
    sums = np.bincount(index[index >= 0], weights=contributions[index >= 0])
    draws = np.concatenate([c @ sums for c in resample_counts(np.ones(len(sums)), resamples, seed)])
    by_class = {name: float(contributions[kinds == c].sum()) for c, name in enumerate(CLASSES)}
    return Effect(float(contributions.sum()), *interval(draws), by_class)


def cosine(slope: float, gradient_norm: float, direction_norm: float) -> float | None:
    """cos(grad H, d) from ``dH/d(eta) = <grad H, d>`` and the two norms; None where one of them is 0."""
    product = gradient_norm * direction_norm
    return slope / product if product else None


def _group_index(groups: Sequence[Any], *arrays: np.ndarray, active: np.ndarray) -> np.ndarray:
    """[N] number of each rollout's group among the groups with an active rollout, -1 elsewhere."""
    if any(len(x) != len(groups) for x in arrays):
        raise ValueError(f"{len(groups)} groups do not fit arrays of lengths {[len(x) for x in arrays]}")
    numbers: dict[Any, int] = {}
    for group, on in zip(groups, active):
        if on:
            numbers.setdefault(group, len(numbers))
    if not numbers:
        raise ValueError("no rollout has an advantage: every group is uniform, and there is nothing to measure")
    return np.array([numbers.get(group, -1) for group in groups])


def _finite(x: float) -> float | None:
    return float(x) if np.isfinite(x) else None
