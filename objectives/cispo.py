"""Clipped importance weights on a log-prob loss: no token loses its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlvr_pl.core.ratio import importance_ratio
from rlvr_pl.core.weights import Aggregation
from rlvr_pl.objectives.grpo import GRPO
from rlvr_pl.objectives.ratio import Ratio, on_ratios

if TYPE_CHECKING:
    from torch import Tensor

    from rlvr_pl.types import RolloutBatch


class CISPO(Ratio, GRPO):
    """``-sum_it sg(min(u_it, cap)) w_it log p_it``, ``w = A_i/tokens`` (MiniMax-M1, arXiv:2506.13585, eq. 4).

    A uniform group, an all-truncated batch under `mask_truncated` and an empty completion: loss exactly 0. A group of
    one: ValueError. Departs from supplied: the capped ratio, and the mean over tokens.

    Args:
        cap: greatest weight, absolute. Papers that write it 1 + eps_high mean ``cap = 1 + eps_high``; TRL's
            `epsilon_high` is the cap itself. Below 1 it also scales down tokens on policy.
    """

    equation = "-sum_it sg(min(u, cap)) w log p_it,  w = A_i/tokens"

    def __init__(self, *, cap: float = 5.0, aggregation: Aggregation = "token-mean", **kwargs: Any) -> None:
        super().__init__(aggregation=aggregation, **kwargs)
        if cap <= 0:
            raise ValueError(f"cap={cap} must be positive")
        self.cap = cap

    @on_ratios
    def surrogate(self, log_ratios: Tensor, logprobs: Tensor, weights: Tensor, batch: RolloutBatch) -> Tensor:
        ratio = importance_ratio(log_ratios, batch.mask, self.level).detach()
        return ratio.clamp(max=self.cap) * weights * logprobs
