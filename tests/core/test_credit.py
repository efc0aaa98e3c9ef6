"""Fork credit: worked examples, exact enumeration of a small tree, transforms."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr_pl.core.credit import (
    entropy_forks,
    mid_ranks,
    permutation,
    segment_credit,
    suffix_credit,
    transform_credit,
    tree_credit,
)

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "fork_credit.json").read_text())
EXACT = {"abs": 1e-12, "rel": 0}
KINDS = ("raw", "rankc", "srank", "sign", "uniform", "shuffled", "shuffled_rankc")

groups = st.integers(2, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=n, max_size=n),
        st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=n, max_size=n),
    )
)
credits = st.lists(st.integers(-12, 12).map(lambda i: i / 7), min_size=1, max_size=30)


def brute_force(token_ids: list[list[int]], rewards: list[float]) -> dict[tuple[int, int], tuple[float, ...]]:
    """The definition, token by token: (rollout, position) -> (n, n_child, V, Q, credit)."""
    found = {}
    for i, ids in enumerate(token_ids):
        for t in range(len(ids)):
            at = [j for j, other in enumerate(token_ids) if len(other) > t and other[:t] == ids[:t]]
            child = [j for j in at if token_ids[j][t] == ids[t]]
            if len(child) < len(at):
                v, q = (sum(rewards[j] for j in rows) / len(rows) for rows in (at, child))
                found[i, t] = (len(at), len(child), v, q, len(at) / (len(at) - 1) * (q - v))
    return found


def test_worked_tree() -> None:
    tree = GOLDEN["trie"]
    found = tree_credit(tree["token_ids"], tree["rewards"])
    assert len(found) == 14
    for fork, expected in zip(found, tree["instances"], strict=True):
        assert {name: getattr(fork, name) for name in expected} == pytest.approx(expected, **EXACT)
    values = [fork.credit for fork in found]
    assert sum(values) == pytest.approx(0, **EXACT)
    assert transform_credit(values, "rankc") == pytest.approx(tree["rankc"], **EXACT)
    assert transform_credit(values, "srank") == pytest.approx(tree["srank"], **EXACT)


@given(groups)
def test_tree_is_its_definition(group) -> None:
    token_ids, rewards = group
    found = {(f.rollout, f.position): (f.n, f.n_child, f.value, f.q, f.credit) for f in tree_credit(*group)}
    expected = brute_force(token_ids, rewards)
    assert found.keys() == expected.keys()
    for key, numbers in expected.items():
        assert found[key] == pytest.approx(numbers, **EXACT)


@given(groups)
def test_credit_is_the_childs_mean_of_reward_minus_leave_one_out(group) -> None:
    token_ids, rewards = group
    for f in tree_credit(token_ids, rewards):
        prefix = token_ids[f.rollout][: f.position]
        at = [j for j, ids in enumerate(token_ids) if len(ids) > f.position and ids[: f.position] == prefix]
        own = [j for j in at if token_ids[j][f.position] == token_ids[f.rollout][f.position]]
        total = sum(rewards[j] for j in at)
        advantages = [rewards[j] - (total - rewards[j]) / (len(at) - 1) for j in own]
        assert f.credit == pytest.approx(sum(advantages) / len(advantages), **EXACT)


def test_unscorable_rollouts_take_no_part() -> None:
    token_ids = [[1, 2], [1, 3], [1, 4], [2, 2]]
    found = tree_credit(token_ids, [1.0, 0.0, math.nan, math.nan])
    # Left are the first two, which part at position 1: n = 2, V = 1/2, credit 2/1 * (+-1/2).
    assert [(f.rollout, f.position, f.credit) for f in found] == [(0, 1, 1.0), (1, 1, -1.0)]
    assert tree_credit(token_ids, [math.nan] * 4) == []


def test_equal_or_nested_rollouts_have_no_fork() -> None:
    assert tree_credit([[1, 2], [1, 2]], [1, 0]) == []
    assert tree_credit([[1], [1, 2], []], [1, 0, 1]) == []  # only one acts after the first token


def test_a_tree_of_one_is_refused() -> None:
    for function in (tree_credit, suffix_credit):
        with pytest.raises(ValueError, match="group_size"):
            function([[1, 2]], [1.0])


@given(groups)
def test_suffix_is_its_definition(group) -> None:
    token_ids, rewards = group
    for i, (ids, credit) in enumerate(zip(token_ids, suffix_credit(token_ids, rewards))):
        assert len(credit) == len(ids)
        for t in range(len(ids)):
            for depth in range(t, -1, -1):
                others = [j for j, o in enumerate(token_ids) if j != i and len(o) > depth and o[:depth] == ids[:depth]]
                if others:
                    baseline = sum(rewards[j] for j in others) / len(others)
                    assert credit[t] == pytest.approx(rewards[i] - baseline, **EXACT)
                    break
            else:
                assert credit[t] == 0  # no other scorable rollout acts at all


def test_expected_gradients_by_enumeration() -> None:
    """Every group of 3 and of 4 on a binary tree of depth 2: the expected gradient over the true one, by node."""
    spec = GOLDEN["enumeration"]
    take_one = {node: 1 / (1 + math.exp(-logit)) for node, logit in spec["logits"].items()}
    leaves = ["00", "01", "10", "11"]

    def probability(node: str, action: str) -> float:
        return take_one[node] if action == "1" else 1 - take_one[node]

    def score(node: str, action: str) -> float:  # d log p / d logit of action 1
        return (action == "1") - take_one[node]

    def likelihood(leaf: str) -> float:
        return probability("", leaf[0]) * probability(leaf[0], leaf[1])

    def gradient(size: int, credit) -> dict[str, float]:
        total = dict.fromkeys(take_one, 0.0)
        for group in product(leaves, repeat=size):
            weight = math.prod(map(likelihood, group)) / size
            tokens, rewards = [[int(a) for a in leaf] for leaf in group], [spec["rewards"][leaf] for leaf in group]
            for i, t, c in credit(tokens, rewards):
                total[group[i][:t]] += weight * c * score(group[i][:t], group[i][t])
        return total

    def fork(tokens, rewards):
        return [(f.rollout, f.position, f.credit) for f in tree_credit(tokens, rewards)]

    def suffix(tokens, rewards):
        return [(i, t, c) for i, row in enumerate(suffix_credit(tokens, rewards)) for t, c in enumerate(row)]

    truth = dict.fromkeys(take_one, 0.0)
    for leaf in leaves:
        for t in (0, 1):
            truth[leaf[:t]] += likelihood(leaf) * spec["rewards"][leaf] * score(leaf[:t], leaf[t])
    assert truth == pytest.approx(spec["true_gradient"], abs=1e-6)  # the file gives six decimals
    for size in (3, 4):
        ratios = {node: value / truth[node] for node, value in gradient(size, fork).items()}
        assert ratios == pytest.approx(spec["fork_ratio"][f"G{size}"], abs=1e-4)
        # 1 - (1 - d)^(G - 1), with d the probability of reaching the node.
        reach = {"": 1.0, "0": 1 - take_one[""], "1": take_one[""]}
        assert ratios == pytest.approx({u: 1 - (1 - d) ** (size - 1) for u, d in reach.items()}, abs=1e-9)
        unbiased = {node: value / truth[node] for node, value in gradient(size, suffix).items()}
        assert unbiased == pytest.approx(dict.fromkeys(truth, spec["suffix_ratio"]), abs=1e-9)


def test_segments_telescope() -> None:
    case = GOLDEN["segment"]
    others = (case["group_correct"] - case["reward"]) / (case["group_size"] - 1)
    # Ten tokens, forks before tokens 2 and 7.
    credit = segment_credit(10, [2, 7], case["values"], others, case["reward"])
    first, second, third = case["credits"]
    assert credit.tolist() == pytest.approx([first] * 2 + [second] * 5 + [third] * 3, **EXACT)
    assert first + second + third == pytest.approx(case["sum"], **EXACT)


def test_entropy_forks() -> None:
    entropy = [2, 0, 3, 3, 0, 3, 1, 9]
    assert entropy_forks(entropy, 2, gap=3, limit=9) == [0, 3, 7]
    assert entropy_forks(entropy, 2, gap=3, limit=2) == [0, 3]
    assert entropy_forks(entropy, 10) == []
    assert entropy_forks([], 0) == []


def test_mid_ranks_of_the_worked_tree() -> None:
    values = np.array([0.3, 1 / 3, 0.3, 1 / 3, 0.3, -1 / 3, -1, 0.3, -1 / 3, 1, -0.6, 0, -0.6, 0])
    ranks = dict(zip(values.tolist(), mid_ranks(values).tolist()))
    assert ranks == {-1: 1, -0.6: 2.5, -1 / 3: 4.5, 0: 6.5, 0.3: 9.5, 1 / 3: 12.5, 1: 14}


def test_ranks_ignore_rounding_noise() -> None:
    assert mid_ranks(np.array([0.1 + 0.2, 0.3, -0.0, 0.0])).tolist() == [3.5, 3.5, 1.5, 1.5]


def test_worked_losses() -> None:
    case = GOLDEN["loss"]
    credit, logprob = np.array(case["credit"]), np.array(case["logprob"])

    def loss(values) -> float:
        return float(-(np.asarray(values) * logprob).sum() / case["Z"])

    assert loss(credit) == pytest.approx(case["raw"], **EXACT)
    assert loss(credit[case["permutation"]]) == pytest.approx(case["shuffled_uncentred"], **EXACT)
    assert loss(transform_credit(credit, "uniform")) == pytest.approx(case["uniform"], **EXACT)
    assert loss(transform_credit(credit, "rankc")) == pytest.approx(case["rankc"], **EXACT)


def test_sign_keeps_the_mean_magnitude() -> None:
    # mean |C| = (1 + 3 + 0 + 4)/4 = 2.
    assert transform_credit([1, -3, 0, 4], "sign") == [2, -2, 0, 2]


@pytest.mark.parametrize("kind", ["rankc", "srank", "shuffled", "shuffled_rankc"])
def test_one_credit_or_none(kind) -> None:
    assert transform_credit([], kind) == []
    assert transform_credit([0.0], kind) == [0.0]


@given(credits)
def test_rankc_is_centred_bounded_and_monotone(values) -> None:
    ranks = np.array(transform_credit(values, "rankc"))
    assert abs(ranks.sum()) < 1e-12
    assert (np.abs(ranks) <= 0.5).all()
    order = np.argsort(values, kind="stable")
    assert (np.diff(ranks[order]) >= 0).all()


@given(credits)
def test_srank_keeps_sign_and_zero(values) -> None:
    assert np.sign(transform_credit(values, "srank")).tolist() == np.sign(values).tolist()


@given(credits, st.integers(0, 99))
def test_shuffled_is_the_centred_multiset(values, update) -> None:
    centred = np.array(values) - np.mean(values)
    shuffled = transform_credit(values, "shuffled", seed=7, update=update)
    assert sorted(shuffled) == sorted(centred.tolist())
    assert shuffled == transform_credit(values, "shuffled", seed=7, update=update)
    order = permutation(len(values), 7, update)
    ranks = np.array(transform_credit(values, "rankc"))
    assert transform_credit(values, "shuffled_rankc", seed=7, update=update) == ranks[order].tolist()


def test_shuffled_is_uncorrelated_with_raw() -> None:
    """Over 2,000 seeds the mean correlation lies within 3 standard errors of 0: under a uniform permutation its
    expectation is exactly 0. The seeds are fixed, so that the test gives the same answer each time."""
    values = [f.credit for f in tree_credit(GOLDEN["trie"]["token_ids"], GOLDEN["trie"]["rewards"])]
    found = [np.corrcoef(values, transform_credit(values, "shuffled", seed=seed))[0, 1] for seed in range(2000)]
    assert abs(np.mean(found)) < 3 * np.std(found, ddof=1) / math.sqrt(len(found))


def test_permutations_are_named_by_seed_update_and_group() -> None:
    names = [(0, 0, None), (1, 0, None), (0, 1, None), (0, 0, "q1/0"), (0, 0, "q2/0")]
    assert len({tuple(permutation(50, *name)) for name in names}) == len(names)


def test_permutations_are_uniform() -> None:
    """All 6 orders of 3 over 6,000 updates: chi-squared with 5 degrees of freedom exceeds 20.5 once in 1,000."""
    counts = np.unique([permutation(3, 0, update) for update in range(6000)], axis=0, return_counts=True)[1]
    assert len(counts) == 6
    assert ((counts - 1000) ** 2 / 1000).sum() < 20.5


def test_wrong_kind_lists_the_accepted_ones() -> None:
    with pytest.raises(ValueError, match=", ".join(KINDS)):
        transform_credit([1.0], "rank")
