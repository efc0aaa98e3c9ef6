"""The gradient of an embedding that is also the head, added row by row to the head's.

autograd makes a second table as large as the vocabulary for the few rows that a batch reads, and then adds the two.
Here the rows read become leaves of the graph, and their gradients go to their places at the end.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class RowGradients(TorchFunctionMode):
    """Inside of this context, embeddings that read `table` give leaves; `add` follows the backward.

    Args:
        table: [V, h], a weight; None serves nothing. Only FP32 and FP64 ones are served: the sums of others round at
            every term, so that the order would show.
    """

    def __init__(self, table: Tensor | None) -> None:
        super().__init__()
        wide = table is not None and table.requires_grad and table.dtype in (torch.float32, torch.float64)
        self._table = table if wide else None
        self._read: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding and self._table is not None and torch.is_grad_enabled():
            options = inspect.signature(F.embedding).bind(*args, **kwargs).arguments
            ids, table = options.pop("input"), options.pop("weight")
            options.pop("norm_type", None)  # of a max_norm
            if table is self._table and not any(x is not None and x is not False for x in options.values()):
                rows = table.detach()[ids].requires_grad_()
                self._read.append((ids, rows))
                return rows
        return func(*args, **kwargs)

    @torch.no_grad()
    def add(self) -> None:
        """Add the gradients of all rows that were read to ``table.grad``."""
        table = self._table
        for ids, rows in self._read:
            if table is not None and rows.grad is not None:
                if table.grad is None:
                    table.grad = torch.zeros_like(table)
                table.grad.index_add_(0, ids.reshape(-1), rows.grad.flatten(0, -2))
        self._read.clear()
