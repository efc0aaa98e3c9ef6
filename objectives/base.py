"""The one idea: an objective gives every sampled token a signed weight, and the loss is ``-sum(weight * log_prob)``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from rlvr_pl.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from rlvr_pl.types import BranchRequest, RolloutBatch


class Objective(ABC):
    """Base class of every objective.

    An update calls, in this order and once each over the complete batch of all ranks: `requests`, `prepare`, then
    `token_weights`; then `loss` once per pass and micro-batch. Subclasses usually write `token_weights` alone.

    Attributes:
        equation: one line that `rlvr-pl objectives` prints.
        needs: what the update must compute beforehand, of ``{"old_logprobs", "start_logprobs", "sampling_logprobs",
            "entropy", "sampling_entropy"}``; each is then a field of the batch. With "entropy" the micro-batch given
            to `loss` carries the current pass's differentiable entropy.
        inner_epochs: passes (optimizer steps) over one batch; above 1 only for objectives with a probability ratio.
        samples: False for an objective that learns from stored solutions: nothing is sampled or graded for it.
        resample_rounds: how often the update may replace groups whose rewards are all equal by fresh questions
            (DAPO's dynamic sampling). 0: never.
        shift_invariant: whether adding a constant to all rewards of a group changes nothing.

    Example:
        >>> from rlvr_pl.core.advantage import leave_one_out
        >>> class LeaveOneOut(Objective):
        ...     equation = "-1/N sum_i (r_i - mean of the others) sum_t log p_it"
        ...
        ...     def token_weights(self, batch):
        ...         advantage = leave_one_out(batch.rewards, batch.group_size)  # [N]
        ...         return advantage[:, None] * batch.mask / batch.totals.rollouts  # [N, T]
        >>> LeaveOneOut().linear
        True
    """

    equation: ClassVar[str] = ""
    needs: frozenset[str] = frozenset()
    inner_epochs: int = 1
    samples: ClassVar[bool] = True
    resample_rounds: int = 0
    shift_invariant: bool = False

    def requests(self, batch: RolloutBatch) -> Sequence[BranchRequest]:
        """Continuations to sample before the weights are computed (they are charged to the run). None by default."""
        return ()

    def prepare(self, batch: RolloutBatch) -> Mapping[str, Tensor]:
        """Tensors [N, T] of its own that `loss` needs and that only the complete batch can give; pure. The update puts
        them into ``batch.extras``, and micro-batches carry their rows. None by default."""
        return {}

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

    @property
    def linear_on_first_pass(self) -> bool:
        """Whether, as long as the batch has no `old_logprobs`, the gradient of the loss in the log-probs is the same
        wherever the log-probs are; then too it is known before the forward. Only asked where not `linear`."""
        return False

    @property
    def every_row(self) -> bool:
        """Whether rows whose weights are all zero enter the loss (a KL or an entropy term): then they are forwarded."""
        return not self.linear

    def state_dict(self) -> dict[str, Any]:
        """State that must survive a resume (plain numbers, lists, tensors). Empty by default."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 (most objectives have no state)
        """Restore what `state_dict` gave."""


def check_weights(objective: Objective, weights: Any, batch: RolloutBatch) -> None:
    """Raise UserError, naming the class and the rollout, unless `weights` is a finite [N, T] that is 0 on padding.

    The update calls it before any step is taken.
    """
    import torch

    name = type(objective).__name__
    shape = tuple(batch.mask.shape)
    if not isinstance(weights, torch.Tensor) or tuple(weights.shape) != shape:
        got = f"shape {tuple(weights.shape)}" if isinstance(weights, torch.Tensor) else type(weights).__name__
        raise UserError(
            f"{name}.token_weights returned {got}; it must return a tensor of shape {shape}, [rollouts, tokens]"
        )
    for wrong, what in (
        (~weights.isfinite(), "a weight that is not finite"),
        ((weights != 0) & ~batch.mask, "a weight on padding"),
    ):
        if wrong.any():
            row, position = (int(i) for i in wrong.nonzero()[0])
            where = f"question {batch.uids[row]!r} sample {batch.samples[row]} (row {row}), position {position}"
            raise UserError(
                f"{name}.token_weights returned {what} ({float(weights[row, position])}) for rollout {where}"
            )
