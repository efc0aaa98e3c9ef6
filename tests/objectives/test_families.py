"""Each family by hand-worked numbers: its weights, its surrogate, and its gradient on the first pass.

FP64 values of size 1: 1e-12 is some thousand roundings.
"""

from __future__ import annotations

import math

import pytest
import torch

from rlvr_pl import objectives as o
from rlvr_pl.types import Completion, Grade, GradeStatus, Rollout, RolloutBatch, StopReason, build_batch

EXACT = {"abs": 1e-12, "rel": 0}


@pytest.fixture
def batch(make_batch) -> RolloutBatch:
    """Two groups of two; lengths 1, 3, 2, 2; the last rollout is truncated."""
    return make_batch([[1], [2] * 3, [3] * 2, [4] * 2], [1, 0, 1, 0], 2, truncated=[3], cap=4)


def first_tokens(objective: o.Objective, batch: RolloutBatch) -> list[float]:
    """The weight of each rollout's tokens, which all are alike."""
    weights = objective.token_weights(batch)
    assert torch.equal(weights, weights[:, :1] * batch.mask)
    return weights[:, 0].tolist()


A = 0.5 / (math.sqrt(0.5) + 1e-4)  # the supplied advantage of (1, 0)


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (o.ORL(), [A / 4, -A / 4, A / 4, -A / 4]),
        (o.GRPO(positive_weight=2, negative_weight=0.5), [A / 2, -A / 8, A / 2, -A / 8]),
        (o.ORLMask(), [A / 4, -A / 4, A / 4, 0]),
        (o.ORLSeqmean(), [A / 4, -A / 12, A / 8, -A / 8]),
        (o.DrGRPO(), [0.5 / 16, -0.5 / 16, 0.5 / 16, -0.5 / 16]),  # N times the cap: 4 * 4
        (o.DrGRPO(constant=10), [0.5 / 40, -0.5 / 40, 0.5 / 40, -0.5 / 40]),
        (o.RLOO(), [0.25, -0.25, 0.25, -0.25]),
        (o.OPO(), [0.75 / 4, -0.25 / 4, 0.5 / 4, -0.5 / 4]),  # baselines 1/(1 + 3) and 2/(2 + 2)
        (o.MaxRL(), [0.25, -0.25, 0.25, -0.25]),  # mean 1/2: (1 - 1/2)/(1/2)
        (o.PassAtK(k=1), [0.25, -0.25, 0.25, -0.25]),  # sqrt(1/2 * 1/2) = 1/2
        (o.SignedReinforce(), [0.25, -0.25, 0.25, -0.25]),
        (o.PSR(), [0.25, 0, 0.25, 0]),
        (o.NSR(), [0, -0.25, 0, -0.25]),
        (o.WeightedReinforce(), [0.025, -0.25, 0.025, -0.25]),
        (o.ClippedGRPO(), [A / 4, -A / 12, A / 8, -A / 8]),
        (o.BNPO(), [A / 8, -A / 8, A / 8, -A / 8]),
        (o.BNPO(mask_truncated=True), [A / 6, -A / 6, A / 6, 0]),
        (o.LUSPO(), [A / 4, -A / 4, A / 4, -A / 4]),
        # Over the update: mean 1/2, squares 4 * 1/4 over 3.
        (o.ReinforcePlusPlus(), [s * 0.5 / (math.sqrt(1 / 3) + 1e-8) / 8 for s in (1, -1, 1, -1)]),
        (o.ReinforcePlusPlusBaseline(), [s * 0.5 / (math.sqrt(1 / 3) + 1e-8) / 8 for s in (1, -1, 1, -1)]),
        (o.ExpertIterationSFT(), [1 / 8] * 4),
        # Each s is +-A; over the update their squares sum to 4 A^2, over 3.
        (o.GDPO(), [s * A / (A * math.sqrt(4 / 3) + 1e-4) / 4 for s in (1, -1, 1, -1)]),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, o.Objective) else "",
)
def test_weights(batch, objective, expected) -> None:
    assert first_tokens(objective, batch) == pytest.approx(expected, **EXACT)


