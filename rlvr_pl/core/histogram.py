"""A histogram from which quantiles of everything seen so far can be read: mergeable, and small enough to checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Histogram:
    """Counts of values at least 0 in bins of `width`; quantiles are right to within one `width`."""

    width: float = 1e-3
    counts: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def total(self) -> int:
        """How many values were added."""
        return int(self.counts.sum())

    def add(self, values: np.ndarray) -> None:
        """Count `values` (1-D, finite); negative rounding noise counts as 0."""
        bins = np.bincount((np.maximum(values, 0) / self.width).astype(np.int64), minlength=len(self.counts))
        bins[: len(self.counts)] += self.counts
        self.counts = bins

    def quantile(self, q: float) -> float:
        """The value at rank ``q (total - 1)``, values spread evenly within their bin. NaN when empty."""
        if self.total == 0:
            return float("nan")
        rank = q * (self.total - 1)
        below = np.cumsum(self.counts) - self.counts
        bin_ = int(np.searchsorted(below, rank, side="right")) - 1
        return self.width * (bin_ + (rank - below[bin_] + 0.5) / self.counts[bin_])

    def state_dict(self) -> dict[str, Any]:
        """The occupied bins, as plain lists."""
        bins = np.flatnonzero(self.counts)
        return {"width": self.width, "bins": bins.tolist(), "counts": self.counts[bins].tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.width = float(state["width"])
        self.counts = np.zeros(max(state["bins"], default=-1) + 1, dtype=np.int64)
        self.counts[state["bins"]] = state["counts"]
