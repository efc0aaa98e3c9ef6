"""The nucleus and the draw from it, against a full stable sort and against the supplied recipe's own filter."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlvr_pl.sampling import nucleus


def stable_filter(probs: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Token ids in the sorted order and the renormalised probabilities there (FP64), zero outside the nucleus."""
    ordered, ids = torch.sort(probs, dim=1, descending=True, stable=True)
    if top_p < 1:
        ended = (ordered.cumsum(1) - ordered >= top_p).long().cumsum(1) > 0
        ended[:, 0] = False
        ordered = torch.where(ended, 0, ordered)
    return ids, ordered.double() / ordered.double().sum(1, keepdim=True)


def draw_plainly(probs: Tensor, uniform: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    ids, kept = stable_filter(probs, top_p)
    rank = torch.searchsorted(kept.cumsum(1), uniform[:, None], right=True)
    rank = torch.minimum(rank, (kept > 0).sum(1, keepdim=True) - 1)
    return ids.gather(1, rank)[:, 0], kept.gather(1, rank)[:, 0].log()


def row(*probs: float) -> Tensor:
    return torch.tensor([probs], dtype=torch.float32)


@pytest.mark.parametrize(
    ("probs", "top_p", "nucleus_ids"),
    [
        ((0.5, 0.3, 0.2), 0.7, [0, 1]),  # 0.5 before the second token < 0.7; 0.8 before the third
        ((0.5, 0.41, 0.09), 0.9, [0, 1]),  # the crossing token is kept
        ((0.7, 0.2, 0.1), 0.9, [0, 1]),  # FP32: 1.0 - 0.1 is 0.9 to the last bit, so the third is out
        ((0.25, 0.25, 0.25, 0.25), 0.5, [0, 1]),  # ties: the lower ids, exactly two
        ((0.1, 0.45, 0.45), 0.5, [1, 2]),
        ((0.1, 0.2, 0.7), 0.01, [2]),  # one token at least
        ((0.1, 0.2, 0.7), 1.0, [2, 1, 0]),
    ],
)
def test_nuclei_by_hand(probs: tuple[float, ...], top_p: float, nucleus_ids: list[int]):
    mass = sum(probs[i] for i in nucleus_ids)
    below = 0.0
    for i in nucleus_ids:  # just above and just below the edges of each token's share of [0, 1)
        share = probs[i] / mass
        for uniform in (below + 1e-6, below + share - 1e-6):
            ids, logprobs = nucleus.sample(row(*probs), torch.tensor([uniform], dtype=torch.float64), top_p)
            assert ids.tolist() == [i]
            assert logprobs.item() == pytest.approx(np.log(share), abs=1e-6)
        below += share


def test_logprob_is_of_the_renormalised_distribution():
    # p = [0.5, 0.3, 0.2], top_p 0.7: token 0 has 0.5 / 0.8 = 0.625
    _, logprobs = nucleus.sample(row(0.5, 0.3, 0.2), torch.tensor([0.3], dtype=torch.float64), 0.7)
    assert logprobs.exp().item() == pytest.approx(0.625, abs=1e-6)


def test_edges_of_the_unit_interval():
    for uniform, token in ((0.0, 0), (1 - 2.0**-53, 1)):
        ids, _ = nucleus.sample(row(0.5, 0.3, 0.2), torch.tensor([uniform], dtype=torch.float64), 0.7)
        assert ids.item() == token


@settings(max_examples=150, deadline=None)
@given(
    weights=st.lists(st.lists(st.integers(0, 5), min_size=7, max_size=7), min_size=1, max_size=6),
    top_p=st.sampled_from([0.1, 0.25, 0.5, 0.75, 0.9, 0.999, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_equals_the_stable_sort_with_many_ties(weights: list[list[int]], top_p: float, seed: int):
    table = torch.tensor(weights, dtype=torch.float32) + torch.eye(7)[seed % 7]  # not all zero
    probs = table / table.sum(1, keepdim=True)
    uniform = torch.rand(len(probs), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ids, logprobs = nucleus.sample(probs, uniform, top_p)
    expected_ids, expected_logprobs = draw_plainly(probs, uniform, top_p)
    assert ids.tolist() == expected_ids.tolist()
    # FP32 rounding of one logarithm of magnitude below 4
    torch.testing.assert_close(logprobs.double(), expected_logprobs, rtol=0, atol=1e-6)


# 300 and 1,200: selection of the largest 128; 9,000 and 20,000: bins. Scale 0: all equal; 0.3: the nucleus is most of
# the vocabulary, so selection falls back; 4: a handful of tokens.
@pytest.mark.parametrize("vocabulary", [300, 1200, 9000, 20_000])
@pytest.mark.parametrize("scale", [0.0, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.99, 1.0])
def test_shortcuts_equal_the_full_sort(vocabulary: int, scale: float, top_p: float):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(6, vocabulary, generator=generator) * scale
    logits[::2] = (logits[::2] * 8).round() / 8  # every other row full of ties
    probs = logits.softmax(-1)
    uniform = torch.rand(6, generator=generator, dtype=torch.float64)
    ids, logprobs = nucleus.sample(probs, uniform, top_p)
    expected_ids, expected_logprobs = draw_plainly(probs, uniform, top_p)
    assert ids.tolist() == expected_ids.tolist()
    torch.testing.assert_close(logprobs.double(), expected_logprobs, rtol=0, atol=2e-6)


LONG = 9000


def long_row(*stretches: tuple[int, float]) -> Tensor:
    """[1, LONG] FP32: so many entries of a probability each, the rest 0, in an order of no meaning."""
    entries = torch.cat([torch.full((count,), value, dtype=torch.float64) for count, value in stretches])
    table = torch.zeros(LONG, dtype=torch.float64)
    table[: len(entries)] = entries
    return table[torch.randperm(LONG, generator=torch.Generator().manual_seed(0))].float()[None]


@settings(max_examples=150, deadline=None)
@given(
    stretches=st.lists(st.tuples(st.integers(1, 2000), st.integers(-40, 0), st.integers(0, 3)), min_size=1, max_size=4),
    top_p=st.sampled_from([1e-9, 0.25, 0.5, 0.75, 0.9, 0.999, 1 - 1e-7, 1.0]),
    uniform=st.sampled_from([0.0, 0.25, 0.5, 0.75, 1 - 2.0**-53]) | st.floats(0, 1, exclude_max=True),
)
def test_long_rows_equal_the_stable_sort(stretches, top_p: float, uniform: float):
    """Stretches of equal entries in the same bin, in neighbouring bins and far apart, and a tail of zeros."""
    probs = long_row(*((count, 2.0**power * (1 + tail / 256)) for count, power, tail in stretches))
    probs = (probs.double() / probs.double().sum()).float()
    drawn, logprobs = nucleus.sample(probs, torch.tensor([uniform], dtype=torch.float64), top_p)
    ordered, order = torch.sort(probs[0], descending=True, stable=True)
    sums = ordered.double().cumsum(0)
    kept = len(ordered)
    if top_p < 1:  # the arithmetic of `top_p_filter` on sums that are right
        ended = sums.float() - ordered >= torch.tensor(top_p, dtype=torch.float32)
        kept = max(1, int(ended.long().argmax())) if ended.any() else kept
    mass = float(sums[kept - 1])
    target = uniform * mass
    # FP64 sums of 8,000 terms that make 1, in whatever order, are apart by 8,000 * 2^-53 < 1e-12; where the target is
    # that near to an edge, the entry across it is as right
    edges = torch.tensor([target - 1e-12, target + 1e-12], dtype=torch.float64)
    low, high = torch.searchsorted(sums, edges, right=True).clamp(max=kept - 1).tolist()
    assert int(drawn) in order[low : high + 1].tolist()
    # FP32 rounds a number below 32 by 2^-20
    assert logprobs.item() == pytest.approx(math.log(float(probs[0, drawn]) / mass), abs=1e-6)


def test_a_nucleus_that_ends_at_the_edge_of_a_bin():
    """0.5 + 0.25 = top_p: the first entry of the next bin is out, however the uniform falls."""
    probs = long_row((1, 0.5), (1, 0.25), (4, 0.0625))
    first, second = (int((probs[0] == value).nonzero()) for value in (0.5, 0.25))
    for uniform, token in ((0.0, first), (2 / 3 - 1e-9, first), (2 / 3 + 1e-9, second), (1 - 2.0**-53, second)):
        ids, logprobs = nucleus.sample(probs, torch.tensor([uniform], dtype=torch.float64), 0.75)
        assert ids.item() == token
        assert logprobs.item() == pytest.approx(np.log(2 / 3 if token == first else 1 / 3), abs=1e-6)


@pytest.mark.parametrize("vocabulary", [8, 600, 20_000])
def test_equals_the_supplied_filter(vocabulary: int):
    top_p_filter = pytest.importorskip("reasoning_from_scratch.ch04").top_p_filter
    generator = torch.Generator().manual_seed(3)
    probs = (torch.randn(8, vocabulary, generator=generator) * 3).softmax(-1)
    probs[0] = 1 / vocabulary
    for top_p in (0.3, 0.9, 0.95):
        supplied = top_p_filter(probs, top_p)
        _, kept = stable_filter(probs, top_p)
        # which of equal tokens the supplied filter keeps is up to torch's sort, so compare in the order of size;
        # both renormalise, one in FP32: a few ulps of 1
        torch.testing.assert_close(supplied.sort(1, descending=True).values.double(), kept, rtol=1e-5, atol=1e-9)
        ids, logprobs = nucleus.sample(probs, torch.full((8,), 0.6, dtype=torch.float64), top_p)
        drawn = supplied.gather(1, ids[:, None])[1:, 0]
        torch.testing.assert_close(drawn.log(), logprobs[1:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("top_p", [0.8, 1.0])
def test_a_grid_of_uniforms_gives_the_distribution(top_p: int):
    probs = (torch.randn(1, 40, generator=torch.Generator().manual_seed(5)) * 1.5).softmax(-1)
    steps = 4000
    uniform = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    ids, _ = nucleus.sample(probs.expand(steps, -1).contiguous(), uniform, top_p)
    counts = torch.bincount(ids, minlength=40).double()
    order, kept = stable_filter(probs, top_p)
    expected = torch.zeros(40, dtype=torch.float64).scatter(0, order[0], kept[0]) * steps
    # an interval of length p holds between p steps - 1 and p steps + 1 of the grid's points
    assert (counts - expected).abs().max() <= 1


@pytest.mark.parametrize("vocabulary", [5, 1200, 20_000])
@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_nan_rows_are_told_and_leave_the_others_alone(vocabulary: int, top_p: float):
    probs = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(1)).softmax(-1)
    clean_ids, clean_logprobs = nucleus.sample(probs, torch.full((3,), 0.5, dtype=torch.float64), top_p)
    probs[1] = torch.nan
    ids, logprobs = nucleus.sample(probs, torch.full((3,), 0.5, dtype=torch.float64), top_p)
    assert logprobs[1].isnan()
    assert ids[[0, 2]].tolist() == clean_ids[[0, 2]].tolist()
    assert torch.equal(logprobs[[0, 2]], clean_logprobs[[0, 2]])
