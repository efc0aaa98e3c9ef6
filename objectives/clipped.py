"""The clipped surrogate of PPO on group advantages: GRPO for several passes, DAPO, GSPO and their relatives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlvr_pl.core.ratio import RatioLevel, importance_ratio
from rlvr_pl.core.weights import Aggregation
from rlvr_pl.objectives.grpo import GRPO
from rlvr_pl.objectives.ratio import Ratio, on_ratios

if TYPE_CHECKING:
    from torch import Tensor

    from rlvr_pl.types import RolloutBatch


class Clipped(Ratio):
    """``s = min(min(u, delta) w, clip(u, 1 - clip_low, 1 + clip_high) w)`` (PPO, arXiv:1707.06347, eq. 7).

    Mix with the class that gives the advantage, as in ``class ClippedRLOO(Clipped, RLOO)``.

    Args:
        clip_low: how far below 1 the ratio still counts.
        clip_high: how far above 1; as `clip_low` if not given.
        delta: cap on the ratio where the clip does not act, at negative advantages (arXiv:2505.07291); none by default.
    """

    def __init__(
        self, *, clip_low: float = 0.2, clip_high: float | None = None, delta: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.clip_low = clip_low
        self.clip_high = clip_low if clip_high is None else clip_high
        self.delta = delta
        if min(self.clip_low, self.clip_high) < 0:
            raise ValueError(f"clip_low={clip_low}, clip_high={clip_high}: neither may be negative")
        if delta is not None and delta <= 0:
            raise ValueError(f"delta={delta} must be positive")

    @on_ratios
    def surrogate(self, log_ratios: Tensor, logprobs: Tensor, weights: Tensor, batch: RolloutBatch) -> Tensor:
        ratio = importance_ratio(log_ratios, batch.mask, self.level)
        free = ratio if self.delta is None else ratio.clamp(max=self.delta)
        return (free * weights).minimum(ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * weights)


class ClippedGRPO(Clipped, GRPO):
    """``-sum_it min(u w, clip(u, 1 -+ 0.2) w)``, ``w = A_i/(N |o_i|)``: GRPO as published (arXiv:2402.03300, eq. 3).

    A uniform group, an all-truncated batch under `mask_truncated` and an empty completion: loss exactly 0. A group of
    one: ValueError. Departs from supplied: the ratio and its clip, which act from the second pass on, and the mean
    over each rollout's tokens.
    """

    equation = "-sum_it min(u w, clip(u, 1-+eps) w),  w = A_i/(N |o_i|)"

    def __init__(self, *, aggregation: Aggregation = "sequence-mean", **kwargs: Any) -> None:
        super().__init__(aggregation=aggregation, **kwargs)


class BNPO(ClippedGRPO):
    """``-sum_it min(u w, clip(u, 1 -+ 0.2) w)``, ``w = A_i/(unmasked tokens of the update)``: TRL's "bnpo".

    TRL divides by the tokens of each micro-batch, this by those of the update, so that the split changes nothing. It
    is not the Beta normalization of arXiv:2506.02864. Edge cases as `ClippedGRPO`. Departs from supplied: the ratio
    and its clip, and the mean over tokens.
    """

    equation = "-sum_it min(u w, clip(u, 1-+eps) w),  w = A_i/tokens"

    def __init__(self, *, aggregation: Aggregation = "token-mean", **kwargs: Any) -> None:
        super().__init__(aggregation=aggregation, **kwargs)


class DAPO(BNPO):
    """``-sum_it min(u w, clip(u, 1 - 0.2, 1 + 0.28) w)``, ``w = A_i/tokens`` (DAPO, arXiv:2503.14476, eq. 8).

    Clip-higher, token-level mean, soft overlong punishment (eq. 13) and dynamic sampling. The punishment is added to
    the reward: 0 up to cap - buffer tokens, then falling linearly to -`overlong_penalty` at the cap. A batch without
    a cap has none. A uniform group has weight 0, unless its lengths are punished differently. Other edge cases as
    `ClippedGRPO`. Departs from supplied: all of this.

    Args:
        overlong_buffer: length of the punished stretch, as a share of the cap (the paper: 4096 of 20480). 0: none.
        overlong_penalty: the punishment at the cap, in units of reward.
        resample_rounds: how often groups of equal rewards are replaced by fresh questions in one update. 0: never.
    """

    equation = "-sum_it min(u w, clip(u, 1-.2, 1+.28) w),  w = A_i/tokens,  r += overlong punishment"

    def __init__(
        self,
        *,
        clip_low: float = 0.2,
        clip_high: float | None = 0.28,
        overlong_buffer: float = 0.2,
        overlong_penalty: float = 1.0,
        resample_rounds: int = 3,
        **kwargs: Any,
    ) -> None:
        super().__init__(clip_low=clip_low, clip_high=clip_high, **kwargs)
        if not 0 <= overlong_buffer <= 1:
            raise ValueError(f"overlong_buffer={overlong_buffer} must be a share of the cap, between 0 and 1")
        if resample_rounds < 0:
            raise ValueError(f"resample_rounds={resample_rounds} must be at least 0")
        self.overlong_buffer = overlong_buffer
        self.overlong_penalty = overlong_penalty
        self.resample_rounds = resample_rounds

    def rewards(self, batch: RolloutBatch) -> Tensor:
        buffer = self.overlong_buffer * batch.cap
        if buffer == 0:
            return batch.rewards
        overlong = (batch.lengths - (batch.cap - buffer)).clamp(min=0) / buffer
        return batch.rewards - self.overlong_penalty * overlong.clamp(max=1)


class GSPO(ClippedGRPO):
    """``-sum_i min(u_i, clip(u_i, 1 - 3e-4, 1 + 4e-4)) A_i/N``, ``u_i = exp(mean_t log u_it)``: sequence-level ratios.

    GSPO (arXiv:2507.18071, eqs. 5 and 7); ``level="sequence-token"`` is GSPO-token (eq. 13), which has the same
    gradient as long as all tokens of a rollout have the same advantage. Edge cases as `ClippedGRPO`. Departs from
    supplied: the ratio and its clip, and the mean over each rollout's tokens.
    """

    equation = "-1/N sum_i min(u_i A_i, clip(u_i, 1-3e-4, 1+4e-4) A_i),  u_i = exp(mean_t log u_it)"

    def __init__(
        self,
        *,
        level: RatioLevel = "sequence",
        clip_low: float = 3e-4,
        clip_high: float | None = 4e-4,
        **kwargs: Any,
    ) -> None:
        super().__init__(level=level, clip_low=clip_low, clip_high=clip_high, **kwargs)


class LUSPO(GSPO):
    """``-1/N sum_i |o_i| min(u_i A_i, clip(u_i, 1 - 3e-4, 1 + 4e-4) A_i)``: GSPO weighted by length (arXiv:2602.05261).

    Edge cases as `ClippedGRPO`. Departs from supplied: only in the ratio and its clip; on the first pass its gradient
    is the supplied one.
    """

    equation = "-1/N sum_i |o_i| min(u_i A_i, clip(u_i, 1-3e-4, 1+4e-4) A_i)"

    def __init__(self, *, aggregation: Aggregation = "token-sum", **kwargs: Any) -> None:
        super().__init__(aggregation=aggregation, **kwargs)
