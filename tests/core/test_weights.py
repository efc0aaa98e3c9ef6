"""Token weights by hand-worked numbers. Each is at most three divisions: 1e-15 relative."""

from __future__ import annotations

import pytest
import torch

from rlvr_pl.core.weights import signed_mass, token_factor, token_weights
from rlvr_pl.types import Totals

ADVANTAGE, LENGTHS = [3.0, -6.0, 1.5], [1, 3, 2]


def rows(weights: torch.Tensor) -> list[list[float]]:
    assert weights.dtype == torch.float64
    return weights.tolist()


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-sum", [[1, 0, 0], [-2, -2, -2], [0.5, 0.5, 0]]),  # A/3
        ("sequence-mean", [[1, 0, 0], [-2 / 3, -2 / 3, -2 / 3], [0.25, 0.25, 0]]),  # A/(3 length)
        ("token-mean", [[0.5, 0, 0], [-1, -1, -1], [0.25, 0.25, 0]]),  # A/6
        ("constant", [[0.25, 0, 0], [-0.5, -0.5, -0.5], [0.125, 0.125, 0]]),  # A/(3 * 4)
    ],
)
def test_aggregations(aggregation, expected) -> None:
    found = rows(token_weights(ADVANTAGE, LENGTHS, aggregation=aggregation, constant=4))
    assert [pytest.approx(row, rel=1e-15, abs=0) for row in expected] == found


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-sum", [[1, 0, 0], [0, 0, 0], [0.5, 0.5, 0]]),  # the masked one stays in N = 3
        ("sequence-mean", [[1, 0, 0], [0, 0, 0], [0.25, 0.25, 0]]),
        ("token-mean", [[1, 0, 0], [0, 0, 0], [0.5, 0.5, 0]]),  # 1 + 2 unmasked tokens
    ],
)
def test_masking_truncated_rollouts(aggregation, expected) -> None:
    cut = [False, True, False]
    found = token_weights(ADVANTAGE, LENGTHS, aggregation=aggregation, truncated=cut, mask_truncated=True)
    assert rows(found) == expected
    unmasked = token_weights(ADVANTAGE, LENGTHS, aggregation=aggregation, truncated=cut)
    assert torch.equal(unmasked, token_weights(ADVANTAGE, LENGTHS, aggregation=aggregation))


def test_empty_completions_and_empty_updates() -> None:
    assert rows(token_weights([1, -1], [0, 2], aggregation="sequence-mean")) == [[0, 0], [-0.25, -0.25]]
    for aggregation in ("token-sum", "sequence-mean", "token-mean"):
        assert token_weights([1, 1], [0, 0], aggregation=aggregation).shape == (2, 0)
        assert token_weights([], [], aggregation=aggregation).shape == (0, 0)


def test_all_truncated_and_masked_is_zero_not_nan() -> None:
    found = token_weights([1, -1], [2, 2], aggregation="token-mean", truncated=[True, True], mask_truncated=True)
    assert rows(found) == [[0, 0], [0, 0]]


def test_factor_of_rows_does_not_depend_on_the_cut() -> None:
    mask = torch.tensor([[True, False], [True, True]])
    truncated = torch.tensor([False, True])
    totals = Totals(rollouts=2, tokens=3, truncated_tokens=2)
    for aggregation in ("token-sum", "sequence-mean", "token-mean"):
        whole = token_factor(mask, truncated, totals, aggregation=aggregation)
        for i in range(2):
            part = token_factor(mask[i : i + 1], truncated[i : i + 1], totals, aggregation=aggregation)
            assert torch.equal(part[0], whole[i])


def test_signed_mass() -> None:
    # By rollout: 3 * 1 and 1.5 * 2 are positive, 6 * 3 negative, all over 3.
    assert signed_mass(token_weights(ADVANTAGE, LENGTHS)) == pytest.approx((2.0, 6.0), rel=1e-15)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="token-sum, sequence-mean, token-mean, constant"):
        token_weights([1], [1], aggregation="mean")
    with pytest.raises(ValueError, match="needs constant"):
        token_weights([1], [1], aggregation="constant")
    with pytest.raises(ValueError, match="needs truncated"):
        token_weights([1], [1], mask_truncated=True)
    with pytest.raises(ValueError, match=r"\[N\]"):
        token_weights([1, 2], [1])