def test_reinforce_plus_plus_takes_groups_of_one(make_batch) -> None:
    batch = make_batch([[1], [2]], [1, 0], 1)
    assert first_tokens(o.ReinforcePlusPlus(), batch)[0] > 0
    with pytest.raises(ValueError, match="group_size"):
        o.ReinforcePlusPlusBaseline().token_weights(batch)


def test_uniform_groups_are_special_only_with_a_baseline(make_batch) -> None:
    batch = make_batch([[1], [2], [3], [4]], [1, 1, 0, 0], 2)
    assert first_tokens(o.ReinforcePlusPlusBaseline(), batch) == [0, 0, 0, 0]
    assert first_tokens(o.ReinforcePlusPlus(), batch)[0] > 0
    assert first_tokens(o.SignedReinforce(), batch) == [0.25, 0.25, -0.25, -0.25]


def test_rewards_of_several_graders_are_normalised_apart() -> None:
    """Sums (2, 1) and (1.1, 1): GRPO sees a gap of 1 and one of 0.1; apart, both groups differ in one reward each."""
    rewards = [[(1.0, 1.0), (1.0, 1.0)], [(1.0, 1.0), (1.0, 0.0)], [(1.0, 1.0), (1.0, 0.1)], [(1.0, 1.0), (1.0, 0.0)]]
    grades = [Grade(GradeStatus.CORRECT, sum(w * r for w, r in row), parts=tuple(row)) for row in rewards]
    rollouts = [
        Rollout(f"q{i // 2}", i % 2, (1,), Completion((5,), StopReason.EOS), "", grade)
        for i, grade in enumerate(grades)
    ]
    batch = build_batch(rollouts, 2)
    # z = +-0.5/(sqrt(0.5) + eps) where the gap is 1, and +-0.05/(0.1 sqrt(0.5) + eps) where it is 0.1.
    s = [A, -A, 0.05 / (0.1 * math.sqrt(0.5) + 1e-4), -0.05 / (0.1 * math.sqrt(0.5) + 1e-4)]
    spread = math.sqrt(sum(x * x for x in s) / 3)  # their mean is 0
    assert o.GDPO().advantage(batch).tolist() == pytest.approx([x / (spread + 1e-4) for x in s], **EXACT)
    moved = batch.select([2, 0])
    assert moved.parts is not None
    assert moved.parts[..., 1].tolist() == [[1.0, 0.1], [1.0, 1.0]]


def test_soft_overlong_punishment(make_batch) -> None:
    # Cap 10, buffer 4: free up to 6 tokens, -1/4 a token from there on.
    batch = make_batch([[1] * 6, [1] * 7, [1] * 8, [1] * 10], [1, 1, 1, 1], 4, cap=10)
    objective = o.DAPO(overlong_buffer=0.4)
    assert objective.rewards(batch).tolist() == [1, 0.75, 0.5, 0]
    assert o.DAPO(overlong_buffer=0.4, overlong_penalty=2).rewards(batch).tolist() == [1, 0.5, 0, -1]
    assert torch.equal(o.DAPO(overlong_buffer=0).rewards(batch), batch.rewards)
    assert torch.equal(o.DAPO().rewards(batch.replace(cap=0)), batch.rewards)
    assert objective.resample_rounds > 0
    assert o.DAPO(resample_rounds=0).resample_rounds == 0


FIRST_PASS = [
    o.ClippedGRPO,
    o.BNPO,
    o.DAPO,
    o.GSPO,
    o.LUSPO,
    o.CISPO,
    o.SAPO,
    o.VESPO,
    o.GMPO,
    o.ReinforcePlusPlus,
    o.ClipCov,
]


