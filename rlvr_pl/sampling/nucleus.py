"""Exact top-p sampling by partial selection, inverted from one uniform a row.

The nucleus is that of the supplied recipe (`top_p_filter` of reasoning-from-scratch 0.2.0): probabilities sorted in
descending order, equal ones by token id, up to the first entry with ``fl32(cumulative) - p >= top_p`` in FP32
arithmetic (so the crossing token is kept, and the first entry always). Only the largest few entries are sorted; a row
whose nucleus does not end among them is sorted in full, so the result never depends on the shortcut.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Longest rows of which the whole batch is sorted at once; longer ones go one by one through the cache.
_SHORT = 8192
# Entries between two of the coarse cumulative sums of a long row.
_STRETCH = 1024


def sample(probs: Tensor, uniform: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Draw one token a row from the renormalised nucleus.

    The token is where the cumulative mass of the nucleus, in the sorted order, first exceeds ``uniform`` times its
    whole mass (both in FP64).

    Args:
        probs: [n, V] FP32 probabilities. A row with NaN gives a NaN log-prob.
        uniform: [n] FP64 in [0, 1), on the device of `probs`.
        top_p: in (0, 1]; 1 keeps everything.

    Returns:
        Token ids [n] int64, and their log-probs [n] FP32 under the renormalised nucleus.
    """
    vocabulary = probs.shape[1]
    width = 128 if vocabulary <= _SHORT else 2048
    if width * 4 > vocabulary:
        return _invert(probs, largest(probs, vocabulary), uniform, top_p)[:2]
    if vocabulary > _SHORT and probs.device.type == "cpu":
        return _sample_long(probs, uniform, top_p, width)
    ids, logprobs, open_ended = _invert(probs, largest(probs, width), uniform, top_p)
    if open_ended.any():
        rest = open_ended.nonzero()[:, 0]
        full = probs[rest]
        ids[rest], logprobs[rest], _ = _invert(full, largest(full, vocabulary), uniform[rest], top_p)
    return ids, logprobs


def _sample_long(probs: Tensor, uniform: Tensor, top_p: float, width: int) -> tuple[Tensor, Tensor]:
    """`sample` for long rows on a CPU: by the `width` largest entries where these may settle the row."""
    ids = torch.empty(len(probs), dtype=torch.long)
    logprobs = torch.empty(len(probs), dtype=probs.dtype)
    # `width` entries have no more mass than so many times the largest, and must reach top_p, or at 1 the row's target
    within = probs.amax(1) * width >= 0.99 * (uniform if top_p == 1 else top_p)
    some = within.nonzero()[:, 0]
    if len(some):
        here = probs if len(some) == len(probs) else probs[some]
        ids[some], logprobs[some], open_ended = _invert(here, largest(here, width), uniform[some], top_p)
        within[some] = ~open_ended
    for row in (~within).nonzero()[:, 0].tolist():
        ids[row], logprobs[row] = _invert_row(probs[row].numpy(), float(uniform[row]), top_p)
    return ids, logprobs


