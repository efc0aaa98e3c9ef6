"""REINFORCE with the other rollouts' mean as the baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlvr_pl.core.advantage import leave_one_out
from rlvr_pl.objectives.policy_gradient import PolicyGradient

if TYPE_CHECKING:
    from torch import Tensor

    from rlvr_pl.types import RolloutBatch


class RLOO(PolicyGradient):
    """``-1/N sum_i (r_i - mean of the others) sum_t log p_it`` (RLOO, arXiv:2402.14740, section 3).

    The unbiased policy gradient of the expected reward. A uniform group: weights exactly 0. A group of one: ValueError.
    An all-truncated batch: as any other, or 0 under `mask_truncated`. An empty completion: no weights, but its reward
    counts in the others' baseline. Departs from supplied: no division by the deviation (and the factor G/(G-1)).
    """

    equation = "-1/N sum_i (r_i - mean of the others) sum_t log p_it"

    def advantage(self, batch: RolloutBatch) -> Tensor:
        return leave_one_out(batch.rewards, batch.group_size)
