"""From one advantage a rollout to one signed weight a token, already divided as the loss needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from rlvr_pl.core.choices import check_choice
from rlvr_pl.types import Totals

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    Vector = Sequence[float] | Sequence[int] | Sequence[bool] | np.ndarray | Tensor

Aggregation = Literal["token-sum", "sequence-mean", "token-mean", "constant"]


def token_weights(
    advantage: Vector,
    lengths: Vector,
    *,
    aggregation: Aggregation = "token-sum",
    truncated: Vector | None = None,
    mask_truncated: bool = False,
    constant: float | None = None,
) -> Tensor:
    """The weights [N, T] whose loss is ``-sum(weight * log_prob)``; T is the longest length, 0 beyond a rollout's own.

    Args:
        advantage: [N].
        lengths: [N] completion tokens, the EOS token included.
        aggregation: "token-sum" A_i/N (the supplied loss); "sequence-mean" A_i/(N |o_i|) (GRPO, arXiv:2402.03300,
            eq. 3); "token-mean" A_i/(unmasked tokens of the update) (DAPO, arXiv:2503.14476, eq. 8); "constant"
            A_i/(N constant) (Dr. GRPO, arXiv:2503.20783, section 3.2).
        truncated: [N] bool, rollouts that hit the length cap; required by `mask_truncated`.
        mask_truncated: give truncated rollouts weight 0 (DAPO's overlong filtering). They stay in N; they leave the
            token count of "token-mean".
        constant: tokens; required by "constant".

    Example:
        >>> token_weights([0.5, -0.5], lengths=[1, 2], aggregation="sequence-mean").tolist()
        [[0.25, 0.0], [-0.125, -0.125]]
    """
    import torch

    sizes = torch.as_tensor(lengths, dtype=torch.long)
    values = torch.as_tensor(advantage, dtype=torch.float64)
    if values.shape != sizes.shape or sizes.dim() != 1:
        raise ValueError(f"advantage {tuple(values.shape)} and lengths {tuple(sizes.shape)} must both be [N]")
    if truncated is None and mask_truncated:
        raise ValueError("mask_truncated=True needs truncated, the [N] flags of rollouts that hit the cap")
    cut = torch.zeros_like(sizes) if truncated is None else torch.as_tensor(truncated)
    cut = cut.to(torch.bool)
    mask = torch.arange(int(sizes.max()) if len(sizes) else 0) < sizes[:, None]
    totals = Totals(rollouts=len(sizes), tokens=int(sizes.sum()), truncated_tokens=int(sizes[cut].sum()))
    factor = token_factor(mask, cut, totals, aggregation=aggregation, mask_truncated=mask_truncated, constant=constant)
    return values[:, None] * factor


def token_factor(
    mask: Tensor,
    truncated: Tensor,
    totals: Totals,
    *,
    aggregation: Aggregation = "token-sum",
    mask_truncated: bool = False,
    constant: float | None = None,
) -> Tensor:
    """The weight of each token at advantage 1: FP64 [n, t], at least 0, 0 on padding and on masked rollouts.

    `mask` [n, t] and `truncated` [n] may be any rows of an update; `totals` are of the whole update, so that the rows'
    factors do not depend on how the update is cut. Arguments otherwise as for `token_weights`.
    """
    check_choice("aggregation", aggregation, Aggregation)
    if aggregation == "constant" and not (constant and constant > 0):
        raise ValueError(f"aggregation='constant' needs constant, a positive number of tokens, not {constant!r}")
    factor = mask.double()
    if mask_truncated:
        factor = factor * ~truncated[:, None]
    if aggregation == "token-mean":
        return factor / max(unmasked_tokens(totals, mask_truncated), 1)
    factor = factor / max(totals.rollouts, 1)
    if aggregation == "sequence-mean":
        return factor / mask.sum(1, keepdim=True).clamp(min=1)
    return factor / constant if aggregation == "constant" and constant else factor


def unmasked_tokens(totals: Totals, mask_truncated: bool) -> int:
    """Completion tokens of the update that take part in the loss."""
    return totals.tokens - (totals.truncated_tokens if mask_truncated else 0)


def signed_mass(weights: Tensor) -> tuple[float, float]:
    """``(M+, M-)``: the sums of the positive and of the negative weights' magnitudes.

    >>> signed_mass(token_weights([0.5, -0.25], lengths=[2, 1]))
    (0.5, 0.125)
    """
    return float(weights.clamp(min=0).sum()), float((-weights).clamp(min=0).sum())
