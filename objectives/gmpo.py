"""The geometric mean of a rollout's clipped ratios."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlvr_pl.core.ratio import per_sequence
from rlvr_pl.core.weights import Aggregation
from rlvr_pl.objectives.grpo import GRPO
from rlvr_pl.objectives.ratio import Ratio, on_ratios

if TYPE_CHECKING:
    from torch import Tensor

    from rlvr_pl.types import RolloutBatch


class GMPO(Ratio, GRPO):
    """``-1/N sum_i A_i exp(mean_t c_it)``, c the log-ratio clipped on the side that A pushes to (arXiv:2507.20673).

    ``c = min(log u, clip)`` where A > 0 and ``max(log u, -clip)`` where A < 0, so that the bound holds for each token
    and an outlier moves the mean of logs only a little. A uniform group, an all-truncated batch under
    `mask_truncated` and an empty completion: loss exactly 0. A group of one: ValueError. Departs from supplied: the
    geometric mean with its clip, and the mean over each rollout's tokens.

    Args:
        clip: bound on the log-ratio, in nats (the paper: ratios between exp(-0.4) and exp(0.4)).
    """

    equation = "-1/N sum_i A_i exp(mean_t c_it),  c = log u clipped at +-0.4 on the side of A"

    def __init__(self, *, clip: float = 0.4, aggregation: Aggregation = "sequence-mean", **kwargs: Any) -> None:
        super().__init__(aggregation=aggregation, **kwargs)
        if self.level != "token":
            raise ValueError(f"level={self.level!r}: GMPO clips tokens and always averages their logs")
        if clip <= 0:
            raise ValueError(f"clip={clip} must be positive")
        self.clip = clip

    @on_ratios
    def surrogate(self, log_ratios: Tensor, logprobs: Tensor, weights: Tensor, batch: RolloutBatch) -> Tensor:
        positive = weights.sum(1, keepdim=True) > 0
        clipped = log_ratios.clamp(max=self.clip).where(positive, log_ratios.clamp(min=-self.clip))
        return per_sequence(clipped, batch.mask).exp() * weights
