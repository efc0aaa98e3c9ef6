"""Gradients of a tied embedding, row by row, beside autograd's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rlvr_pl.core.row_gradients import RowGradients

IDS = torch.tensor([[1, 4, 1], [0, 1, 6]])  # 1 is read three times, 2, 3 and 5 never


def table(dtype: torch.dtype = torch.float64) -> torch.nn.Parameter:
    return torch.nn.Parameter(
        torch.randn(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    )


def backward(weight: torch.nn.Parameter, tied: bool, **options: object) -> None:
    """A loss of the rows read, and with `tied` of the same table as a head."""
    x = F.embedding(IDS, weight, **options)  # type: ignore[arg-type]
    (x @ weight.T if tied else x).sin().sum().backward()


@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_is_autograds(tied: bool) -> None:
    """FP64 sums of some ten terms."""
    plain, ours = table(), table()
    backward(plain, tied)
    rows = RowGradients(ours)
    with rows:
        backward(ours, tied)
    rows.add()
    assert plain.grad is not None and ours.grad is not None
    assert (ours.grad - plain.grad).abs().max() < 1e-14
    assert (ours.grad[[2, 3, 5]] == plain.grad[[2, 3, 5]]).all()
    kept = ours.grad.clone()
    rows.add()  # nothing is left to be added
    assert torch.equal(ours.grad, kept)


@pytest.mark.parametrize(
    ("weight", "options"),
    [(table(torch.bfloat16), {}), (table(), {"padding_idx": 2}), (table(), {"max_norm": 1e9, "padding_idx": 1})],
)
def test_others_are_left_to_autograd(weight: torch.nn.Parameter, options: dict[str, object]) -> None:
    rows = RowGradients(weight)
    with rows:
        backward(weight, False, **options)
    assert weight.grad is not None
    kept = weight.grad.clone()
    rows.add()
    assert torch.equal(weight.grad, kept)


def test_another_table_and_a_pass_without_gradients_are_left_alone() -> None:
    head, other = table(), table()
    rows = RowGradients(head)
    with rows:
        backward(other, False)
        with torch.no_grad():
            assert torch.equal(F.embedding(IDS, head), head[IDS])
    rows.add()
    assert head.grad is None and other.grad is not None


def test_a_frozen_table_stays_without_gradient() -> None:
    head = table().requires_grad_(False)
    for rows in (RowGradients(head), RowGradients(None)):
        with rows:
            assert not F.embedding(IDS, head).requires_grad
        rows.add()
    assert head.grad is None
