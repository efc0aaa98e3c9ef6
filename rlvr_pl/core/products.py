"""FP32 matrix products on a CPU by oneDNN, where torch by itself takes MKL.

MKL stays with AVX2 on processors that are not Intel's, at half the rate of what they can do or less; oneDNN uses what
is there. torch has no switch for it, but has its product among its operators (`mkldnn::_linear_pointwise`, which the
Inductor compiler emits), without a derivative. Where the operator is missing, all products are torch's own.

oneDNN builds kernels for every new shape, in milliseconds and in megabytes that it keeps for good. So it is given few
shapes: blocks of a fixed number of rows, with torch's own product for what is left.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Rows of one block: nine tenths of the rate of large products, and little left over.
ROWS = 512
_OPERATOR = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


def quick(*tensors: Tensor) -> bool:
    """Whether oneDNN serves products of these: all of them FP32 on a CPU."""
    return _OPERATOR is not None and all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] @ b [k, n] by oneDNN, for which `quick` holds. No derivative; every new (m, k, n) is dear."""
    assert _OPERATOR is not None
    return _OPERATOR(a, b.T, None, "none", [], "")


def rows_product(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] @ b [k, n], in blocks of rows of a."""
    if not quick(a, b):
        return a @ b
    out, whole = a.new_empty(len(a), b.shape[1]), len(a) // ROWS * ROWS
    for first in range(0, whole, ROWS):
        out[first : first + ROWS] = product(a[first : first + ROWS], b)
    if whole < len(a):
        torch.mm(a[whole:], b, out=out[whole:])
    return out


def sum_product(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k].T @ b [m, n], summed over blocks of rows of both."""
    if not quick(a, b):
        return a.T @ b
    whole = len(a) // ROWS * ROWS
    out = a[whole:].T @ b[whole:]
    for first in range(0, whole, ROWS):
        some = slice(first, first + ROWS)
        out += product(a[some].T, b[some])
    return out
