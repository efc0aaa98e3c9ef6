"""Probability ratios to the policy that sampled, and the choice of tokens by entropy or covariance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from rlvr_pl.core.choices import check_choice

if TYPE_CHECKING:
    from torch import Tensor

RatioLevel = Literal["token", "sequence", "sequence-token"]

LOG_RATIO_BOUND = 20.0  # exp(20) = 4.9e8: no loss needs more, and a token that became impossible gives no infinity


def clean(values: Tensor, keep: Tensor) -> Tensor:
    """`values` with 0 where `keep` is False; a NaN there reaches neither the loss nor the gradient."""
    return values.where(keep, 0)


def per_sequence(values: Tensor, mask: Tensor) -> Tensor:
    """[n, 1] mean of `values` [n, t] over the masked tokens of each row, 0 for an empty row. Clean values expected."""
    return (values * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def log_ratio(logprobs: Tensor, old: Tensor | None, mask: Tensor) -> Tensor:
    """[n, t] log-prob minus old log-prob, within +-`LOG_RATIO_BOUND`, 0 off the mask. Without `old`: of `logprobs`
    itself, so 0 everywhere, with the gradient of the log-probs (the first pass over fresh rollouts)."""
    current = clean(logprobs, mask)
    behind = current.detach() if old is None else clean(old, mask)
    return (current - behind).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def importance_ratio(log_ratios: Tensor, mask: Tensor, level: RatioLevel = "token") -> Tensor:
    """[n, t] ratio u of each token.

    Args:
        log_ratios: [n, t], 0 off the mask.
        mask: [n, t] bool.
        level: "token" u_t = exp(lr_t); "sequence" u = exp(mean lr), one value a rollout (GSPO, arXiv:2507.18071,
            eq. 7); "sequence-token" that value with each token's own gradient (eq. 14).
    """
    check_choice("level", level, RatioLevel)
    if level == "token":
        return log_ratios.exp()
    mean = per_sequence(log_ratios, mask)
    if level == "sequence":
        return mean.exp().expand_as(log_ratios)
    return (mean.detach() + log_ratios - log_ratios.detach()).exp()


def top_share(values: Tensor, mask: Tensor, share: float) -> Tensor:
    """[n, t] bool: the masked tokens whose value reaches the (1 - share) quantile of all masked ones.

    The quantile interpolates linearly between order statistics. Share 1 keeps all, 0 only the greatest.
    """
    if not mask.any():
        return mask
    chosen = values.detach()[mask].double().cpu().numpy()
    threshold = float(np.quantile(chosen, 1 - share))
    return mask & (clean(values.detach(), mask) >= threshold)


def token_covariance(logprobs: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """[n, t] ``(l_t - mean l)(A_t - mean A)`` over the masked tokens, 0 elsewhere (arXiv:2505.22617, eq. 10): what a
    token adds to the covariance that drives the policy's entropy down. `advantage` is [n, t]."""
    count = mask.sum().clamp(min=1)
    current, value = clean(logprobs.detach(), mask), clean(advantage, mask)
    return clean((current - current.sum() / count) * (value - value.sum() / count), mask)