@pytest.mark.parametrize("cls", FIRST_PASS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("old", [False, True])
def test_the_first_pass_has_the_gradient_of_the_weighted_sum(batch, cls, old) -> None:
    objective = cls()
    logprobs = torch.linspace(-2, -0.1, batch.mask.numel(), dtype=torch.float64).view(batch.mask.shape).requires_grad_()
    if old or "old_logprobs" in objective.needs:
        batch = batch.replace(old_logprobs=logprobs.detach())
    weights = objective.token_weights(batch)
    (gradient,) = torch.autograd.grad(objective.loss(logprobs, weights, batch), logprobs)
    torch.testing.assert_close(gradient, -weights, rtol=0, atol=1e-12)


def surrogate(objective: o.Ratio, batch: RolloutBatch, log_ratio: list[list[float]], weights: list[list[float]]):
    """The loss and its gradient with respect to the log-probs, given log u and w."""
    logs = torch.tensor(log_ratio, dtype=torch.float64)
    logprobs = (logs - 1).requires_grad_()
    part = batch.replace(old_logprobs=torch.full_like(logs, -1))
    loss = objective.loss(logprobs, torch.tensor(weights, dtype=torch.float64), part)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), gradient.tolist()


@pytest.fixture
def pair(make_batch) -> RolloutBatch:
    return make_batch([[1], [2]], [1, 0], 2)


def test_clip_binds_only_where_it_holds_back(pair) -> None:
    up, down = math.log(1.5), math.log(0.5)
    objective = o.ClippedGRPO(clip_high=0.28)
    # w = 1, u = 1.5: clipped to 1.28, no gradient. w = -1, u = 1.5: not clipped.
    loss, gradient = surrogate(objective, pair, [[up], [up]], [[1], [-1]])
    assert loss == pytest.approx(-1.28 + 1.5, **EXACT)
    assert gradient == [[0], [pytest.approx(1.5, **EXACT)]]
    # w = 1, u = 0.5: not clipped. w = -1: clipped to 0.8.
    loss, gradient = surrogate(objective, pair, [[down], [down]], [[1], [-1]])
    assert loss == pytest.approx(-0.5 + 0.8, **EXACT)
    assert gradient == [[pytest.approx(-0.5, **EXACT)], [0]]
    # delta bounds what is left: w = -1, u = 4.
    loss, gradient = surrogate(o.ClippedGRPO(delta=3.0), pair, [[0], [math.log(4)]], [[1], [-1]])
    assert loss == pytest.approx(-1 + 3, **EXACT)
    assert gradient[1] == [0]


def test_cispo_caps_the_weight_and_keeps_the_gradient(pair) -> None:
    loss, gradient = surrogate(o.CISPO(cap=2.0), pair, [[math.log(3)], [math.log(0.5)]], [[1], [-1]])
    # log p = log u - 1.
    assert loss == pytest.approx(-2 * (math.log(3) - 1) + 0.5 * (math.log(0.5) - 1), **EXACT)
    assert gradient == [[pytest.approx(-2, **EXACT)], [pytest.approx(0.5, **EXACT)]]


def test_sapo_gate(pair) -> None:
    loss, _ = surrogate(o.SAPO(tau_negative=2.0), pair, [[math.log(2)], [math.log(2)]], [[1], [-1]])

    def gate(tau: float) -> float:
        return 4 / tau / (1 + math.exp(-tau))  # u - 1 = 1

    assert loss == pytest.approx(-gate(1) + gate(2), **EXACT)


def test_vespo_kernel(make_batch) -> None:
    batch = make_batch([[1, 1], [2, 2]], [1, 0], 2)
    a, b = math.log(1.5), math.log(0.8)  # W = 1.2 for both
    _, gradient = surrogate(o.VESPO(), batch, [[a, b]] * 2, [[1, 1], [-1, -1]])
    positive, negative = 1.2**2 * math.exp(3 * (1 - 1.2)), 1.2**3 * math.exp(2 * (1 - 1.2))
    assert gradient == [pytest.approx([-positive] * 2, **EXACT), pytest.approx([negative] * 2, **EXACT)]


def test_gmpo_clips_tokens_and_averages_their_logs(make_batch) -> None:
    batch = make_batch([[1, 1], [2, 2]], [1, 0], 2)
    loss, gradient = surrogate(o.GMPO(clip=0.4), batch, [[1.0, -1.0]] * 2, [[0.5, 0.5], [-0.5, -0.5]])
    # A > 0: (0.4 - 1)/2 = -0.3; A < 0: (1 - 0.4)/2 = 0.3. The clipped token has no gradient.
    assert loss == pytest.approx(-math.exp(-0.3) + math.exp(0.3), **EXACT)
    assert gradient[0] == pytest.approx([0, -math.exp(-0.3) / 2], **EXACT)
    assert gradient[1] == pytest.approx([math.exp(0.3) / 2, 0], **EXACT)


