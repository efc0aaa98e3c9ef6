"""REINFORCE with the length-weighted baseline of least variance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlvr_pl.core.advantage import length_weighted_advantage
from rlvr_pl.objectives.policy_gradient import PolicyGradient

if TYPE_CHECKING:
    from torch import Tensor

    from rlvr_pl.types import RolloutBatch


class OPO(PolicyGradient):
    """``-1/N sum_i (r_i - sum_j |o_j| r_j / sum_j |o_j|) sum_t log p_it`` over the group (OPO, arXiv:2505.23585).

    Strictly on policy: no ratio. A uniform group: weights exactly 0. A group of one: ValueError. An all-truncated
    batch: as any other, or 0 under `mask_truncated`. An empty completion: no weights, and no say in the baseline.
    Departs from supplied: the baseline, and no division by the deviation.
    """

    equation = "-1/N sum_i (r_i - length-weighted mean of r) sum_t log p_it"

    def advantage(self, batch: RolloutBatch) -> Tensor:
        return length_weighted_advantage(batch.rewards, batch.lengths, batch.group_size)
