"""Faults that users of other trainers reported, each by its own input and the behaviour that is right.

FP64 sums of ten terms of size 1, or exact binary fractions: 1e-12 is some thousand roundings.
"""

from __future__ import annotations

import math

import pytest
import torch

from rlvr_pl import objectives as o
from rlvr_pl.core.advantage import group_advantage
from rlvr_pl.types import Completion, Grade, GradeStatus, Rollout, RolloutBatch, StopReason, build_batch

EXACT = {"abs": 1e-12, "rel": 0}
NAN = math.nan


class FixedAdvantage(o.PolicyGradient):
    """Every rollout has advantage -1: the loss is the mean, or the sum, of the log-probs themselves."""

    def advantage(self, batch: RolloutBatch) -> torch.Tensor:
        return torch.full((len(batch),), -1.0, dtype=torch.float64)


def split_loss(objective, batch, logprobs, parts) -> tuple[float, torch.Tensor]:
    logprobs = logprobs.clone().requires_grad_()
    weights = objective.token_weights(batch)
    total = torch.zeros((), dtype=torch.float64)
    for rows in parts:
        part = batch.select(rows)
        width = part.mask.shape[1]
        total = total + objective.loss(logprobs[rows][:, :width], weights[rows][:, :width], part)
    return total.item(), torch.autograd.grad(total, logprobs)[0]


def test_loss_token_norm(make_batch, pad) -> None:
    # A: 2 tokens of loss 1. B: 8 tokens of loss 0. 2/10, however it is cut.
    batch = make_batch([[1] * 2, [1] * 8], [0, 0], 2)
    logprobs = pad([[1.0] * 2, [0.0] * 8])
    whole = split_loss(FixedAdvantage(aggregation="token-mean"), batch, logprobs, [[0, 1]])
    assert whole[0] == pytest.approx(0.2, **EXACT)
    for parts in ([[0], [1]], [[1], [0]]):
        loss, gradient = split_loss(FixedAdvantage(aggregation="token-mean"), batch, logprobs, parts)
        assert loss == pytest.approx(0.2, **EXACT)
        torch.testing.assert_close(gradient, whole[1])


@pytest.mark.parametrize("objective", [o.ORLSeqmean(), o.ClippedGRPO(), o.GSPO()], ids=lambda x: type(x).__name__)
def test_loss_accum_scale(make_batch, pad, objective) -> None:
    batch = make_batch([[1] * n for n in (1, 2, 3, 4, 5, 1, 2, 3)], [1, 0, 1, 0, 0, 0, 0, 1], 4)
    logprobs = pad([[-0.1 * (i + t + 1) for t in range(n)] for i, n in enumerate(batch.lengths.tolist())])
    one, *others = (
        split_loss(objective, batch, logprobs, [list(range(i, i + size)) for i in range(0, 8, size)])
        for size in (8, 4, 1)
    )
    for loss, gradient in others:
        assert loss == pytest.approx(one[0], **EXACT)
        torch.testing.assert_close(gradient, one[1])


def test_loss_masked_denominator(make_batch, pad) -> None:
    # A: 4 tokens of loss 1. B: 6 tokens, truncated and masked. 4/4; the update still counts 10 tokens.
    batch = make_batch([[1] * 4, [1] * 6], [0, 0], 2, truncated=[1])
    objective = FixedAdvantage(aggregation="token-mean", mask_truncated=True)
    assert split_loss(objective, batch, pad([[1.0] * 4, [1.0] * 6]), [[0, 1]])[0] == pytest.approx(1.0, **EXACT)
    assert batch.totals.tokens == 10


@pytest.mark.parametrize("cls", [o.ORLMask, o.DAPO, o.BNPO, o.GSPO, o.CISPO, o.SAPO, o.VESPO, o.GMPO])
def test_mask_all_truncated(make_batch, pad, cls) -> None:
    objective = cls(mask_truncated=True)
    token_ids, rewards = [[1] * 3] * 8, [1, 0, 0, 1, 1, 0, 0, 0]
    logprobs = pad([[-0.5, -1.0, -2.0]] * 8)
    dead = make_batch(token_ids, rewards, 2, truncated=range(8), cap=3)
    loss, gradient = split_loss(objective, dead, logprobs, [[0, 1], [2, 3], [4, 5], [6, 7]])
    assert loss == 0
    assert (gradient == 0).all()
    # One micro-batch of four: the others train as if it were absent.
    partly = make_batch(token_ids, rewards, 2, truncated=[2, 3], cap=3)
    rest = [0, 1, 4, 5, 6, 7]
    loss, gradient = split_loss(objective, partly, logprobs, [[0, 1], [2, 3], [4, 5], [6, 7]])
    without, gradient_without = split_loss(objective, partly, logprobs, [rest])
    assert loss == pytest.approx(without, **EXACT)
    torch.testing.assert_close(gradient, gradient_without)
    assert (gradient[2:4] == 0).all()


