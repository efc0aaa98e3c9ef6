"""Exact top-p sampling by partial selection, inverted from one uniform a row.

The nucleus is that of the supplied recipe (`top_p_filter` of reasoning-from-scratch 0.2.0): probabilities sorted in
descending order, equal ones by token id, keep an entry while ``fl32(cumulative) - p < top_p`` in FP32 arithmetic (the
crossing token is kept, the first entry always). Only the largest few entries are sorted; rows whose cumulative mass
does not reach `top_p` within them are sorted in full, so the result never depends on the shortcut.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# Rows are handled in blocks of about this many probabilities on a CPU, to stay in the cache.
_BLOCK = 2**20


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
    rows, vocabulary = probs.shape
    block = max(1, _BLOCK // vocabulary) if probs.device.type == "cpu" else rows
    if rows <= block:
        return _sample_block(probs, uniform, top_p)
    parts = [_sample_block(p, u, top_p) for p, u in zip(probs.split(block), uniform.split(block))]
    return torch.cat([ids for ids, _ in parts]), torch.cat([logprobs for _, logprobs in parts])


def _sample_block(probs: Tensor, uniform: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    vocabulary = probs.shape[1]
    width = 128 if vocabulary <= 8192 else 2048
    if width * 4 > vocabulary:
        return _invert(probs, _largest(probs, vocabulary), uniform, top_p)[:2]
    ids, logprobs, open_ended = _invert(probs, _largest(probs, width), uniform, top_p)
    if open_ended.any():
        rest = open_ended.nonzero()[:, 0]
        full = probs[rest]
        ids[rest], logprobs[rest], _ = _invert(full, _largest(full, vocabulary), uniform[rest], top_p)
    return ids, logprobs


def _invert(probs: Tensor, top: Tensor, uniform: Tensor, top_p: float) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, log-probs, and the rows that the largest entries `top` [n, k], in descending order, do not settle."""
    width = top.shape[1]
    cumulative = top.cumsum(1, dtype=torch.float64)
    if top_p < 1:
        # the nucleus ends before the first entry whose prefix reaches top_p
        count = _first(cumulative.to(top.dtype).sub_(top) >= top_p)
        open_ended = count == 0
        last = torch.where(open_ended, width, count).sub_(1)[:, None]
        mass = cumulative.gather(1, last)
        target = uniform[:, None] * mass
    else:
        last = torch.full_like(uniform, width - 1, dtype=torch.long)[:, None]
        mass = cumulative[:, -1:] if width == probs.shape[1] else probs.sum(1, keepdim=True, dtype=torch.float64)
        target = uniform[:, None] * mass
        open_ended = target[:, 0] >= cumulative[:, -1]
    # a product that rounds up to the whole mass still names the last entry
    rank = torch.minimum(torch.searchsorted(cumulative, target, right=True), last)
    value = top.gather(1, rank)
    logprobs = (value / mass).log()[:, 0].to(probs.dtype)
    return _locate(probs, top, rank, value), logprobs, open_ended


def _largest(probs: Tensor, width: int) -> Tensor:
    """The `width` largest entries of each row in descending order (values only, so equal ones need no order)."""
    vocabulary = probs.shape[1]
    if probs.device.type != "cpu":
        return probs.topk(width).values if width < vocabulary else probs.sort(descending=True).values
    # NumPy's partition and sort of FP32 are vectorised: about 5 and 20 times as fast as torch's topk and sort on a CPU
    values = probs.numpy()
    if width < vocabulary:
        values = np.partition(values, vocabulary - width, axis=1)[:, vocabulary - width :]
    return torch.from_numpy(np.sort(values, axis=1)).flip(1)


def _first(mask: Tensor) -> Tensor:
    """The first True of each row [n], 0 without one. (torch's argmax is slow on a CPU.)"""
    return torch.from_numpy(mask.numpy().argmax(1)) if mask.device.type == "cpu" else mask.int().argmax(1)


def _locate(probs: Tensor, top: Tensor, rank: Tensor, value: Tensor) -> Tensor:
    """The tokens [n] of the entries ``top[i, rank[i]]``, of probability `value` [n, 1]; equal ones by ascending id."""
    if probs.device.type == "cpu":
        equal = probs.numpy() == value.numpy()
        ids = equal.argmax(1)
        if np.count_nonzero(equal) > len(ids):
            for row, skip in enumerate((rank[:, 0] - (top > value).sum(1)).tolist()):
                if skip:
                    ids[row] = np.flatnonzero(equal[row])[skip]
        return torch.from_numpy(ids)
    nth = (rank - (top > value).sum(1, keepdim=True)) + 1
    equal = probs == value
    return _first(equal & (equal.cumsum(1) == nth))
