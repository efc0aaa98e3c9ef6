"""Exact top-p sampling without sorting the vocabulary, inverted from one uniform a row.

The nucleus is that of the supplied recipe (`top_p_filter` of reasoning-from-scratch 0.2.0): probabilities sorted in
descending order, equal ones by token id, up to the first entry with ``fl32(cumulative) - p >= top_p`` in FP32
arithmetic (so the crossing token is kept, and the first entry always). Only entries near the two places that matter,
where the nucleus ends and where the uniform falls, are ever put in order. For a large vocabulary on a CPU these are
found by sums over bins of equal leading bits. Elsewhere the largest few entries are sorted; a row that these do not
settle is sorted in full. So the result never depends on the shortcut.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Longest rows of which a CPU sorts the whole batch at once; longer ones go one by one through the cache.
_SHORT = 8192
# Which of an FP32's two halves has its sign and exponent.
_UPPER = 1 if sys.byteorder == "little" else 0
# By what sums may be off: the nucleus ends where a cumulative sum, a difference and top_p, each rounded to FP32 (2^-25
# at most below 1), meet; sums of the same FP64 terms in another order are apart by far less than this.
_FP32_SLACK, _FP64_SLACK = 2e-7, 1e-10


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
    if vocabulary > _SHORT and probs.device.type == "cpu":
        found = [_invert_row(row, u, top_p) for row, u in zip(probs.numpy(), uniform.tolist())]
        ids, logprobs = zip(*found) if found else ((), ())
        return torch.tensor(ids, dtype=torch.long), torch.tensor(logprobs, dtype=probs.dtype)
    width = 128 if vocabulary <= _SHORT else 2048
    if width * 4 > vocabulary:
        return _invert(probs, largest(probs, vocabulary), uniform, top_p)[:2]
    ids, logprobs, open_ended = _invert(probs, largest(probs, width), uniform, top_p)
    if open_ended.any():
        rest = open_ended.nonzero()[:, 0]
        full = probs[rest]
        ids[rest], logprobs[rest], _ = _invert(full, largest(full, vocabulary), uniform[rest], top_p)
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
        mass = sums[:, -1:] if top.shape == probs.shape else probs.sum(1, keepdim=True, dtype=torch.float64)
        target = uniform[:, None] * mass
        open_ended = target >= sums[:, -1:]
    # a product that rounds up to the whole mass still names the last entry
    rank = torch.minimum(torch.searchsorted(sums, target, right=True), last)
    value = top.gather(1, rank)
    logprobs = (value / mass).log()[:, 0].to(probs.dtype)
    return _locate(probs, top, rank, value), logprobs, open_ended[:, 0]


def _invert_row(probs: NDArray[np.float32], uniform: float, top_p: float) -> tuple[int, float]:
    """Token and log-prob of one long row without sorting it: entries are summed by their upper 16 bits (sign, exponent
    and 7 bits of the fraction), and only those of the bins in which the sums cross a value are sorted."""
    mass_of = np.bincount((probs.view(np.uint32) >> 16).astype(np.intp), weights=probs)
    filled = np.flatnonzero(mass_of)[::-1]
    above = np.concatenate([[0.0], mass_of[filled].cumsum()])  # each filled bin: the mass of larger ones
    if np.isnan(above[-1]):
        return 0, np.nan
    # bin i has the entries from edges[i + 1] to below edges[i]
    edges = (np.concatenate([filled[:1] + 1, filled]).astype(np.uint32) << 16).view(np.float32)

    def near(value: float, slack: float) -> tuple[int, NDArray[np.float32], NDArray[np.float64]]:
        """The entries of the bins in which the sums cross `value`, give or take: rank of the first, entries, sums."""
        first, last = np.searchsorted(above[1:-1], [value - slack, value + slack], side="right").tolist()
        larger = probs >= edges[first]
        entries = np.sort(probs[(probs >= edges[last + 1]) ^ larger])[::-1]
        return int(np.count_nonzero(larger)), entries, entries.cumsum(dtype=np.float64) + above[first]

    last, mass = len(probs) - 1, above[-1]
    if top_p < 1:
        first, entries, sums = near(top_p, _FP32_SLACK)
        ended = sums.astype(np.float32) - entries >= np.float32(top_p)
        count = max(1, int(ended.argmax())) if ended.any() else len(entries)
        last, mass = first + count - 1, sums[count - 1]
    target = uniform * mass
    first, entries, sums = near(target, _FP64_SLACK)
    rank = min(int(np.searchsorted(sums, target, side="right")), len(entries) - 1, last - first)
    value = entries[rank]
    ids = np.flatnonzero(probs == value)
    skip = rank - np.count_nonzero(entries > value) if len(ids) > 1 else 0
    return int(ids[skip]), float(np.log(value / mass))


def largest(probs: Tensor, width: int) -> Tensor:
    """The `width` largest entries of each row in descending order (values only, so equal ones need no order)."""
    vocabulary = probs.shape[1]
    if probs.device.type != "cpu":
        return probs.topk(width).values if width < vocabulary else probs.sort(descending=True).values
    # NumPy's partition and sort of FP32 are vectorised: up to 5 and 20 times as fast as torch's topk and sort on a CPU
    top = probs.numpy()
    if width < vocabulary:
        top = np.partition(top, vocabulary - width, axis=1)[:, vocabulary - width :]
    return torch.from_numpy(np.sort(top, axis=1)[:, ::-1].copy())


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
