"""What all policy-gradient families share: advantage -> signed token weights -> loss, with the same few knobs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlvr_pl.core.choices import check_choice
from rlvr_pl.core.ratio import clean, importance_ratio, log_ratio, top_share
from rlvr_pl.core.weights import Aggregation, token_factor, unmasked_tokens
from rlvr_pl.objectives.base import Objective
from rlvr_pl.objectives.terms import EntropyBonus, KLPenalty, MismatchCorrection, required

if TYPE_CHECKING:
    from torch import Tensor

    from rlvr_pl.types import RolloutBatch


class PolicyGradient(Objective):
    """``loss = -sum_it w_it log p_it`` with ``w_it = A_i * (aggregation) * [entropy mask] * [mismatch correction]``.

    Subclasses give the advantage A [N]; ratio families also replace the loss. A rollout with advantage 0, an empty
    completion and a masked rollout have weight 0, so an update of uniform groups or of masked rollouts alone has loss
    exactly 0 with zero gradient (KL and entropy terms aside).

    Args:
        aggregation: "token-sum" (supplied), "sequence-mean", "token-mean" or "constant": see `token_weights`.
        constant: tokens by which "constant" divides; the cap on a completion if not given.
        mask_truncated: weight 0 for rollouts that hit the cap; they keep their place in the group's statistics.
        positive_weight: factor on positive advantages.
        negative_weight: factor on negative advantages.
        entropy_top: share of the unmasked tokens, those of highest entropy, that are learned from (arXiv:2506.01939);
            the denominators keep all tokens. 1: all.
        correction: sampler/trainer mismatch correction, or none.
        kl: penalty on leaving the start policy, or none.
        entropy_bonus: reward for entropy (of the tokens that `entropy_top` keeps), or none.
    """

    shift_invariant = True

    def __init__(
        self,
        *,
        aggregation: Aggregation = "token-sum",
        constant: float | None = None,
        mask_truncated: bool = False,
        positive_weight: float = 1.0,
        negative_weight: float = 1.0,
        entropy_top: float = 1.0,
        correction: MismatchCorrection | None = None,
        kl: KLPenalty | None = None,
        entropy_bonus: EntropyBonus | None = None,
    ) -> None:
        check_choice("aggregation", aggregation, Aggregation)
        if not 0 <= entropy_top <= 1:
            raise ValueError(f"entropy_top={entropy_top} must be a share between 0 and 1")
        if constant is not None and constant <= 0:
            raise ValueError(f"constant={constant} must be a positive number of tokens")
        if min(positive_weight, negative_weight) < 0:
            raise ValueError(f"positive_weight={positive_weight}, negative_weight={negative_weight}: at least 0 each")
        self.aggregation: Aggregation = aggregation
        self.constant = constant
        self.mask_truncated = mask_truncated
        self.positive_weight = positive_weight
        self.negative_weight = negative_weight
        self.entropy_top = entropy_top
        self.correction = correction
        self.kl = kl
        self.entropy_bonus = entropy_bonus
        wants = {
            "entropy": entropy_top < 1 or entropy_bonus is not None,
            "old_logprobs": correction is not None,
            "sampling_logprobs": correction is not None,
            "start_logprobs": kl is not None,
        }
        self.needs = frozenset(name for name, wanted in wants.items() if wanted)

    @abstractmethod
    def advantage(self, batch: RolloutBatch) -> Tensor:
        """[N] FP64 advantages of the complete batch, 0 where the reward is NaN."""

    def token_factor(self, batch: RolloutBatch) -> Tensor:
        """[n, t] each token's weight at advantage 1; the rows may be any micro-batch."""
        return token_factor(
            batch.mask,
            batch.truncated,
            batch.totals,
            aggregation=self.aggregation,
            mask_truncated=self.mask_truncated,
            constant=self.constant or batch.cap,
        )

    def token_weights(self, batch: RolloutBatch) -> Tensor:
        advantage = self.advantage(batch)
        advantage = advantage.clamp(min=0) * self.positive_weight + advantage.clamp(max=0) * self.negative_weight
        weights = advantage[:, None] * self.token_factor(batch)
        if self.entropy_top < 1:
            weights = clean(weights, self._high_entropy(batch))
        return self.correct(weights, batch)

    def correct(self, weights: Tensor, batch: RolloutBatch) -> Tensor:
        """`weights` times the mismatch correction, if any."""
        return weights if self.correction is None else weights * self.correction.rho(batch)

    def prepare(self, batch: RolloutBatch) -> Mapping[str, Tensor]:
        if self.entropy_bonus is None or self.entropy_top == 1:
            return {}
        kept = self._high_entropy(batch).double()
        return {"entropy_share": kept / kept.sum().clamp(min=1)}

    def loss(self, logprobs: Tensor, weights: Tensor, batch: RolloutBatch) -> Tensor:
        return super().loss(logprobs, weights, batch) + self.penalties(logprobs, batch)

    def penalties(self, logprobs: Tensor, batch: RolloutBatch) -> Tensor | float:
        """The KL and entropy terms of the rows, 0 without any."""
        total = 0.0
        if self.kl is not None:
            factor = self.token_factor(batch)
            total = total + self.kl.loss(logprobs, self.ratio(logprobs, factor != 0, batch), factor, batch)
        if self.entropy_bonus is not None:
            total = total + self.entropy_bonus.loss(self._entropy_share(batch), batch)
        return total

    def ratio(self, logprobs: Tensor, keep: Tensor, batch: RolloutBatch) -> Tensor:
        """[n, t] probability ratio to the policy that sampled, on the rows and tokens of `keep`."""
        return importance_ratio(log_ratio(logprobs, batch.old_logprobs, keep), batch.mask)

    def metrics(self, batch: RolloutBatch, weights: Tensor) -> dict[str, float]:
        """The bounded mismatch ratio, and the least entropy that is learned from, where they are in use."""
        result = {}
        if self.correction is not None:
            counted = batch.mask if self.correction.level == "token" else batch.mask.any(1, keepdim=True)
            rho = self.correction.rho(batch)[counted]
            if rho.numel():
                result = {"mismatch/rho_min": rho.min(), "mismatch/rho_mean": rho.mean(), "mismatch/rho_max": rho.max()}
        if self.entropy_top < 1:
            kept = required(batch, "entropy", self)[self._high_entropy(batch)]
            if kept.numel():
                result["entropy_top/threshold"] = kept.min()
        return {name: float(value) for name, value in result.items()}

    @property
    def linear(self) -> bool:
        return type(self).loss is PolicyGradient.loss and not self.every_row

    @property
    def every_row(self) -> bool:
        return self.kl is not None or self.entropy_bonus is not None

    def unmasked(self, batch: RolloutBatch) -> Tensor:
        """[n, t] bool, the tokens that take part in the loss."""
        return batch.mask & ~batch.truncated[:, None] if self.mask_truncated else batch.mask

    def _high_entropy(self, batch: RolloutBatch) -> Tensor:
        return top_share(required(batch, "entropy", self), self.unmasked(batch), self.entropy_top)

    def _entropy_share(self, batch: RolloutBatch) -> Tensor:
        if self.entropy_top < 1:
            return batch.extras["entropy_share"]
        return self.unmasked(batch).double() / max(unmasked_tokens(batch.totals, self.mask_truncated), 1)
