"""REINFORCE without a baseline, its positive and negative samples weighted apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlvr_pl.objectives.policy_gradient import PolicyGradient

if TYPE_CHECKING:
    from torch import Tensor

    from rlvr_pl.types import RolloutBatch


class SignedReinforce(PolicyGradient):
    """``-1/N sum_i s_i sum_t log p_it``, s = +positive_weight for a success, -negative_weight otherwise.

    Reinforcement of the correct and penalization of the wrong samples (arXiv:2506.01347); a reward above 1/2 is a
    success. No statistics of the group: a uniform group and a group of one are as any other. An all-truncated batch:
    as any other, or 0 under `mask_truncated`. An empty completion: no weights. Departs from supplied: no baseline.
    """

    equation = "-1/N sum_i s_i sum_t log p_it,  s = +positive_weight if correct else -negative_weight"
    shift_invariant = False

    def advantage(self, batch: RolloutBatch) -> Tensor:
        sign = (batch.rewards > 0.5).double() * 2 - 1
        return sign.where(~batch.rewards.isnan(), 0)


class PSR(SignedReinforce):
    """``-1/N sum_{i correct} sum_t log p_it``: positive samples only. Otherwise as `SignedReinforce`."""

    equation = "-1/N sum_{i correct} sum_t log p_it"

    def __init__(self, *, positive_weight: float = 1.0, negative_weight: float = 0.0, **kwargs: Any) -> None:
        super().__init__(positive_weight=positive_weight, negative_weight=negative_weight, **kwargs)


class NSR(SignedReinforce):
    """``+1/N sum_{i wrong} sum_t log p_it``: negative samples only. Otherwise as `SignedReinforce`."""

    equation = "+1/N sum_{i wrong} sum_t log p_it"

    def __init__(self, *, positive_weight: float = 0.0, negative_weight: float = 1.0, **kwargs: Any) -> None:
        super().__init__(positive_weight=positive_weight, negative_weight=negative_weight, **kwargs)


class WeightedReinforce(SignedReinforce):
    """``-1/N (0.1 sum_{i correct} - sum_{i wrong}) sum_t log p_it``: W-REINFORCE. Otherwise as `SignedReinforce`."""

    equation = "-1/N (0.1 sum_{i correct} - sum_{i wrong}) sum_t log p_it"

    def __init__(self, *, positive_weight: float = 0.1, negative_weight: float = 1.0, **kwargs: Any) -> None:
        super().__init__(positive_weight=positive_weight, negative_weight=negative_weight, **kwargs)
