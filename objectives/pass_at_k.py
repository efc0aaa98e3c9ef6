"""Pass@k of the group as the reward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlvr_pl.core.advantage import pass_at_k_advantage
from rlvr_pl.objectives.policy_gradient import PolicyGradient

if TYPE_CHECKING:
    from torch import Tensor

    from rlvr_pl.types import RolloutBatch


class PassAtK(PolicyGradient):
    """``-1/N sum_i A_i sum_t log p_it``, A the mean advantage over the k-subsets that hold i, rewarded by their best.

    Pass@k training by its closed form (arXiv:2508.10751); see `rlvr_pl.core.advantage.pass_at_k_advantage`. A reward
    above 1/2 is a success. A group that is all wrong, or has too few wrong ones to fail k times: weights exactly 0. A
    group of one, or smaller than k: ValueError. An all-truncated batch: as any other, or 0 under `mask_truncated`. An
    empty completion: no weights, but its reward counts. Departs from supplied: groups with many successes weigh less.

    Args:
        k: size of the subsets, from 1 (then A = (r - mean)/sqrt(mean (1 - mean))) to the group size.
    """

    equation = "-1/N sum_i A_i sum_t log p_it,  A = advantage of max reward over k-subsets of the group"
    shift_invariant = False

    def __init__(self, *, k: int = 4, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if k < 1:
            raise ValueError(f"k={k} must be at least 1")
        self.k = k

    def advantage(self, batch: RolloutBatch) -> Tensor:
        return pass_at_k_advantage(batch.rewards, batch.group_size, self.k)
