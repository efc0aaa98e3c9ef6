"""Rewards of several graders, each normalised by itself before they are summed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlvr_pl.core.advantage import decoupled_advantage
from rlvr_pl.objectives.policy_gradient import PolicyGradient

if TYPE_CHECKING:
    from torch import Tensor

    from rlvr_pl.types import RolloutBatch


class GDPO(PolicyGradient):
    """``-1/N sum_i A_i sum_t log p_it``, ``A = s/std(s)``, ``s_i = sum_k w_k (r_ik - mean_k)/std_k`` (GDPO,
    arXiv:2601.05242).

    For a `WeightedSum` of graders, whose weights it takes: rewards that differ in one part only do not drown in the
    spread of another. With a single grader the group's normalisation is followed by the update's. Deviations have
    1e-4 added. A group uniform in every part: weights exactly 0. A group of one: ValueError. An all-truncated batch: as
    any other, or 0 under `mask_truncated`. An empty completion: no weights, but its rewards count. Departs from
    supplied: the normalisation. For a clipped ratio: ``class ClippedGDPO(Clipped, GDPO): pass``.
    """

    equation = "-1/N sum_i A_i sum_t log p_it,  A = s/std(s),  s = sum_k w_k (r_k - mean_k)/std_k"

    def advantage(self, batch: RolloutBatch) -> Tensor:
        if batch.parts is None:
            return decoupled_advantage(batch.rewards[:, None], batch.rewards.new_ones(1), batch.group_size)
        return decoupled_advantage(batch.parts[..., 1], batch.parts[..., 0], batch.group_size)