def test_gspo_token_has_the_gradient_of_gspo(make_batch) -> None:
    batch = make_batch([[1, 1], [2, 2]], [1, 0], 2)
    logs, weights = [[2e-4, -1e-4], [1e-4, 1e-4]], [[0.5, 0.5], [-0.5, -0.5]]
    whole = surrogate(o.GSPO(), batch, logs, weights)
    token = surrogate(o.GSPO(level="sequence-token"), batch, logs, weights)
    assert token[0] == pytest.approx(whole[0], **EXACT)
    assert torch.tensor(token[1]).tolist() == [pytest.approx(row, abs=1e-7) for row in whole[1]]  # float32 here
    # With weights that differ within a rollout they part: the token's own gradient against the mean.
    uneven = [[1.0, 0.0], [-0.5, -0.5]]
    assert surrogate(o.GSPO(), batch, logs, uneven)[1][0][1] != 0
    assert surrogate(o.GSPO(level="sequence-token"), batch, logs, uneven)[1][0][1] == 0


def covariance_batch(make_batch, pad) -> RolloutBatch:
    batch = make_batch([[1, 1], [2, 2]], [1, 0], 2)
    # Mean log-prob -1.5; advantages +-a: covariances a (0.5, 1.0) and -a (-1.5, 0.0).
    return batch.replace(old_logprobs=pad([[-1.0, -0.5], [-3.0, -1.5]]))


def test_clip_cov_detaches_drawn_tokens_in_the_band(make_batch, pad) -> None:
    batch = covariance_batch(make_batch, pad)
    plain = o.ClippedGRPO(aggregation="token-mean", scale="none").token_weights(batch)
    # A = +-1/2: covariances .25, .5, .75, 0. In the band (.3, 5): the second and the third.
    objective = o.ClipCov(share=0.25, low=0.3, scale="none")
    detached = [(plain != objective.token_weights(batch.replace(update=u))).nonzero().tolist() for u in range(20)]
    assert sorted(map(tuple, {tuple(place) for (place,) in detached})) == [(0, 1), (1, 0)]
    both = o.ClipCov(share=0.5, low=0.3, scale="none").token_weights(batch)
    assert both.tolist() == [[plain[0, 0], 0], [0, plain[1, 1]]]
    assert torch.equal(o.ClipCov(low=1.0, scale="none").token_weights(batch), plain)


def test_kl_cov_penalizes_the_top_tokens(make_batch, pad) -> None:
    batch = covariance_batch(make_batch, pad)
    objective = o.KLCov(share=0.25, coefficient=2.0, scale="none")
    assert objective.inner_epochs == 2
    batch = batch.replace(extras=objective.prepare(batch))
    assert batch.extras["penalized"].tolist() == [[0, 0], [1, 0]]
    logprobs = batch.old_logprobs + torch.tensor([[0.0, 0.0], [-0.1, 0.0]])
    weights = objective.token_weights(batch)
    # -sum u w, with w = +-1/2 over 4 tokens, plus 2 |log u| / 4.
    expected = -(0.125 * 2 - 0.125 * (math.exp(-0.1) + 1)) + 2 * 0.1 / 4
    assert objective.loss(logprobs, weights, batch).item() == pytest.approx(expected, abs=1e-7)  # 0.1 is float32 here
    # A uniform update has no covariance and no penalty.
    uniform = batch.replace(rewards=torch.ones(2, dtype=torch.float64))
    assert not objective.prepare(uniform)["penalized"].any()


def test_log_ratios_beyond_the_bound_stay_finite(pair) -> None:
    for cls in (o.ClippedGRPO, o.GSPO, o.CISPO, o.SAPO, o.VESPO, o.GMPO, o.KLCov):
        part = pair.replace(extras={"penalized": torch.zeros(2, 1)})
        loss, gradient = surrogate(cls(), part, [[500.0], [-500.0]], [[1], [-1]])
        assert math.isfinite(loss), cls
        assert all(math.isfinite(g) for row in gradient for g in row), cls
