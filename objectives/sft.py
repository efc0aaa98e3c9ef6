"""Supervised fine-tuning on the policy's own verified solutions: the distillation step of expert iteration."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rlvr_pl.core.weights import token_factor
from rlvr_pl.objectives.base import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from rlvr_pl.types import RolloutBatch


class ExpertIterationSFT(Objective):
    """``-1/(tokens of the update) sum_it log p_it`` over stored solutions (RFT, arXiv:2308.01825; ReST-EM, 2312.06585).

    Every completion token of every row has the same positive weight; rewards and groups are ignored, so uniform
    groups, groups of one and truncated rows are as any other, an empty completion has no weights and an empty update
    has loss 0. Departs from supplied: off-policy, nothing is sampled, and there is no negative weight.
    """

    equation = "-1/tokens sum_it log p_it  (stored verified solutions; nothing is sampled)"
    samples: ClassVar[bool] = False
    shift_invariant = True

    def token_weights(self, batch: RolloutBatch) -> Tensor:
        return token_factor(batch.mask, batch.truncated, batch.totals, aggregation="token-mean")
