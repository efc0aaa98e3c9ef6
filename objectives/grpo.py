"""Group-relative policy optimization without a ratio: the supplied loss, and its settings that have names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlvr_pl.core.advantage import Scale, group_advantage
from rlvr_pl.core.choices import check_choice
from rlvr_pl.core.weights import Aggregation
from rlvr_pl.objectives.policy_gradient import PolicyGradient

if TYPE_CHECKING:
    from torch import Tensor

    from rlvr_pl.types import RolloutBatch


class GRPO(PolicyGradient):
    """``-1/N sum_i A_i sum_t log p_it``, ``A_i = (r_i - mean)/(std + 1e-4)`` over the group: the supplied objective.

    GRPO (arXiv:2402.03300) on fresh rollouts, where its ratio is 1 and its clip inactive, with sums over tokens in
    place of means. [N] rewards -> [N, T] weights. A uniform group: weights exactly 0. A group of one: ValueError. An
    all-truncated batch: as any other, or 0 under `mask_truncated`. An empty completion: no weights, but its reward
    counts in the group's mean and deviation. Departs from supplied: not at all, at the defaults.

    Args:
        scale: what the centred rewards are divided by: "std" of the group, "batch-std" of the update, or "none".

    Example:
        >>> from rlvr_pl import Completion, Grade, GradeStatus, Rollout, StopReason, build_batch
        >>> answers = ((GradeStatus.CORRECT, 1.0), (GradeStatus.WRONG, 0.0))
        >>> rollouts = [
        ...     Rollout("q", i, (7,), Completion((5, 1), StopReason.EOS), "", Grade(status, reward))
        ...     for i, (status, reward) in enumerate(answers)
        ... ]
        >>> GRPO(scale="none").token_weights(build_batch(rollouts, group_size=2)).tolist()
        [[0.25, 0.25], [-0.25, -0.25]]
    """

    equation = "-1/N sum_i A_i sum_t log p_it,  A = (r - mean)/(std + 1e-4)"

    def __init__(self, *, scale: Scale = "std", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_choice("scale", scale, Scale)
        self.scale: Scale = scale
        self.shift_invariant = scale != "batch-std"  # the spread of the batch sees the shift of a group

    def rewards(self, batch: RolloutBatch) -> Tensor:
        """[N] what is learned from, NaN where not scorable."""
        return batch.rewards

    def advantage(self, batch: RolloutBatch) -> Tensor:
        return group_advantage(self.rewards(batch), batch.group_size, scale=self.scale)


class ORL(GRPO):
    """The supplied loss under the name of its arm, ordinary RL: `GRPO` with every knob at its default."""

    equation = "-1/N sum_i A_i sum_t log p_it  (supplied)"


class ORLMask(GRPO):
    """Supplied GRPO with weight 0 for rollouts cut at the cap (overlong filtering, arXiv:2503.14476, section 3.4).

    Departs from supplied: only in those rollouts. Then a group's weights no longer sum to 0.
    """

    equation = "-1/N sum_i 1{i not truncated} A_i sum_t log p_it"

    def __init__(self, *, mask_truncated: bool = True, **kwargs: Any) -> None:
        super().__init__(mask_truncated=mask_truncated, **kwargs)


class ORLSeqmean(GRPO):
    """Supplied GRPO with each rollout's log-prob divided by its length (the normalization of arXiv:2402.03300, eq. 3).

    Departs from supplied: every rollout carries the total weight \\|A_i\\|/N, however long it is.
    """

    equation = "-1/N sum_i A_i/|o_i| sum_t log p_it"

    def __init__(self, *, aggregation: Aggregation = "sequence-mean", **kwargs: Any) -> None:
        super().__init__(aggregation=aggregation, **kwargs)


class DrGRPO(GRPO):
    """Dr. GRPO (arXiv:2503.20783, section 3.2): no division by the deviation or by lengths, only by a constant.

    Departs from supplied: A = r - mean, and the sum over tokens is divided by `constant` (the cap, unless given).
    """

    equation = "-1/(N constant) sum_i A_i sum_t log p_it,  A = r - mean"

    def __init__(self, *, scale: Scale = "none", aggregation: Aggregation = "constant", **kwargs: Any) -> None:
        super().__init__(scale=scale, aggregation=aggregation, **kwargs)
