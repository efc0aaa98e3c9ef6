"""Restraint on the few tokens whose covariance of log-prob and advantage drives the entropy down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlvr_pl.core.keyed import generator
from rlvr_pl.core.ratio import clean, importance_ratio, token_covariance
from rlvr_pl.core.weights import Aggregation
from rlvr_pl.objectives.clipped import Clipped
from rlvr_pl.objectives.grpo import GRPO
from rlvr_pl.objectives.ratio import Ratio
from rlvr_pl.objectives.terms import required

if TYPE_CHECKING:
    from torch import Tensor

    from rlvr_pl.types import RolloutBatch


class ClipCov(Clipped, GRPO):
    """``-sum_it min(u w, clip(u, 1 -+ 0.2) w)``, ``w = A_i/tokens``, w = 0 for a few tokens of high covariance.

    Clip-Cov (arXiv:2505.22617): of the tokens whose ``(l - mean l)(A - mean A)`` lies between `low` and `high`, a
    random `share` of all tokens lose their gradient. They are drawn once an update, by a key of seed and update, from
    the log-probs at sampling. A uniform group, an all-truncated batch under `mask_truncated` and an empty completion:
    loss exactly 0. A group of one: ValueError. Departs from supplied: the drawn tokens, the clip, the mean over tokens.

    Args:
        share: tokens to detach, as a share of the update's; at least one if any qualifies.
        low: least covariance that qualifies.
        high: greatest covariance that qualifies.
    """

    equation = "-sum_it min(u w, clip(u, 1-+eps) w),  w = A_i/tokens, 0 for drawn tokens of high covariance"

    def __init__(
        self,
        *,
        share: float = 2e-4,
        low: float = 1.0,
        high: float = 5.0,
        aggregation: Aggregation = "token-mean",
        **kwargs: Any,
    ) -> None:
        super().__init__(aggregation=aggregation, **kwargs)
        if not 0 <= share <= 1 or low >= high:
            raise ValueError(f"share={share} must lie between 0 and 1, low={low} below high={high}")
        self.share = share
        self.low = low
        self.high = high
        self.needs |= {"old_logprobs"}

    def token_weights(self, batch: RolloutBatch) -> Tensor:
        weights = super().token_weights(batch)
        covariance = _covariance(self, batch)
        rows, positions = ((covariance > self.low) & (covariance < self.high)).nonzero(as_tuple=True)
        found = list(zip(rows.tolist(), positions.tolist()))
        found.sort(key=lambda at: (batch.uids[at[0]], batch.samples[at[0]], at[1]))  # whatever the order of rows
        count = max(1, int(self.share * int(self.unmasked(batch).sum())))
        for i in generator("clip-cov", batch.seed, batch.update).permutation(len(found))[:count].tolist():
            weights[found[i]] = 0
        return weights


class KLCov(Ratio, GRPO):
    """``-sum_it (u w - beta f 1{t in the top 0.2% of covariance} |log u|)``, ``w = A_i f``, ``f = 1/tokens``.

    KL-Cov (arXiv:2505.22617): no clip; the tokens of greatest ``(l - mean l)(A - mean A)`` pay for leaving the policy
    that sampled. They are chosen once an update from the log-probs at sampling. On the first pass the penalty has no
    gradient, hence two passes by default. A uniform update, an all-truncated batch under `mask_truncated` and an empty
    completion: loss exactly 0; a uniform group may still be penalized. A group of one: ValueError. Departs from
    supplied: the penalty, the ratio, the mean over tokens.

    Args:
        share: tokens to penalize, as a share of the update's; at least one, and none whose covariance is not positive.
        coefficient: beta.
        inner_epochs: passes (optimizer steps) over one batch.
    """

    equation = "-sum_it (u w - beta f 1{top covariance} |log u|),  w = A_i f,  f = 1/tokens"

    def __init__(
        self,
        *,
        share: float = 2e-3,
        coefficient: float = 1.0,
        inner_epochs: int = 2,
        aggregation: Aggregation = "token-mean",
        **kwargs: Any,
    ) -> None:
        super().__init__(inner_epochs=inner_epochs, aggregation=aggregation, **kwargs)
        if not 0 <= share <= 1:
            raise ValueError(f"share={share} must lie between 0 and 1")
        self.share = share
        self.coefficient = coefficient
        self.needs |= {"old_logprobs"}

    def prepare(self, batch: RolloutBatch) -> Mapping[str, Tensor]:
        unmasked = self.unmasked(batch)
        count = max(1, int(self.share * int(unmasked.sum())))
        covariance = _covariance(self, batch).masked_fill(~unmasked, float("-inf"))
        top = covariance.flatten().topk(min(count, covariance.numel())).indices
        chosen = covariance.new_zeros(covariance.numel())
        chosen[top] = 1
        return {**super().prepare(batch), "penalized": chosen.view_as(covariance) * (covariance > 0)}

    def learned(self, weights: Tensor, batch: RolloutBatch) -> Tensor:
        return self.unmasked(batch)

    def surrogate(self, log_ratios: Tensor, logprobs: Tensor, weights: Tensor, batch: RolloutBatch) -> Tensor:
        penalty = self.coefficient * self.token_factor(batch) * batch.extras["penalized"] * log_ratios.abs()
        return importance_ratio(log_ratios, batch.mask, self.level) * weights - penalty

    @property
    def every_row(self) -> bool:
        return True


def _covariance(objective: GRPO, batch: RolloutBatch) -> Tensor:
    """[N, T] of the log-probs at sampling and the advantages, over the unmasked tokens."""
    unmasked = objective.unmasked(batch)
    advantage = objective.advantage(batch)[:, None].expand(batch.mask.shape)
    return token_covariance(clean(required(batch, "old_logprobs", objective), unmasked), advantage, unmasked)