def test_mask_eos_is_pad(pad) -> None:
    # pad = eos = 0: what counts is what the sampler returned, never a token's id.
    completions = [((5, 7, 0), StopReason.EOS), ((5, 7, 9, 3, 4), StopReason.LENGTH), ((0,), StopReason.EOS)]
    grade = Grade(GradeStatus.WRONG, 0.0)
    batch = build_batch([Rollout("q", i, (2, 0, 3), Completion(*c), "", grade) for i, c in enumerate(completions)], 3)
    assert batch.mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    assert batch.truncated.tolist() == [False, True, False]
    weights = FixedAdvantage().token_weights(batch)
    assert torch.equal(weights != 0, batch.mask)


@pytest.mark.parametrize("cls", [o.GRPO, o.RLOO, o.DAPO, o.GSPO, o.OPO, o.ForkCredit, o.SignedReinforce])
def test_empty_completion(make_batch, pad, cls) -> None:
    objective = cls()
    batch = make_batch([[], [1, 2, 3]], [10, 0], 2)
    weights = objective.token_weights(batch)
    assert weights.isfinite().all()
    assert (weights[0] == 0).all()
    assert torch.isfinite(torch.tensor(split_loss(objective, batch, pad([[], [-1.0] * 3]), [[0, 1]])[0]))
    nothing = make_batch([[], []], [10, 0], 2)
    assert objective.token_weights(nothing).shape == (2, 0)


def test_empty_completion_counts_in_the_baseline_where_documented(make_batch) -> None:
    batch = make_batch([[], [1, 2, 3]], [10, 0], 2)
    assert o.RLOO().token_weights(batch)[1].tolist() == [-5.0] * 3  # (0 - 10)/2
    assert o.OPO().token_weights(batch)[1].tolist() == [0.0] * 3  # the baseline is weighted by length: 0


@pytest.mark.parametrize("cls", [o.GRPO, o.RLOO, o.OPO, o.MaxRL, o.ClippedGRPO, o.ForkCredit])
def test_group_size_one(make_batch, cls) -> None:
    with pytest.raises(ValueError, match="group_size"):
        cls().token_weights(make_batch([[1]], [1.0], 1))
    with pytest.raises(ValueError, match="group_size"):
        group_advantage([1.0], 0)


def test_duplicate_prompts(make_batch) -> None:
    batch = make_batch([[1]] * 4, [1, 0, 0, 0], 2).replace(uids=("q0",) * 4)
    a = 0.5 / (math.sqrt(0.5) + 1e-4) / 4
    assert o.GRPO().token_weights(batch).flatten().tolist() == pytest.approx([a, -a, 0, 0], **EXACT)


@pytest.mark.parametrize("cls", [o.GRPO, o.RLOO, o.DAPO, o.GSPO, o.OPO, o.MaxRL, o.ForkCredit, o.SignedReinforce])
def test_reward_none_nan(make_batch, pad, cls) -> None:
    batch = make_batch([[1], [2], [3], [4]], [1, None, 0, NAN], 4)
    objective = cls()
    weights = objective.token_weights(batch)
    assert (weights[[1, 3]] == 0).all()
    assert weights[0] > 0 > weights[2]
    if cls is o.GRPO:
        assert weights[0] == pytest.approx(-weights[2], **EXACT)  # the baseline is 1/2
    assert math.isfinite(split_loss(objective, batch, pad([[-1.0]] * 4), [[0, 1, 2, 3]])[0])


def test_top_p_renormalised(make_batch, pad) -> None:
    # p = (.5, .3, .2), top-p 0.7 keeps the first two: the sampler says .5/.8, the trainer .5, so rho = 0.8, the kept
    # mass, as MismatchCorrection's documentation says.
    batch = make_batch([[0], [0]], [1, 0], 2).replace(
        old_logprobs=pad([[math.log(0.5)]] * 2), sampling_logprobs=pad([[math.log(0.625)]] * 2)
    )
    correction = o.MismatchCorrection("token", "truncate")
    assert correction.rho(batch).tolist() == [[pytest.approx(0.8, **EXACT)]] * 2
    plain, corrected = o.GRPO().token_weights(batch), o.GRPO(correction=correction).token_weights(batch)
    torch.testing.assert_close(corrected, 0.8 * plain)
