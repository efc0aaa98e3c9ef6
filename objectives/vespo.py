"""A smooth kernel on the whole sequence's ratio, without length normalization."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rlvr_pl.core.ratio import LOG_RATIO_BOUND
from rlvr_pl.core.weights import Aggregation
from rlvr_pl.objectives.grpo import GRPO
from rlvr_pl.objectives.ratio import Ratio, on_ratios

if TYPE_CHECKING:
    from torch import Tensor

    from rlvr_pl.types import RolloutBatch

_LOG_FLOOR = math.log(1e-8)


class VESPO(Ratio, GRPO):
    """``-sum_it sg(phi(W_i)) w log p_it``, ``phi(W) = W^k exp(lam (1 - W))``, ``W_i = prod_t u_it``.

    VESPO (arXiv:2602.10693), ``w = A_i/tokens``: phi(1) = 1, and (k, lam) depend on the sign of A. A mismatch
    correction enters as a factor of W, not of the loss. A uniform group, an all-truncated batch under `mask_truncated`
    and an empty completion: loss exactly 0. A group of one: ValueError. Departs from supplied: the kernel, and the
    mean over tokens.

    Args:
        k_positive: exponent where A > 0.
        lam_positive: decay where A > 0.
        k_negative: exponent where A < 0.
        lam_negative: decay where A < 0.
    """

    equation = "-sum_it sg(phi(W_i)) w log p_it,  phi(W) = W^k exp(lam (1-W)),  W_i = prod_t u_it,  w = A_i/tokens"

    def __init__(
        self,
        *,
        k_positive: float = 2.0,
        lam_positive: float = 3.0,
        k_negative: float = 3.0,
        lam_negative: float = 2.0,
        aggregation: Aggregation = "token-mean",
        **kwargs: Any,
    ) -> None:
        super().__init__(aggregation=aggregation, **kwargs)
        if self.level != "token":
            raise ValueError(f"level={self.level!r}: VESPO always multiplies the ratios of all tokens")
        if self.correction is not None and self.correction.level != "token":
            raise ValueError("VESPO takes a correction of level='token': it multiplies over the rollout itself")
        self.k_positive = k_positive
        self.lam_positive = lam_positive
        self.k_negative = k_negative
        self.lam_negative = lam_negative

    def correct(self, weights: Tensor, batch: RolloutBatch) -> Tensor:
        return weights

    @on_ratios
    def surrogate(self, log_ratios: Tensor, logprobs: Tensor, weights: Tensor, batch: RolloutBatch) -> Tensor:
        log_w = log_ratios.detach().sum(1, keepdim=True)
        if self.correction is not None:
            log_w = log_w + self.correction.rho(batch).log().clamp(_LOG_FLOOR, LOG_RATIO_BOUND).sum(1, keepdim=True)
        log_w = log_w.clamp(_LOG_FLOOR, LOG_RATIO_BOUND)
        positive = _log_kernel(log_w, self.k_positive, self.lam_positive)
        negative = _log_kernel(log_w, self.k_negative, self.lam_negative)
        return positive.where(weights > 0, negative).exp() * weights * logprobs


def _log_kernel(log_w: Tensor, k: float, lam: float) -> Tensor:
    return lam + k * log_w - lam * log_w.exp()
