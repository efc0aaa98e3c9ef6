"""From the rewards of an update to one advantage a rollout.

Shapes: N rollouts in groups of `group_size` consecutive ones (the rollouts of one question). Results are FP64 [N].
A NaN reward is a rollout that could not be scored: it takes no part in any mean or deviation, and its advantage is 0.
A group whose rewards are all equal has advantage exactly 0 wherever the group's mean is the baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt
from typing import TYPE_CHECKING, Literal

from rlvr_pl.core.choices import check_choice

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    Vector = Sequence[float] | np.ndarray | Tensor

Scale = Literal["std", "none", "batch-std"]


def group_advantage(
    rewards: Vector, group_size: int, *, scale: Scale = "std", ddof: int = 1, eps: float = 1e-4
) -> Tensor:
    """``A_i = (r_i - mean of the group) / (deviation + eps)`` (GRPO, arXiv:2402.03300, section 4.1.2).

    Args:
        rewards: [N].
        group_size: rollouts of one question, at least 2.
        scale: the deviation: "std" of the group, "batch-std" of all rewards of the update, "none" for no division.
        ddof: 1 divides the sum of squares by n - 1 (as the supplied recipe and TRL do), 0 by n.
        eps: added to the deviation.

    Example:
        >>> group_advantage([1, 0, 0, 1], group_size=4, scale="none").tolist()
        [0.5, -0.5, -0.5, 0.5]
    """
    check_choice("scale", scale, Scale)
    groups = _groups(rewards, group_size, least=2)
    centred = _zero_if_uniform(groups - groups.nanmean(1, keepdim=True), groups)
    if scale == "std":
        centred = centred / (_nanstd(groups, ddof) + eps)
    elif scale == "batch-std":
        centred = centred / (_nanstd(groups.reshape(1, -1), ddof) + eps)
    return centred.nan_to_num(nan=0.0).flatten()


def decoupled_advantage(rewards: Tensor, weights: Tensor, group_size: int, *, eps: float = 1e-4) -> Tensor:
    """``A_i = s_i / (std of s + eps)``, ``s_i = sum_k w_k (r_ik - mean_k) / (std_k + eps)`` (GDPO, arXiv:2601.05242,
    section 3), where mean_k and std_k are those of reward k in the group, and the last deviation is that of the update.

    The paper also subtracts the update's mean of s, which is 0: every term is centred within its group.

    Args:
        rewards: [N, K] of K graders, NaN where one could not score.
        weights: [N, K], or a shape that broadcasts to it.
        group_size: rollouts of one question, at least 2.
        eps: added to the deviations, which divide by n - 1.
    """
    import torch

    columns = torch.stack([group_advantage(column, group_size, eps=eps) for column in rewards.T], dim=1)
    sums = (columns * weights).sum(1).where(rewards.isfinite().any(1), float("nan"))
    return (sums / (_nanstd(sums[None], 1) + eps)).nan_to_num(nan=0.0)[0]


def leave_one_out(rewards: Vector, group_size: int) -> Tensor:
    """``A_i = r_i - mean of the others' rewards`` (RLOO, arXiv:2402.14740, section 3.2); 0 for a group's only score.

    >>> leave_one_out([1, 0, 0], group_size=3).tolist()
    [1.0, -0.5, -0.5]
    """
    groups = _groups(rewards, group_size, least=2)
    others = groups.isfinite().double().sum(1, keepdim=True) - 1
    centred = _zero_if_uniform(groups - groups.nanmean(1, keepdim=True), groups)
    factor = (others + 1) / others.clamp(min=1)
    return (centred * factor).nan_to_num(nan=0.0).flatten()


def length_weighted_advantage(rewards: Vector, lengths: Vector, group_size: int) -> Tensor:
    """``A_i = r_i - sum_j |o_j| r_j / sum_j |o_j|`` over the group (OPO, arXiv:2505.23585, eq. 9).

    The baseline of least variance if a rollout's squared gradient norm grows with its length. A group of empty
    completions has advantage 0.
    """
    groups = _groups(rewards, group_size, least=2)
    sizes = _groups(lengths, group_size, least=2) * groups.isfinite()
    baseline = (groups.nan_to_num(nan=0.0) * sizes).sum(1, keepdim=True) / sizes.sum(1, keepdim=True)
    return _zero_if_uniform(groups - baseline, groups).nan_to_num(nan=0.0).flatten()


def max_rl_advantage(rewards: Vector, group_size: int) -> Tensor:
    """``A_i = (r_i - mean) / mean`` of the group, 0 where the mean is not positive (MaxRL, arXiv:2602.02710).

    Averaged over the group it is ``1/successes`` for each success minus ``1/group_size`` for every rollout: the
    gradient of the log of the success probability, truncated at the group size.
    """
    groups = _groups(rewards, group_size, least=2)
    mean = groups.nanmean(1, keepdim=True)
    centred = _zero_if_uniform(groups - mean, groups)
    return (centred / mean.where(mean > 0, float("inf"))).nan_to_num(nan=0.0).flatten()


def pass_at_k_advantage(rewards: Vector, group_size: int, k: int) -> Tensor:
    """The advantage of pass@k as the reward of every k-subset of the group (arXiv:2508.10751, section 2.4).

    With n rollouts of which w are wrong, R = 1 - C(w, k)/C(n, k) and s = sqrt(R (1 - R)): a correct rollout has
    ``(1 - R)/s``, a wrong one ``(1 - R - C(w-1, k-1)/C(n-1, k-1))/s``; 0 where s is 0. A reward above 1/2 is correct.
    Raises ValueError unless 1 <= k <= group_size.
    """
    if not 1 <= k <= group_size:
        raise ValueError(f"k={k} must lie between 1 and group_size={group_size}")
    groups = _groups(rewards, group_size, least=2)
    advantage = groups.new_zeros(groups.shape)
    for row, values in enumerate(groups.tolist()):
        scored = [r for r in values if r == r]
        n, wrong = len(scored), sum(r <= 0.5 for r in scored)
        solved = 1 - comb(wrong, k) / comb(n, k) if n >= k else 0.0
        spread = sqrt(solved * (1 - solved))
        if spread == 0:
            continue
        right = (1 - solved) / spread
        miss = (1 - solved - comb(wrong - 1, k - 1) / comb(n - 1, k - 1)) / spread if wrong else 0.0
        advantage[row] = groups.new_tensor([0.0 if r != r else right if r > 0.5 else miss for r in values])
    return advantage.flatten()


def group_centred(rewards: Vector, group_size: int) -> Tensor:
    """``r_i - mean of the group``, NaN where the reward is NaN (for a later `whiten`)."""
    groups = _groups(rewards, group_size, least=2)
    return _zero_if_uniform(groups - groups.nanmean(1, keepdim=True), groups).flatten()


def whiten(values: Vector, *, eps: float = 1e-8) -> Tensor:
    """``(x_i - mean) / (std + eps)`` over all N values, std with n - 1 (REINFORCE++, arXiv:2501.03262, eq. 9)."""
    batch = _as_float64(values)[None]
    centred = _zero_if_uniform(batch - batch.nanmean(1, keepdim=True), batch)
    return (centred / (_nanstd(batch, 1) + eps)).nan_to_num(nan=0.0)[0]


def _as_float64(values: Vector) -> Tensor:
    import torch

    return torch.as_tensor(values, dtype=torch.float64)


def _groups(values: Vector, group_size: int, *, least: int) -> Tensor:
    flat = _as_float64(values)
    if group_size < least:
        raise ValueError(f"group_size={group_size}: a baseline over the group needs group_size of at least {least}")
    if flat.dim() != 1 or len(flat) % group_size:
        raise ValueError(f"values of shape {tuple(flat.shape)} do not form groups of group_size={group_size}")
    return flat.view(-1, group_size)


def _zero_if_uniform(centred: Tensor, groups: Tensor) -> Tensor:
    """`centred` with exact zeros in the rows of `groups` that are all equal, whatever their mean was rounded to."""
    high = groups.nan_to_num(nan=float("-inf")).amax(1, keepdim=True)
    low = groups.nan_to_num(nan=float("inf")).amin(1, keepdim=True)
    return centred.where(high > low, centred * 0)


def _nanstd(groups: Tensor, ddof: int) -> Tensor:
    """[Q, 1] standard deviation of each row, NaN entries left out; NaN where fewer than ddof + 1 remain."""
    count = groups.isfinite().double().sum(1, keepdim=True)
    squares = (groups - groups.nanmean(1, keepdim=True)).square().nansum(1, keepdim=True)
    return (squares / (count - ddof).where(count > ddof, float("nan"))).sqrt()
