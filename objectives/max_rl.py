"""Maximum likelihood of success in place of expected success."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlvr_pl.core.advantage import max_rl_advantage
from rlvr_pl.objectives.policy_gradient import PolicyGradient

if TYPE_CHECKING:
    from torch import Tensor

    from rlvr_pl.types import RolloutBatch


class MaxRL(PolicyGradient):
    """``-1/N sum_i (r_i - mean)/mean sum_t log p_it`` over the group (MaxRL, arXiv:2602.02710).

    For rewards of 0 and 1 each success weighs 1/(successes of its group): the gradient of log pass@1, truncated at the
    group size, with the mean score as control variate. A uniform group: weights exactly 0. A group of one: ValueError.
    An all-truncated batch: as any other, or 0 under `mask_truncated`. An empty completion: no weights, but its reward
    counts in the mean. Departs from supplied: divides by the mean where supplied divides by the deviation.
    """

    equation = "-1/N sum_i (r_i - mean)/mean sum_t log p_it"
    shift_invariant = False

    def advantage(self, batch: RolloutBatch) -> Tensor:
        return max_rl_advantage(batch.rewards, batch.group_size)
