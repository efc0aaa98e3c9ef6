"""A soft gate on the ratio in place of a clip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlvr_pl.core.ratio import importance_ratio
from rlvr_pl.core.weights import Aggregation
from rlvr_pl.objectives.grpo import GRPO
from rlvr_pl.objectives.ratio import Ratio, on_ratios

if TYPE_CHECKING:
    from torch import Tensor

    from rlvr_pl.types import RolloutBatch


class SAPO(Ratio, GRPO):
    """``-sum_it 4/tau sigmoid(tau (u - 1)) w``, ``w = A_i/(N |o_i|)``, tau by the sign of A (SAPO, arXiv:2511.20347).

    The gate's slope at u = 1 is 1, so the first pass has the gradient of the mean-normalized policy gradient. A
    uniform group, an all-truncated batch under `mask_truncated` and an empty completion: loss exactly 0. A group of
    one: ValueError. Departs from supplied: the gate, and the mean over each rollout's tokens.

    Args:
        tau_positive: sharpness of the gate where A > 0.
        tau_negative: sharpness where A < 0; greater, so that negative tokens fade sooner.
    """

    equation = "-sum_it 4/tau sigmoid(tau (u-1)) w,  w = A_i/(N |o_i|)"

    def __init__(
        self,
        *,
        tau_positive: float = 1.0,
        tau_negative: float = 1.05,
        aggregation: Aggregation = "sequence-mean",
        **kwargs: Any,
    ) -> None:
        super().__init__(aggregation=aggregation, **kwargs)
        if min(tau_positive, tau_negative) <= 0:
            raise ValueError(f"tau_positive={tau_positive}, tau_negative={tau_negative}: both must be positive")
        self.tau_positive = tau_positive
        self.tau_negative = tau_negative

    @on_ratios
    def surrogate(self, log_ratios: Tensor, logprobs: Tensor, weights: Tensor, batch: RolloutBatch) -> Tensor:
        ratio = importance_ratio(log_ratios, batch.mask, self.level)
        positive = (4 / self.tau_positive) * (self.tau_positive * (ratio - 1)).sigmoid()
        negative = (4 / self.tau_negative) * (self.tau_negative * (ratio - 1)).sigmoid()
        return positive.where(weights > 0, negative) * weights
