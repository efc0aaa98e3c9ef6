"""Learning-rate schedules that end with the run."""

from __future__ import annotations

import math

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class WarmupCosine(LRScheduler):
    """Linear warm-up to the full rate, then half a cosine that would reach zero one update after the last.

    Update u of U, counted from 1, has the rate times ``min(u / warmup, 1)`` and, after the warm-up,
    ``(1 + cos(pi (u - 1 - warmup) / (U - warmup))) / 2``. No update is spent at rate zero.

    Args:
        optimizer: its rate is the full one.
        warmup: updates of the warm-up (the paper's distillation: 5).
        updates: planned updates of the run; `fit` sets them (`plan`).
    """

    def __init__(self, optimizer: Optimizer, warmup: int = 5, updates: int | None = None) -> None:
        if warmup < 0:
            raise ValueError(f"warmup={warmup}: must be at least 0")
        self.warmup = warmup
        self.updates = updates
        super().__init__(optimizer)

    def plan(self, updates: int) -> None:
        """Set the planned number of updates, before the first of them is done."""
        self.updates = updates

    def get_lr(self) -> list[float | Tensor]:
        factor = self.factor(self.last_epoch)
        return [rate * factor for rate in self.base_lrs]

    def factor(self, done: int) -> float:
        """Share of the full rate when `done` updates are done."""
        if done < self.warmup:
            return (done + 1) / self.warmup
        if done == self.warmup:
            return 1.0
        if self.updates is None:
            raise RuntimeError("WarmupCosine does not know how many updates the run has: call plan() first")
        share = (done - self.warmup) / max(1, self.updates - self.warmup)
        return 0.5 + 0.5 * math.cos(math.pi * min(1.0, share))