def _invert(probs: Tensor, top: Tensor, uniform: Tensor, top_p: float) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, log-probs, and the rows that the largest entries `top` [n, k], in descending order, do not settle."""
    width = top.shape[1]
    sums = top.cumsum(1, dtype=torch.float64)
    if top_p < 1:
        count = _first(sums.to(top.dtype).sub_(top) >= top_p)[:, None]
        open_ended = count == 0
        last = torch.where(open_ended, width, count).sub_(1)
        mass = sums.gather(1, last)
        target = uniform[:, None] * mass
    else:
        last = torch.full_like(uniform, width - 1, dtype=torch.long)[:, None]
        mass = sums[:, -1:] if top.shape == probs.shape else _mass(probs)
        target = uniform[:, None] * mass
        open_ended = target >= sums[:, -1:]
    # a product that rounds up to the whole mass still names the last entry
    rank = torch.minimum(torch.searchsorted(sums, target, right=True), last)
    value = top.gather(1, rank)
    logprobs = (value / mass).log()[:, 0].to(probs.dtype)
    return _locate(probs, top, rank, value), logprobs, open_ended[:, 0]


def _mass(probs: Tensor) -> Tensor:
    """Sums of the rows [n, 1] in FP64. (torch's are slow for long rows on a CPU.)"""
    if probs.device.type != "cpu" or probs.shape[1] <= _SHORT:
        return probs.sum(1, keepdim=True, dtype=torch.float64)
    starts = np.arange(0, probs.shape[1], _STRETCH)
    return torch.from_numpy(np.add.reduceat(probs.numpy(), starts, axis=1, dtype=np.float64).sum(1, keepdims=True))


def _invert_row(probs: NDArray[np.float32], uniform: float, top_p: float) -> tuple[int, float]:
    """Token and log-prob of one long row by a full sort; sums are exact only around the two places that matter."""
    top = np.sort(probs)[::-1]
    coarse = np.add.reduceat(top, np.arange(0, len(top), _STRETCH), dtype=np.float64).cumsum()

    def near(value: float) -> tuple[int, NDArray[np.float32], NDArray[np.float64]]:
        """Where the sums cross `value`, a stretch before and after included: first index, entries, their sums."""
        stretch = max(0, int(np.searchsorted(coarse, value)) - 1)
        entries = top[stretch * _STRETCH : (stretch + 3) * _STRETCH]
        return stretch * _STRETCH, entries, entries.cumsum(dtype=np.float64) + (coarse[stretch - 1] if stretch else 0)

    last, mass = len(top) - 1, coarse[-1]
    if top_p < 1:
        first, entries, sums = near(top_p)
        ended = sums.astype(np.float32) - entries >= np.float32(top_p)
        if ended.any():
            count = max(1, int(ended.argmax()))
            last, mass = first + count - 1, sums[count - 1]
    first, entries, sums = near(uniform * mass)
    rank = min(first + int(np.searchsorted(sums, uniform * mass, side="right")), last)
    value = top[rank]
    ids = np.flatnonzero(probs == value)
    skip = rank - np.count_nonzero(top > value) if len(ids) > 1 else 0
    return (int(ids[skip]) if len(ids) else 0), float(np.log(value / mass))


def largest(probs: Tensor, width: int) -> Tensor:
    """The `width` largest entries of each row in descending order (values only, so equal ones need no order)."""
    rows, vocabulary = probs.shape
    if probs.device.type != "cpu":
        return probs.topk(width).values if width < vocabulary else probs.sort(descending=True).values
    # NumPy's partition and sort of FP32 are vectorised: about 5 and 20 times as fast as torch's topk and sort on a CPU
    values, top = probs.numpy(), np.empty((rows, width), np.float32)
    step = rows if vocabulary <= _SHORT else 1
    for i in range(0, rows, step):
        some = values[i : i + step]
        if width < vocabulary:
            some = np.partition(some, vocabulary - width, axis=1)[:, vocabulary - width :]
        top[i : i + step] = np.sort(some, axis=1)[:, ::-1]
    return torch.from_numpy(top)


def _first(mask: Tensor) -> Tensor:
    """The first True of each row [n], 0 without one. (torch's argmax is slow on a CPU.)"""
    return torch.from_numpy(mask.numpy().argmax(1)) if mask.device.type == "cpu" else mask.int().argmax(1)


def _locate(probs: Tensor, top: Tensor, rank: Tensor, value: Tensor) -> Tensor:
    """The tokens [n] of the entries ``top[i, rank[i]]``, of probability `value` [n, 1]; equal ones by ascending id."""
    if probs.device.type == "cpu":
        equal = probs.numpy() == value.numpy()
        ids = equal.argmax(1)
        if np.count_nonzero(equal) > len(ids):
            for row in (np.count_nonzero(equal, axis=1) > 1).nonzero()[0]:
                skip = int(rank[row, 0]) - np.count_nonzero(top[row].numpy() > value[row].item())
                ids[row] = np.flatnonzero(equal[row])[skip]
        return torch.from_numpy(ids)
    nth = (rank - (top > value).sum(1, keepdim=True)) + 1
    equal = probs == value
    return _first(equal & (equal.cumsum(1) == nth))
