"""Learning from the high-entropy minority of tokens."""

from __future__ import annotations

from typing import Any

from rlvr_pl.core.weights import Aggregation
from rlvr_pl.objectives.grpo import GRPO


class EntropyMasked(GRPO):
    """``-1/tokens sum_it 1{H_it in the top 20%} A_i log p_it``: the 80/20 rule (arXiv:2506.01939).

    H is the next-token entropy under the weights that sampled; the threshold is the quantile over the unmasked tokens
    of the update, and the denominator keeps all of them. The paper adds it to DAPO: ``DAPO(entropy_top=0.2)``, the
    same gradient on the first pass but for DAPO's rewards. A uniform group, an all-truncated batch under
    `mask_truncated` and an empty completion: weights exactly 0. A group of one: ValueError. Departs from supplied: the
    mask, and the mean over tokens.
    """

    equation = "-1/tokens sum_it 1{H_it in the top 20%} A_i log p_it"

    def __init__(self, *, entropy_top: float = 0.2, aggregation: Aggregation = "token-mean", **kwargs: Any) -> None:
        super().__init__(entropy_top=entropy_top, aggregation=aggregation, **kwargs)
