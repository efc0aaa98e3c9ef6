"""REINFORCE++: one normalization for the whole update in place of one for each group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlvr_pl.core.advantage import group_centred, whiten
from rlvr_pl.core.weights import Aggregation
from rlvr_pl.objectives.clipped import Clipped

if TYPE_CHECKING:
    from torch import Tensor

    from rlvr_pl.types import RolloutBatch


class ReinforcePlusPlus(Clipped):
    """``-sum_it min(u w, clip(u, 1 -+ 0.2) w)``, ``w = A_i/tokens``, ``A = (r - mean)/std`` over the update.

    REINFORCE++ (arXiv:2501.03262). Mean and deviation are over the rollouts of the update, so that groups of one
    will do. The paper takes its KL penalty into the reward; here `kl` is a term of the loss. A uniform update: loss
    exactly 0 (a uniform group is not special). An all-truncated batch under `mask_truncated` and an empty completion:
    0. Departs from supplied: the statistics, the clip, and the mean over tokens.
    """

    equation = "-sum_it min(u w, clip(u, 1-+eps) w),  w = A_i/tokens,  A = (r - mean)/std over the update"
    shift_invariant = False

    def __init__(self, *, aggregation: Aggregation = "token-mean", **kwargs: Any) -> None:
        super().__init__(aggregation=aggregation, **kwargs)

    def advantage(self, batch: RolloutBatch) -> Tensor:
        return whiten(batch.rewards)


class ReinforcePlusPlusBaseline(ReinforcePlusPlus):
    """REINFORCE++ with the group's mean as the baseline: ``A = (r - group mean)/std`` of that over the update.

    (arXiv:2501.03262, "w/ baseline"; the paper adds a k2 KL term.) A uniform group: weights 0 up to rounding, for the
    centred rewards of complete groups have mean 0. A group of one: ValueError. Otherwise as `ReinforcePlusPlus`.
    """

    equation = "-sum_it min(u w, clip(u, 1-+eps) w),  w = A_i/tokens,  A = (r - group mean)/std over the update"
    shift_invariant = True

    def advantage(self, batch: RolloutBatch) -> Tensor:
        return whiten(group_centred(batch.rewards, batch.group_size))
