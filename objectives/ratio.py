"""The part that all ratio families share: the probability ratio, several passes, and what masks it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from rlvr_pl.core.choices import check_choice
from rlvr_pl.core.ratio import RatioLevel, clean, importance_ratio, log_ratio
from rlvr_pl.objectives.policy_gradient import PolicyGradient
from rlvr_pl.objectives.terms import OffPolicyMask

if TYPE_CHECKING:
    from torch import Tensor

    from rlvr_pl.types import RolloutBatch


Surrogate = TypeVar("Surrogate", bound=Callable[..., Any])


def on_ratios(surrogate: Surrogate) -> Surrogate:
    """Mark a `surrogate` that reads log-probs through its `log_ratios` alone, or as a plain factor. The mark is of the
    function: a subclass that overrides it says so again."""
    surrogate.on_ratios = True  # type: ignore[attr-defined]
    return surrogate


class Ratio(PolicyGradient):
    """``loss = -sum_it s(u_it, w_it)``, u the ratio of probabilities now and when sampled, s the family's surrogate.

    The surrogate works on the signed weights w = A * (factor >= 0), so that the sign of w is that of A. On the first
    pass over fresh rollouts u is 1 (with its gradient), unless the old log-probs were computed for another reason.
    Mix with the class that gives the advantage: ``class CISPO(Ratio, GRPO)``.

    Args:
        level: ratio of each "token"; of the "sequence" (the geometric mean over its tokens); or "sequence-token": the
            sequence's value with each token's own gradient.
        inner_epochs: passes (optimizer steps) over one batch.
        off_policy_mask: drops negative rollouts that the policy has moved away from, or none.
    """

    def __init__(
        self,
        *,
        level: RatioLevel = "token",
        inner_epochs: int = 1,
        off_policy_mask: OffPolicyMask | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_choice("level", level, RatioLevel)
        if inner_epochs < 1:
            raise ValueError(f"inner_epochs={inner_epochs} must be at least 1")
        self.level: RatioLevel = level
        self.inner_epochs = inner_epochs
        self.off_policy_mask = off_policy_mask
        if inner_epochs > 1:
            self.needs |= {"old_logprobs"}
        if off_policy_mask is not None:
            self.needs |= {off_policy_mask.needs}

    @abstractmethod
    def surrogate(self, log_ratios: Tensor, logprobs: Tensor, weights: Tensor, batch: RolloutBatch) -> Tensor:
        """[n, t] terms whose negated sum is the loss: clean inputs, and 0 where the weight is 0.

        Args:
            log_ratios: [n, t] log u of each token, whatever `level` is.
            logprobs: [n, t].
            weights: [n, t] signed.
            batch: the rows.
        """

    def learned(self, weights: Tensor, batch: RolloutBatch) -> Tensor:
        """[n, t] bool, the tokens whose log-probs the surrogate reads: those of rows with any weight."""
        return batch.mask & (weights != 0).any(1, keepdim=True)

    def loss(self, logprobs: Tensor, weights: Tensor, batch: RolloutBatch) -> Tensor:
        learned = self.learned(weights, batch)
        current = clean(logprobs, learned)
        if self.off_policy_mask is not None:
            weights = clean(weights, self.off_policy_mask.keep(current, weights, batch))
        log_ratios = log_ratio(current, batch.old_logprobs, learned)
        return -self.surrogate(log_ratios, current, weights, batch).sum() + self.penalties(logprobs, batch)

    @property
    def linear_on_first_pass(self) -> bool:
        """Every ratio is 1 there, so it is enough that the surrogate asks nothing else of the log-probs (`on_ratios`)
        and that nothing else of the loss reads them."""
        plain = type(self).loss is Ratio.loss and type(self).penalties is PolicyGradient.penalties
        mine = getattr(type(self).surrogate, "on_ratios", False)
        return plain and mine and not self.every_row and self.off_policy_mask is None

    def ratio(self, logprobs: Tensor, keep: Tensor, batch: RolloutBatch) -> Tensor:
        return importance_ratio(log_ratio(logprobs, batch.old_logprobs, keep), batch.mask, self.level)
