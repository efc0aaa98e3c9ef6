"""FP32 products by oneDNN beside torch's own."""

from __future__ import annotations

import pytest
import torch

from rlvr_pl.core import products
from rlvr_pl.core.products import product, quick, rows_product, sum_product

needs_operator = pytest.mark.skipif(products._OPERATOR is None, reason="this torch has no oneDNN product")


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Whole numbers from -3 to 3: sums of a few thousand of their products stay below 2**24, exact in FP32."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


@needs_operator
@pytest.mark.parametrize("rows", [0, 1, 511, 512, 1024, 1300])
def test_whole_numbers_give_exact_products(rows: int) -> None:
    a, b, c = integers(rows, 24), integers(24, 40, seed=1), integers(rows, 17, seed=2)
    assert torch.equal(rows_product(a, b), a @ b)
    assert torch.equal(sum_product(a, c), a.T @ c)
    if rows:
        assert torch.equal(product(a, b), a @ b)
        assert torch.equal(product(c.T, a), c.T @ a)  # strided on both sides


@needs_operator
def test_only_whole_blocks_go_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,300 rows are two blocks of 512 and 276 rows for torch, so that other lengths make no other shapes."""
    shapes = []
    real = products._OPERATOR
    monkeypatch.setattr(products, "_OPERATOR", lambda a, *rest: shapes.append(tuple(a.shape)) or real(a, *rest))
    rows_product(integers(1300, 24), integers(24, 40))
    sum_product(integers(1300, 24), integers(1300, 40))
    assert shapes == [(512, 24)] * 2 + [(24, 512)] * 2


@needs_operator
def test_what_is_not_fp32_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_OPERATOR", lambda *a: pytest.fail("called"))
    for dtype in (torch.float64, torch.bfloat16):
        a, b = integers(600, 24).to(dtype), integers(24, 40, seed=1).to(dtype)
        assert not quick(a, b)
        assert torch.equal(rows_product(a, b), a @ b)
        assert torch.equal(sum_product(a, a), a.T @ a)


def test_without_the_operator_everything_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_OPERATOR", None)
    a, b = torch.randn(600, 24), torch.randn(24, 40)
    assert not quick(a, b)
    assert torch.equal(rows_product(a, b), a @ b)
    assert torch.equal(sum_product(a, a), a.T @ a)


@needs_operator
@pytest.mark.parametrize("rows", [1, 16, 33])
def test_a_packed_factor_gives_the_same_products(rows: int) -> None:
    a, b = integers(rows, 24), integers(24, 40, seed=1)
    assert products.packable(a, b)
    assert torch.equal(products.packed_product(a, products.packed(b)), a @ b)
    assert torch.equal(products.packed_product(a, products.packed(b[:, 8:20])), a @ b[:, 8:20])


def test_what_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not products.packable(integers(2, 2).double())
    assert not products.packable(integers(2, 2), integers(2, 2).half())
    monkeypatch.setattr(products, "_PACK", None)
    assert not products.packable(integers(2, 2))
    assert not products.packable(integers(2, 2).bfloat16())
