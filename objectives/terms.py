"""Small terms that any policy-gradient objective can carry: added to its loss, or factors of its weights.

Each is a frozen dataclass, so that a config or the command line builds it by its fields. Tensors are [n, t] over the
completion positions of some rows of an update; padding may hold anything, NaN included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rlvr_pl.core.choices import check_choice
from rlvr_pl.core.ratio import clean, per_sequence

if TYPE_CHECKING:
    from torch import Tensor

    from rlvr_pl.types import RolloutBatch

Estimator = Literal["k1", "k2", "k3"]
Level = Literal["token", "sequence"]
Mode = Literal["truncate", "mask"]


@dataclass(frozen=True)
class KLPenalty:
    """Adds ``coefficient * KL(policy || start policy)``, estimated at each sampled token, to the loss.

    Tokens are weighted by the objective's own aggregation; rollouts that `mask_truncated` masks are left out, those
    with advantage 0 are not. With x = log start - log policy (arXiv:2402.03300, eq. 4; Schulman 2020):

    Args:
        coefficient: beta, at least 0.
        estimator: "k1" -x (unbiased, signed), "k2" x^2/2 (biased, its gradient is that of the KL on policy),
            "k3" exp(x) - x - 1 (unbiased, at least 0).
        importance_weighted: multiply by the probability ratio u, which makes the gradient that of the KL itself.
            Without it the gradient of "k1" has mean zero and "k3" follows the reverse direction of the KL.
    """

    coefficient: float = 0.01
    estimator: Estimator = "k3"
    importance_weighted: bool = True

    def __post_init__(self) -> None:
        check_choice("estimator", self.estimator, Estimator)
        if not 0 <= self.coefficient < math.inf:
            raise ValueError(f"coefficient={self.coefficient}: must be at least 0 (it holds the policy to its start)")

    def loss(self, logprobs: Tensor, ratio: Tensor, factor: Tensor, batch: RolloutBatch) -> Tensor:
        """The sum over the rows. `factor` [n, t]: the weight of each token at advantage 1; `ratio` [n, t]: u."""
        active = factor != 0
        start = clean(required(batch, "start_logprobs", self), active)
        x = start - clean(logprobs, active)
        if self.estimator == "k1":
            kl = -x
        elif self.estimator == "k2":
            kl = x.square() / 2
        else:
            kl = x.exp() - x - 1
        return self.coefficient * (factor * (kl * ratio if self.importance_weighted else kl)).sum()


@dataclass(frozen=True)
class EntropyBonus:
    """Adds ``-coefficient * mean entropy`` over the unmasked tokens of the update to the loss.

    Args:
        coefficient: nats of loss for each nat of mean next-token entropy.
    """

    coefficient: float = 0.001

    def loss(self, share: Tensor, batch: RolloutBatch) -> Tensor:
        """The sum over the rows. `share` [n, t]: each token's part of the mean, summing to 1 over the update."""
        return -self.coefficient * (share * clean(required(batch, "entropy", self), share != 0)).sum()


@dataclass(frozen=True)
class MismatchCorrection:
    """Weights tokens by rho = (trainer's probability)/(sampler's), bounded: sampler and trainer disagree a little about
    the same weights (truncated and masked importance sampling, as in TRL).

    The sampler's log-probs are those of the distribution it sampled from, after temperature and top-p; the trainer's
    are of the full softmax. So with top-p below 1, or another training temperature, rho also holds that difference
    (at a token, the probability mass that top-p kept). A token whose sampler log-prob is missing (NaN) has rho 1.

    Args:
        level: "token", or "sequence": the product over the rollout.
        mode: "truncate" clamps rho to [low, high]; "mask" gives weight 0 outside.
        low: least rho, or none.
        high: greatest rho.
    """

    level: Level = "sequence"
    mode: Mode = "mask"
    low: float | None = None
    high: float = 3.0

    def __post_init__(self) -> None:
        check_choice("level", self.level, Level)
        check_choice("mode", self.mode, Mode)
        if not (self.low or 0) < self.high:
            raise ValueError(f"low={self.low} must lie below high={self.high}")

    def rho(self, batch: RolloutBatch) -> Tensor:
        """[n, t] or [n, 1]."""
        trainer, sampler = required(batch, "old_logprobs", self), required(batch, "sampling_logprobs", self)
        log_rho = clean((trainer - sampler).nan_to_num(nan=0.0), batch.mask)
        if self.level == "sequence":
            log_rho = log_rho.sum(1, keepdim=True)
        rho = log_rho.exp()
        if self.mode == "truncate":
            return rho.clamp(min=self.low, max=self.high)
        return rho.where((rho >= (self.low or 0)) & (rho <= self.high), 0)


@dataclass(frozen=True)
class OffPolicyMask:
    """Drops the negative weights of rollouts that the policy has moved away from (DeepSeek-V3.2, arXiv:2512.02556):
    those with ``mean over tokens of (behaviour log-prob - log-prob) > threshold``.

    Args:
        threshold: nats a token.
        behaviour: whose log-probs: "old" of the trainer before this update, or "sampler" as it reported them (NaN: 0).
    """

    threshold: float = 0.1
    behaviour: Literal["old", "sampler"] = "old"

    def __post_init__(self) -> None:
        check_choice("behaviour", self.behaviour, Literal["old", "sampler"])

    @property
    def needs(self) -> str:
        """The field of the batch that it reads."""
        return "old_logprobs" if self.behaviour == "old" else "sampling_logprobs"

    def keep(self, logprobs: Tensor, weights: Tensor, batch: RolloutBatch) -> Tensor:
        """[n, t] bool, False on the tokens to drop."""
        gap = clean((required(batch, self.needs, self) - logprobs.detach()).nan_to_num(nan=0.0), batch.mask)
        return (weights >= 0) | (per_sequence(gap, batch.mask) <= self.threshold)


def required(batch: RolloutBatch, name: str, user: object) -> Tensor:
    """The batch's tensor `name`; ValueError, naming who wants it, where it was not computed."""
    value = getattr(batch, name)
    if value is None:
        raise ValueError(f"{type(user).__name__} needs batch.{name}, which was not computed for this update")
    return value
