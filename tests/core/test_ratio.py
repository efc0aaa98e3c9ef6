"""Ratios by hand-worked numbers: FP64 values of size 1, 1e-12 is some thousand roundings."""

from __future__ import annotations

import math

import pytest
import torch

from rlvr_pl.core.ratio import importance_ratio, log_ratio, per_sequence, token_covariance, top_share

NAN = math.nan
MASK = torch.tensor([[True, True, False], [True, True, True]])


def test_log_ratio_is_clean_and_bounded() -> None:
    now = torch.tensor([[-1.0, -2.0, NAN], [-30.0, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.5, -1.0, NAN], [-1.0, -30.0, -1.0]], dtype=torch.float64)
    found = log_ratio(now, old, MASK)
    assert found.tolist() == [[0.5, -1.0, 0.0], [-20.0, 20.0, 0.0]]
    found.sum().backward()
    assert now.grad.tolist() == [[1, 1, 0], [0, 0, 1]]  # none beyond the bound, none (and no NaN) on padding


def test_without_old_log_probs_the_ratio_is_one_with_a_gradient() -> None:
    now = torch.tensor([[-1.0, NAN]], dtype=torch.float64, requires_grad=True)
    ratio = log_ratio(now, None, torch.tensor([[True, False]])).exp()
    assert ratio.tolist() == [[1, 1]]
    ratio.sum().backward()
    assert now.grad.tolist() == [[1, 0]]


def test_levels() -> None:
    logs = torch.tensor([[0.2, -0.6, 0.0], [0.3, 0.0, 0.6]], dtype=torch.float64, requires_grad=True)
    # Means over 2 and 3 tokens: -0.2 and 0.3.
    means = [math.exp(-0.2), math.exp(0.3)]
    assert importance_ratio(logs, MASK)[0, :2].tolist() == pytest.approx([math.exp(0.2), math.exp(-0.6)], abs=1e-12)
    for level in ("sequence", "sequence-token"):
        ratio = importance_ratio(logs, MASK, level)
        assert ratio[0, :2].tolist() == pytest.approx([means[0]] * 2, abs=1e-12)
        assert ratio[1].tolist() == pytest.approx([means[1]] * 3, abs=1e-12)
        # d/d log of one ratio: spread over the row, or the token's own.
        (gradient,) = torch.autograd.grad(ratio[1, 0], logs, retain_graph=True)
        expected = [means[1] / 3] * 3 if level == "sequence" else [means[1], 0, 0]
        assert gradient[1].tolist() == pytest.approx(expected, abs=1e-12)
    with pytest.raises(ValueError, match="token, sequence, sequence-token"):
        importance_ratio(logs, MASK, "row")


def test_per_sequence_of_an_empty_row_is_zero() -> None:
    assert per_sequence(torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.bool)).tolist() == [[0.0]]


@pytest.mark.parametrize(
    ("share", "kept"),
    [
        (1.0, [[True, True, False], [True, True, True]]),
        (0.5, [[False, True, False], [False, True, True]]),  # 0.5 quantile of 1..5: 3, reached by 3, 4, 5
        (0.4, [[False, True, False], [False, False, True]]),  # 0.6 quantile: 3.4
        (0.0, [[False, True, False], [False, False, False]]),  # the greatest alone
    ],
)
def test_top_share(share, kept) -> None:
    values = torch.tensor([[1.0, 5.0, NAN], [2.0, 3.0, 4.0]], dtype=torch.float64)
    assert top_share(values, MASK, share).tolist() == kept


def test_top_share_of_nothing() -> None:
    assert not top_share(torch.full((1, 2), NAN), torch.zeros(1, 2, dtype=torch.bool), 0.2).any()


def test_token_covariance() -> None:
    logprobs = torch.tensor([[-1.0, -3.0, NAN]], dtype=torch.float64)
    advantage = torch.tensor([[1.0, -1.0, 9.0]], dtype=torch.float64)
    # Means -2 and 0: (1)(1) and (-1)(-1).
    assert token_covariance(logprobs, advantage, MASK[:1]).tolist() == [[1.0, 1.0, 0.0]]
