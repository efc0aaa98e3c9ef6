"""The objective around fork credit: which instances it takes, how it spreads and divides, what it asks for."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from rlvr_pl.objectives import RLOO, ForkCredit
from rlvr_pl.types import Branch, BranchRequest, RolloutBatch

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "fork_credit.json").read_text())
TREE = GOLDEN["trie"]
EXACT = {"abs": 1e-12, "rel": 0}  # FP64 values of size 1


@pytest.fixture
def tree(make_batch) -> RolloutBatch:
    return make_batch(TREE["token_ids"], TREE["rewards"], 6)


def by_place(batch: RolloutBatch, weights: torch.Tensor) -> dict[tuple[int, int], float]:
    return {(i, t): float(weights[i, t]) for i, t in weights.nonzero().tolist()}


def answered(batch: RolloutBatch, answers: dict[tuple[int, int], list[float | None]]) -> RolloutBatch:
    """The batch with continuations from before token `position` of `row`; None stands for a truncated one."""
    branches = [
        Branch(
            BranchRequest(row, position, len(found)),
            tuple(math.nan if r is None else float(r) for r in found),
            tuple(r is None for r in found),
            10,
        )
        for (row, position), found in answers.items()
    ]
    return batch.replace(branches=tuple(branches))


@pytest.mark.parametrize("credit", ["raw", "rankc", "srank"])
def test_worked_tree(tree, credit) -> None:
    values = TREE.get(credit) or [f["credit"] for f in TREE["instances"]]
    expected = {(f["rollout"], f["position"]): v / 6 for f, v in zip(TREE["instances"], values) if v}
    assert by_place(tree, ForkCredit(credit=credit).token_weights(tree)) == pytest.approx(expected, **EXACT)


def test_combine(tree) -> None:
    raw = ForkCredit().token_weights(tree)
    outcome = RLOO().token_weights(tree)  # r minus leave-one-out mean, over N, at every token
    fork = torch.zeros_like(tree.mask)
    for f in TREE["instances"]:
        fork[f["rollout"], f["position"]] = True
    torch.testing.assert_close(ForkCredit(combine="hybrid").token_weights(tree), raw.where(fork, outcome))
    torch.testing.assert_close(ForkCredit(combine="add").token_weights(tree), raw + outcome)


@pytest.mark.parametrize(("norm", "z"), [("rollouts", 6), ("tokens", 18), ("forks", 14)])
def test_norm(tree, norm, z) -> None:
    torch.testing.assert_close(ForkCredit(norm=norm).token_weights(tree) * z, ForkCredit().token_weights(tree) * 6)


def test_truncated_rollouts_keep_their_place_in_v_with_reward_zero(make_batch) -> None:
    # Rollout 1 is truncated: its reward 1 counts as 0. At the root n = 2, V = 1/2, credits 2 (1 - 1/2) and 2 (0 - 1/2).
    batch = make_batch([[1, 9], [2, 2]], [1, 1], 2, truncated=[1])
    masked, scored = ForkCredit(), ForkCredit(truncated="zero")
    assert by_place(batch, masked.token_weights(batch)) == {(0, 0): 0.5}
    assert by_place(batch, scored.token_weights(batch)) == {(0, 0): 0.5, (1, 0): -0.5}
    # Then the zero sum is broken, which is logged.
    assert masked.metrics(batch, masked.token_weights(batch))["fork/credit_mean"] == 1.0
    assert scored.metrics(batch, scored.token_weights(batch))["fork/credit_mean"] == 0.0
    # Unmasked tokens: 2 of 4.
    assert by_place(batch, ForkCredit(norm="tokens").token_weights(batch)) == {(0, 0): 0.5}
    assert by_place(batch, ForkCredit(norm="tokens", truncated="zero").token_weights(batch)) == {
        (0, 0): 0.25,
        (1, 0): -0.25,
    }


def test_transforms_see_the_active_instances_alone(make_batch) -> None:
    # Root of four: V = 1/4; credit 4/3 (1 - 1/4) = 1 for the first, 4/3 (0 - 1/4) = -1/3 for the others.
    batch = make_batch([[1], [2], [3], [4]], [1, 0, 0, 1], 4, truncated=[3])
    # Active: 1, -1/3, -1/3: mid-ranks 3, 1.5, 1.5 over n - 1 = 2.
    found = ForkCredit(credit="rankc").token_weights(batch) * 4
    assert found.flatten().tolist() == pytest.approx([0.5, -0.25, -0.25, 0], **EXACT)
    # Centred: mean 1/9.
    centred = ForkCredit(center=True).token_weights(batch) * 4
    assert centred.flatten().tolist() == pytest.approx([8 / 9, -4 / 9, -4 / 9, 0], **EXACT)


def test_scope_of_a_transform(make_batch) -> None:
    # Two forks of two: credits +-1 for rewards (1, 0), +-0.5 for (0.5, 0).
    batch = make_batch([[1], [2], [1], [2]], [1, 0, 0.5, 0], 2)
    whole, group = ForkCredit(credit="rankc"), ForkCredit(credit="rankc", scope="group")
    assert (whole.token_weights(batch) * 4).flatten().tolist() == pytest.approx([0.5, -0.5, 1 / 6, -1 / 6], **EXACT)
    assert (group.token_weights(batch) * 4).flatten().tolist() == pytest.approx([0.5, -0.5, 0.5, -0.5], **EXACT)


def test_two_groups_of_one_question_are_two_trees_and_two_scopes(make_batch) -> None:
    apart = make_batch([[1], [2], [1], [2]], [1, 0, 0.5, 0], 2)
    same = apart.replace(uids=("q0",) * 4)
    for objective in (ForkCredit(), ForkCredit(credit="rankc", scope="group")):
        assert torch.equal(objective.token_weights(same), objective.token_weights(apart))


def test_shuffled_against_its_matched_arm(tree) -> None:
    shuffled = ForkCredit(credit="shuffled", norm="forks")
    real = ForkCredit(center=True, norm="forks")
    seeded = tree.replace(seed=3, update=8)
    found, expected = shuffled.token_weights(seeded), real.token_weights(seeded)
    assert sorted(found[tree.mask].tolist()) == pytest.approx(sorted(expected[tree.mask].tolist()), **EXACT)
    assert not torch.equal(found, expected)
    # A fresh object, as after a resume, draws the same permutation and logs the same hash.
    again = ForkCredit(credit="shuffled", norm="forks")
    assert torch.equal(again.token_weights(seeded), found)
    figures = shuffled.metrics(seeded, found)
    assert again.metrics(seeded, found) == figures
    assert figures["fork/permutation_hash"] == int(figures["fork/permutation_hash"]) < 2**48
    assert shuffled.metrics(tree, found)["fork/permutation_hash"] != figures["fork/permutation_hash"]
    assert -1 <= figures["fork/shuffle_corr"] <= 1


def test_metrics_of_the_worked_tree(tree) -> None:
    figures = ForkCredit().metrics(tree, ForkCredit().token_weights(tree))
    positions, sizes = ([f[key] for f in TREE["instances"]] for key in ("position", "n"))
    expected = {
        "fork/active": 14,
        "fork/token_frac": 14 / 18,
        "fork/depth": sum(positions) / 14,
        "fork/n": sum(sizes) / 14,
        "fork/credit_mean": 0,
    }
    assert figures == pytest.approx(expected, **EXACT)


@pytest.mark.parametrize(
    ("token_ids", "rewards"), [([[1, 2], [1, 2]], [1, 0]), ([[1, 2], [2, 1]], [1, 1]), ([[], []], [1, 0])]
)
def test_nothing_to_learn_is_loss_zero_with_a_graph(make_batch, token_ids, rewards) -> None:
    batch = make_batch(token_ids, rewards, 2)
    objective = ForkCredit(norm="forks")
    logprobs = torch.full(batch.mask.shape, -1.0, requires_grad=True)
    loss = objective.loss(logprobs, objective.token_weights(batch), batch)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss == 0
    assert (gradient == 0).all()
    assert all(map(math.isfinite, objective.metrics(batch, logprobs).values()))


def test_a_group_of_one_is_refused(make_batch) -> None:
    with pytest.raises(ValueError, match="group_size"):
        ForkCredit().token_weights(make_batch([[1]], [1], 1))


def test_suffix_spread(make_batch) -> None:
    # Alone after the root: b = mean of the others at the root for all tokens of rollout 0; rollouts 1 and 2 share 2.
    batch = make_batch([[1, 5, 5], [2, 6, 6], [2, 7]], [1, 0, 1], 3)
    found = ForkCredit(spread="suffix").token_weights(batch) * 3
    # Root: 1 - (0 + 1)/2, 0 - (1 + 1)/2, 1 - (1 + 0)/2; at prefix [2]: 0 - 1 and 1 - 0.
    expected = [0.5, 0.5, 0.5, -1, -1, -1, 0.5, 1, 0]
    assert found.flatten().tolist() == pytest.approx(expected, **EXACT)


def branch(**changes) -> ForkCredit:
    return ForkCredit(**{"source": "branch", "min_gap": 2, "rollouts_per_group": 9, **changes})


def test_branch_credit(make_batch) -> None:
    case = GOLDEN["branch"]
    batch = make_batch([[1, 2, 3], [4, 5]], [1, 0], 2)
    both = answered(batch, {(0, 1): case["before"], (0, 2): case["after"]})
    assert by_place(batch, branch().token_weights(both)) == pytest.approx({(0, 1): case["credit"] / 2}, **EXACT)
    cut = case["after_with_truncated"]
    both = answered(batch, {(0, 1): case["before"], (0, 2): cut["rewards"]})
    for rule in ("zero", "drop"):
        found = by_place(batch, branch(cut=rule).token_weights(both))
        assert found == pytest.approx({(0, 1): cut[rule] / 2}, **EXACT)


def test_branch_at_the_last_token_has_the_rollouts_own_outcome(make_batch) -> None:
    batch = make_batch([[1, 2], [4, 5]], [1, 0], 2)
    # Before the EOS token V = 1/4; after it the rollout is over: Q = 1.
    found = branch().token_weights(answered(batch, {(0, 1): [1, 0, 0, 0]}))
    assert by_place(batch, found) == {(0, 1): 0.375}


def test_branch_without_any_scorable_continuation_gives_no_credit(make_batch) -> None:
    batch = make_batch([[1, 2, 3], [4, 5]], [1, 0], 2)
    lost = answered(batch, {(0, 0): [None, None], (0, 1): [1, 1]})
    assert by_place(batch, branch(cut="drop").token_weights(lost)) == {}
    assert branch(cut="drop").forks(lost) == []


def test_neighbouring_requests_are_told_apart(make_batch) -> None:
    batch = make_batch([[1, 2, 3, 4, 5, 6], [4, 5]], [1, 0], 2)
    # Forks at 0 (after: 1), 2 (after: 3) and 5, the last token.
    answers = {(0, 0): [0], (0, 1): [1], (0, 2): [1], (0, 3): [0], (0, 5): [0]}
    found = branch().token_weights(answered(batch, answers))
    assert by_place(batch, found) == {(0, 0): 0.5, (0, 2): -0.5, (0, 5): 0.5}


def test_segment_spread(make_batch) -> None:
    case = GOLDEN["segment"]
    token_ids = [[1, 2, 3, 4, 5], *([i] for i in range(2, 9))]
    batch = make_batch(token_ids, [1, 1, 1, 1, 0, 0, 0, 0], 8)
    answers = {(0, 1): [1, 0, 0, 0], (0, 4): [1, 1, 0, 0]}
    found = branch(spread="segment").token_weights(answered(batch, answers)) * 8
    a, b, c = case["credits"]
    assert found[0].tolist() == pytest.approx([a, b, b, b, c], **EXACT)
    assert (found[1:] == 0).all()
    # "hybrid" gives rollouts without a fork their reward minus the leave-one-out mean.
    hybrid = branch(spread="segment", combine="hybrid").token_weights(answered(batch, answers)) * 8
    assert torch.equal(hybrid[0], found[0])
    assert hybrid[1:, 0].tolist() == pytest.approx([4 / 7] * 3 + [-4 / 7] * 4, **EXACT)


def with_entropy(batch: RolloutBatch, rows: list[list[float]], **fields) -> RolloutBatch:
    entropy = torch.full(batch.mask.shape, math.nan, dtype=torch.float64)
    for i, row in enumerate(rows):
        entropy[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return batch.replace(sampling_entropy=entropy, **fields)


def places(requests) -> list[tuple[int, int]]:
    return sorted((r.row, r.position) for r in requests)


def test_requests_lie_before_and_after_high_entropy_tokens(make_batch) -> None:
    batch = with_entropy(make_batch([[1, 2, 3], [4, 5]], [1, 0], 2), [[0, 2, 3], [0, 1]])
    # 0.8 quantile of (0, 0, 1, 2, 3): rank 3.2, between 2 and 3. Only the last token of rollout 0 reaches it: it has
    # an outcome before it, and nothing to continue after it.
    objective = branch(continuations=3)
    requests = objective.requests(batch)
    assert places(requests) == [(0, 2)]
    assert requests[0].count == 3
    # At the median, 1: the first such token of each rollout.
    assert places(branch(entropy_quantile=0.5).requests(batch)) == [(0, 1), (0, 2), (1, 1)]
    assert places(branch(entropy_quantile=0.5, spread="segment").requests(batch)) == [(0, 1), (1, 1)]
    assert places(branch(entropy_quantile=0.5, rollouts_per_group=1).requests(batch)) in ([(0, 1), (0, 2)], [(1, 1)])
    assert ForkCredit().requests(batch) == ()


def test_masked_and_unscorable_rollouts_get_no_continuations(make_batch) -> None:
    batch = make_batch([[1, 2], [4, 5], [6, 7]], [1, 0, None], 3, truncated=[1])
    batch = with_entropy(batch, [[0, 2]] * 3)
    assert places(branch().requests(batch)) == [(0, 1)]
    assert places(branch(truncated="zero").requests(batch)) == [(0, 1), (1, 1)]


def test_threshold_is_of_the_earlier_updates_and_survives_a_resume(make_batch) -> None:
    first = with_entropy(make_batch([[1] * 4, [2] * 4], [1, 0], 2), [[1, 1, 1, 1]] * 2, update=1)
    second = with_entropy(first, [[0.5, 0.5, 0.5, 1.5]] * 2, update=2)
    objective = branch()
    objective.requests(first)
    restored = branch()
    restored.load_state_dict(json.loads(json.dumps(objective.state_dict())))
    # Against the first update's 1.0 (to 0.001) only the last tokens count; alone, 0.5 is the 0.8 quantile or below.
    assert places(objective.requests(second)) == [(0, 3), (1, 3)]
    assert places(restored.requests(second)) == [(0, 3), (1, 3)]
    assert restored.state_dict() == objective.state_dict()
    assert ForkCredit().state_dict() == ForkCredit().state_dict()


def test_drawn_rollouts_are_uniform_and_named_by_the_key(make_batch) -> None:
    batch = with_entropy(make_batch([[1]] * 4, [1, 0, 1, 0], 4), [[1]] * 4)
    counts = [0] * 4
    for update in range(2000):
        objective = branch(rollouts_per_group=2)
        for row, _ in places(objective.requests(batch.replace(update=update))):
            counts[row] += 1
    # Each is drawn with probability 1/2: 1000 +- 5 standard deviations of sqrt(2000/4).
    assert all(abs(count - 1000) < 5 * math.sqrt(500) for count in counts)


def test_weights_are_pure(make_batch) -> None:
    batch = with_entropy(make_batch([[1, 2, 3], [4, 5]], [1, 0], 2), [[0, 2, 3], [0, 1]])
    objective = branch()
    objective.requests(batch)
    state = objective.state_dict()
    both = answered(batch, {(0, 1): [1, 0], (0, 2): [1, 1]})
    assert torch.equal(objective.token_weights(both), objective.token_weights(both))
    assert objective.state_dict() == state


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "forest"}, "tree, branch"),
        ({"credit": "ranked"}, "raw, rankc, srank, sign, uniform, shuffled, shuffled_rankc"),
        ({"spread": "suffix", "source": "branch"}, "suffix needs tree"),
        ({"spread": "segment"}, "segment branch"),
        ({"spread": "suffix", "credit": "rankc"}, "credit='raw'"),
        ({"spread": "suffix", "combine": "add"}, "combine"),
        ({"continuations": 0}, "at least 1"),
        ({"min_gap": 1}, "min_gap"),
        ({"entropy_quantile": 80}, "between 0 and 1"),
    ],
)
def test_wrong_settings_say_what_is_accepted(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        ForkCredit(**settings)
