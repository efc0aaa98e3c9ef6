"""Advantages by hand-worked numbers. All are FP64 with values of size 1: 1e-12 is some thousand roundings."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlvr_pl.core.advantage import (
    group_advantage,
    group_centred,
    leave_one_out,
    length_weighted_advantage,
    max_rl_advantage,
    pass_at_k_advantage,
    whiten,
)
from rlvr_pl.core.passk import pass_at_k

NAN = math.nan
GROUP_BASELINES = {
    "group_advantage": group_advantage,
    "batch_std": lambda r, g: group_advantage(r, g, scale="batch-std"),
    "leave_one_out": leave_one_out,
    "length_weighted": lambda r, g: length_weighted_advantage(r, range(1, len(r) + 1), g),
    "max_rl": max_rl_advantage,
    "centred": group_centred,
}


def close(found: torch.Tensor, expected: list[float]) -> None:
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(expected, abs=1e-12, rel=0)


def test_supplied_advantage() -> None:
    # mean 1/4; squares 9/16 + 3/16 = 3/4, over n - 1 = 3: variance 1/4, std 1/2.
    close(group_advantage([1, 0, 0, 0], 4), [0.75 / 0.5001, *[-0.25 / 0.5001] * 3])


def test_population_deviation_and_eps() -> None:
    # variance (3/4)/4 = 3/16.
    close(group_advantage([1, 0, 0, 0], 4, ddof=0, eps=0.0), [math.sqrt(3), *[-1 / math.sqrt(3)] * 3])


def test_scales() -> None:
    rewards = [1, 0, 1, 1]
    close(group_advantage(rewards, 2, scale="none"), [0.5, -0.5, 0, 0])
    # All four: mean 3/4, variance (3/4)/3 = 1/4, std 1/2; each group keeps its own mean.
    close(group_advantage(rewards, 2, scale="batch-std"), [0.5 / 0.5001, -0.5 / 0.5001, 0, 0])


def test_two_groups_of_one_question_stay_two_groups() -> None:
    # std of (1, 0) is 1/sqrt(2).
    a = 0.5 / (math.sqrt(0.5) + 1e-4)
    close(group_advantage([1, 0, 0, 0], 2), [a, -a, 0, 0])


def test_unscorable_rewards_leave_the_statistics() -> None:
    a = 0.5 / (math.sqrt(0.5) + 1e-4)  # of (1, 0), mean 1/2
    close(group_advantage([1, NAN, 0, NAN], 4), [a, 0, -a, 0])
    close(leave_one_out([1, NAN, 0, NAN], 4), [1, 0, -1, 0])
    close(length_weighted_advantage([1, NAN, 0, NAN], [3, 100, 1, 100], 4), [0.25, 0, -0.75, 0])  # baseline 3/4
    close(max_rl_advantage([1, NAN, 0, NAN], 4), [1, 0, -1, 0])
    close(pass_at_k_advantage([1, NAN, 0, NAN], 4, 1), [1, 0, -1, 0])
    close(whiten([1, NAN, 0, NAN], eps=0.0), [math.sqrt(0.5), 0, -math.sqrt(0.5), 0])


@pytest.mark.parametrize("scale", ["std", "none", "batch-std"])
def test_the_only_score_of_a_group_has_advantage_zero(scale) -> None:
    close(group_advantage([NAN, 3.0, NAN, NAN], 2, scale=scale), [0, 0, 0, 0])
    close(leave_one_out([NAN, 3.0, NAN, NAN], 2), [0, 0, 0, 0])


def test_leave_one_out() -> None:
    close(leave_one_out([1, 0, 0, 0, 1, 1, 0, 0], 4), [1, -1 / 3, -1 / 3, -1 / 3, 2 / 3, 2 / 3, -2 / 3, -2 / 3])


def test_length_weighted_baseline() -> None:
    # baseline (2*1 + 6*0)/(2 + 6) = 1/4.
    close(length_weighted_advantage([1, 0], [2, 6], 2), [0.75, -0.25])
    close(length_weighted_advantage([1, 0], [0, 0], 2), [0, 0])


def test_max_rl_gives_each_success_one_over_successes() -> None:
    advantage = max_rl_advantage([1, 0, 0, 1, 0, 0, 0, 0], 4)
    close(advantage, [1, -1, -1, 1, 0, 0, 0, 0])
    # Averaged over the group: 1/2 for each of the two successes, minus 1/4 for all.
    close(advantage[:4] / 4, [1 / 2 - 1 / 4, -1 / 4, -1 / 4, 1 / 2 - 1 / 4])


def test_pass_at_k_by_enumeration_of_subsets() -> None:
    """The mean, over the k-subsets that hold i, of (best reward - mean)/deviation over all k-subsets."""
    from itertools import combinations

    rewards, k = [1, 0, 0, 0, 1, 0], 3
    subsets = list(combinations(range(6), k))
    best = np.array([max(rewards[i] for i in s) for s in subsets])
    scaled = (best - best.mean()) / best.std()
    expected = [scaled[[i in s for s in subsets]].mean() for i in range(6)]
    close(pass_at_k_advantage(rewards, 6, k), expected)
    assert best.mean() == pytest.approx(pass_at_k(6, 2, k), abs=1e-12)


def test_pass_at_k_where_every_subset_agrees() -> None:
    close(pass_at_k_advantage([0, 0, 0, 0], 4, 2), [0] * 4)
    close(pass_at_k_advantage([1, 1, 1, 0], 4, 2), [0] * 4)  # two wrong ones cannot be drawn


def test_whiten_over_the_update() -> None:
    # mean 1/4, std 1/2 as above.
    close(whiten([1, 0, 0, 0], eps=0.0), [1.5, -0.5, -0.5, -0.5])
    close(whiten([0.7] * 3), [0, 0, 0])


@pytest.mark.parametrize("baseline", GROUP_BASELINES.values(), ids=GROUP_BASELINES.keys())
@given(st.floats(-10, 10), st.integers(2, 9))
def test_a_uniform_group_has_advantage_exactly_zero(baseline, reward: float, size: int) -> None:
    assert baseline([reward] * size, size).tolist() == [0.0] * size


@pytest.mark.parametrize("baseline", [*GROUP_BASELINES.values(), lambda r, g: pass_at_k_advantage(r, g, 1)])
def test_groups_that_cannot_have_a_baseline_name_the_setting(baseline) -> None:
    for size, count in ((1, 2), (0, 2), (2, 3)):
        with pytest.raises(ValueError, match="group_size"):
            baseline([1.0] * count, size)


def test_wrong_names_list_the_accepted_ones() -> None:
    with pytest.raises(ValueError, match="std, none, batch-std"):
        group_advantage([1, 0], 2, scale="standard")
    with pytest.raises(ValueError, match=r"k=5 .* group_size=4"):
        pass_at_k_advantage([1, 0, 0, 0], 4, 5)


@given(st.lists(st.floats(0, 1), min_size=6, max_size=6))
def test_advantages_of_a_group_sum_to_zero(rewards: list[float]) -> None:
    for advantage in (group_advantage(rewards, 3, scale="none"), leave_one_out(rewards, 3)):
        assert advantage.view(2, 3).sum(1).tolist() == pytest.approx([0, 0], abs=1e-12)


def test_arrays_tensors_and_lists_are_alike() -> None:
    for kind in (np.array, torch.tensor):
        close(leave_one_out(kind([1.0, 0.0]), 2), [1, -1])
