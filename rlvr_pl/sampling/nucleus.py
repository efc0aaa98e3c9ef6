"""Exact top-p sampling by partial selection, inverted from one uniform a row.

The nucleus is that of the supplied recipe (`top_p_filter` of reasoning-from-scratch 0.2.0): probabilities sorted in
descending order, equal ones by token id, keep an entry while ``fl32(cumulative) - p < top_p`` in FP32 arithmetic (the
crossing token is kept, the first entry always). Only the largest few entries are sorted; rows whose cumulative mass
does not reach `top_p` within them are sorted in full, so the result never depends on the shortcut.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Tensor

# The FP32 rule compares fl32(cumulative) - p; this far above top_p no rounding can let a later entry in.
_SLACK = 2.0**-20
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
    width = 64 if vocabulary <= 8192 else 2048
    if width * 4 > vocabulary:
        return _invert(probs, _largest(probs, vocabulary), uniform, top_p)
    top = _largest(probs, width)
    # mass before the last selected entry; NaN counts as reached, so that it is reported and not sorted
    reached = ~(top[:, :-1].sum(1, dtype=torch.float64) < _target(uniform, top_p))
    ids, logprobs = _invert(probs, top, uniform, top_p)
    if not reached.all():
        rest = (~reached).nonzero()[:, 0]
        full = probs[rest]
        ids[rest], logprobs[rest] = _invert(full, _largest(full, vocabulary), uniform[rest], top_p)
    return ids, logprobs


def _target(uniform: Tensor, top_p: float) -> Tensor | float:
    """The mass that the selected entries must hold for the draw to be theirs: the whole nucleus must be among them,
    or, when every token is kept, the drawn one."""
    return top_p + _SLACK if top_p < 1 else uniform + _SLACK


def _invert(probs: Tensor, top: Tensor, uniform: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Tokens and log-probs, given the largest entries `top` [n, k] in descending order (the whole nucleus at least)."""
    if top_p < 1:
        keep = top.cumsum(1) - top < top_p
        keep[:, 0] = True
        cumulative = torch.where(keep, top, 0).cumsum(1, dtype=torch.float64)
        mass = cumulative[:, -1]
    else:
        cumulative = top.cumsum(1, dtype=torch.float64)
        mass = cumulative[:, -1] if top.shape[1] == probs.shape[1] else probs.sum(1, dtype=torch.float64)
    # below the mass even if the product rounds up to it: the first entry above the target then exists and is kept
    target = torch.minimum(uniform * mass, torch.nextafter(mass, torch.zeros_like(mass)))
    rank = (cumulative <= target[:, None]).sum(1, keepdim=True).clamp_(max=top.shape[1] - 1)
    value = top.gather(1, rank)
    tied_before = rank[:, 0] - (top > value).sum(1)
    return _locate(probs, value, tied_before), (value[:, 0] / mass).log().to(probs.dtype)


def _largest(probs: Tensor, width: int) -> Tensor:
    """The `width` largest entries of each row in descending order (values only, so equal ones need no order)."""
    rows, vocabulary = probs.shape
    if probs.device.type != "cpu":
        return probs.topk(width).values if width < vocabulary else probs.sort(descending=True).values
    # NumPy's partition and sort of FP32 are vectorised: about 5 and 20 times as fast as torch's topk and sort on a CPU
    values = probs.numpy()
    if width < vocabulary:
        values = np.partition(values, vocabulary - width, axis=1)[:, vocabulary - width :]
    return torch.from_numpy(np.sort(values, axis=1)).flip(1)


def _locate(probs: Tensor, value: Tensor, tied_before: Tensor) -> Tensor:
    """The token whose probability is `value` [n, 1], skipping `tied_before` [n] equal ones of lower id."""
    if probs.device.type == "cpu":
        equal = probs.numpy() == value.numpy()
        ids = equal.argmax(1)
        for row in tied_before.numpy().nonzero()[0]:
            ids[row] = np.flatnonzero(equal[row])[int(tied_before[row])]
        return torch.from_numpy(ids)
    equal = probs == value
    nth = equal.cumsum(1, dtype=torch.int32) == (tied_before[:, None] + 1)
    return (equal & nth).int().argmax(1)


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """The distribution that `sample` draws from, [n, V], computed plainly by a full stable sort."""
    ordered, index = cast("tuple[Tensor, Tensor]", torch.sort(probs, dim=1, descending=True, stable=True))
    keep = ordered.cumsum(1) - ordered < top_p if top_p < 1 else torch.ones_like(ordered, dtype=torch.bool)
    keep[:, 0] = True
    kept = torch.zeros_like(probs).scatter(1, index, torch.where(keep, ordered, 0))
    return kept / kept.sum(1, keepdim=True)
