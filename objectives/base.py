"""The one idea: an objective gives every sampled token a signed weight, and the loss is ``-sum(weight * log_prob)``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from rlvr_pl.types import BranchRequest, RolloutBatch


class Objective(ABC):
    """Base class of every objective.

    An update calls, in this order and once each over the complete batch of all ranks: `requests`, then
    `token_weights`; then `loss` once per pass and micro-batch. Subclasses usually write `token_weights` alone.

    Attributes:
        equation: one line that `rlvr-pl objectives` prints.
        needs: what the update must compute beforehand, of ``{"old_logprobs", "start_logprobs", "sampling_logprobs",
            "entropy", "sampling_entropy"}``; each is then a field of the batch. With "entropy" the micro-batch given
            to `loss` carries the current pass's differentiable entropy.
        inner_epochs: passes (optimizer steps) over one batch; above 1 only for objectives with a probability ratio.
    """

    equation: ClassVar[str] = ""
    needs: frozenset[str] = frozenset()
    inner_epochs: int = 1

    def requests(self, batch: RolloutBatch) -> Sequence[BranchRequest]:
        """Continuations to sample before the weights are computed (they are charged to the run). None by default."""
        return ()

    @abstractmethod
    def token_weights(self, batch: RolloutBatch) -> Tensor:
        """Signed weights [N, T], already divided as the loss needs, 0 on padding. Pure: no sampling, no side effect."""

    def loss(self, logprobs: Tensor, weights: Tensor, batch: RolloutBatch) -> Tensor:
        """The loss of a micro-batch: a sum over its tokens, never a mean, so that any split gives the same gradient.

        Args:
            logprobs: [n, t] log-probs of the sampled tokens under the current weights.
            weights: [n, t] those rows of `token_weights`.
            batch: the rows, with `totals` of the whole update.
        """
        import torch

        return -(weights * torch.where(weights != 0, logprobs, 0)).sum()

    def metrics(self, batch: RolloutBatch, weights: Tensor) -> dict[str, float]:
        """Figures of its own to log for this update, such as ``{"fork/depth": 3.2}``."""
        return {}

    @property
    def linear(self) -> bool:
        """Whether the loss is the plain weighted sum: then zero-weight rows need no forward, and the gradient of the
        log-probs is known beforehand."""
        return type(self).loss is Objective.loss

    def state_dict(self) -> dict[str, Any]:
        """State that must survive a resume (plain numbers, lists, tensors). Empty by default."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
