"""Matrix products on a CPU by oneDNN: FP32 ones, where torch by itself takes MKL, and those with a factor packed once.

MKL stays with AVX2 on processors that are not Intel's, at half the rate of what they can do or less; oneDNN uses what
is there. torch has no switch for it, but has its product among its operators (`mkldnn::_linear_pointwise`, which the
Inductor compiler emits), without a derivative. Where the operator is missing, all products are torch's own.

oneDNN builds kernels for every new shape, in milliseconds and in megabytes that it keeps for good. So it is given few
shapes: blocks of a fixed number of rows, with torch's own product for what is left.

For few rows the time goes to the second factor, which oneDNN brings into an order of its own at every call. `packed`
does that once: 32 rows then take two thirds of the time, 16 a little more than half. Products in BF16, which are
oneDNN's in torch as well, come out the same to the last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Rows of one block: nine tenths of the rate of large products, and little left over.
ROWS = 512
_OPERATOR = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
_PACK = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None) if _OPERATOR is not None else None


def quick(*tensors: Tensor) -> bool:
    """Whether oneDNN serves products of these: all of them FP32 on a CPU."""
    return _OPERATOR is not None and all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] @ b [k, n] by oneDNN, for which `quick` holds. No derivative; every new (m, k, n) is dear."""
    assert _OPERATOR is not None
    return _OPERATOR(a, b.T, None, "none", [], "")


def packable(*factors: Tensor) -> bool:
    """Whether `packed` takes these: FP32 or, where the processor has products in it, BF16 on a CPU."""
    dtypes = {x.dtype for x in factors}
    if _PACK is None or dtypes - {torch.float32, torch.bfloat16} or any(x.device.type != "cpu" for x in factors):
        return False
    return torch.bfloat16 not in dtypes or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def packed(b: Tensor) -> Tensor:
    """b [k, n], for which `packable` holds, in oneDNN's order, for `packed_product` alone: as many bytes once more."""
    assert _PACK is not None
    return _PACK(b.T, None)


def packed_product(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] @ b [k, n] with b from `packed`. No derivative; every new m is dear."""
    assert _OPERATOR is not None
    return _OPERATOR(a, b, None, "none", [], "")


def row_blocks(rows: int, *factors: Tensor) -> list[slice]:
    """Blocks of rows for products of these factors: what `ROWS` leave over first, then those of `ROWS`."""
    if not quick(*factors):
        return [slice(0, rows)]
    whole = rows // ROWS * ROWS
    left = [slice(whole, rows)] if whole < rows or not rows else []
    return left + [slice(first, first + ROWS) for first in range(0, whole, ROWS)]


def block_product(a: Tensor, b: Tensor, rows: slice) -> Tensor:
    """a @ b, where `rows` is the one of `row_blocks` that runs along the rows of a, or along its columns."""
    return product(a, b) if rows.stop - rows.start == ROWS and quick(a, b) else a @ b


def rows_product(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] @ b [k, n], in blocks of rows of a."""
    blocks = row_blocks(len(a), a, b)
    if len(blocks) == 1:
        return block_product(a, b, blocks[0])
    out = a.new_empty(len(a), b.shape[1])
    for rows in blocks:
        out[rows] = block_product(a[rows], b, rows)
    return out


def sum_product(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k].T @ b [m, n], summed over blocks of rows of both."""
    first, *others = row_blocks(len(a), a, b)
    out = block_product(a[first].T, b[first], first)
    for rows in others:
        out += block_product(a[rows].T, b[rows], rows)
    return out
