"""KL, entropy, mismatch and off-policy terms by hand-worked numbers and by exact expectation."""

from __future__ import annotations

import math

import pytest
import torch

from rlvr_pl.objectives import (
    DAPO,
    GRPO,
    RLOO,
    VESPO,
    ClippedGRPO,
    EntropyBonus,
    KLPenalty,
    MismatchCorrection,
    OffPolicyMask,
)

EXACT = {"abs": 1e-12, "rel": 0}  # FP64 values of size 1


@pytest.mark.parametrize(
    ("estimator", "weighted", "follows"),
    [("k1", True, True), ("k2", False, True), ("k3", True, True), ("k1", False, False), ("k3", False, False)],
)
def test_expected_gradient_of_the_estimators(make_batch, estimator, weighted, follows) -> None:
    """Over all three tokens of one step, weighted by their probability: on policy, the gradient with respect to the
    logits is that of KL(policy || start) for the estimators that claim it, and is not for the others."""
    logits = torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    start = torch.tensor([0.1, 0.3, -0.6], dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    (truth,) = torch.autograd.grad((logp.exp() * (logp - start)).sum(), logits, retain_graph=True)
    penalty = KLPenalty(1.0, estimator, weighted)
    objective = GRPO(kl=penalty)
    total = torch.zeros((), dtype=torch.float64)
    for token, probability in enumerate(logp.exp().tolist()):
        batch = make_batch([[token], [token]], [1, 1], 2).replace(start_logprobs=start[token].expand(2, 1))
        # Two equal rollouts of advantage 0: their mean is the penalty of one.
        loss = objective.loss(logp[token].expand(2, 1), objective.token_weights(batch), batch)
        total = total + probability * loss
    (found,) = torch.autograd.grad(total, logits)
    assert torch.allclose(found, truth, rtol=0, atol=1e-12) is follows


@pytest.mark.parametrize(("estimator", "value"), [("k1", -0.5), ("k2", 0.125), ("k3", math.exp(0.5) - 1.5)])
def test_estimators(make_batch, estimator, value) -> None:
    # log start - log policy = 0.5; weights: 1/(2 rollouts) for each of two tokens, the truncated rollout masked.
    batch = make_batch([[1, 2], [3, 4]], [1, 1], 2, truncated=[1])
    batch = batch.replace(start_logprobs=torch.full((2, 2), -0.5, dtype=torch.float64))
    objective = RLOO(kl=KLPenalty(0.1, estimator), mask_truncated=True)
    logprobs = torch.tensor([[-1.0, -1.0], [math.nan, math.nan]], dtype=torch.float64)
    loss = objective.loss(logprobs, objective.token_weights(batch), batch)
    assert loss.item() == pytest.approx(0.1 * value, **EXACT)


def test_entropy_bonus_is_a_mean_over_the_unmasked_tokens(make_batch, pad) -> None:
    batch = make_batch([[1, 2], [3, 4, 5]], [1, 1], 2, truncated=[1]).replace(entropy=pad([[1, 2], [3, 4, 5]]))
    logprobs = torch.zeros(2, 3, dtype=torch.float64)

    def loss(**settings) -> float:
        objective = GRPO(entropy_bonus=EntropyBonus(0.1), **settings)
        part = batch.replace(extras=objective.prepare(batch))
        return objective.loss(logprobs, objective.token_weights(part), part).item()

    assert loss() == pytest.approx(-0.1 * 3, **EXACT)
    assert loss(mask_truncated=True) == pytest.approx(-0.1 * 1.5, **EXACT)
    assert loss(entropy_top=0.25) == pytest.approx(-0.1 * 4.5, **EXACT)  # the 0.75 quantile of 1..5 is 4


def test_entropy_top_keeps_the_denominator(make_batch, pad) -> None:
    batch = make_batch([[1, 2], [3, 4, 5]], [1, 0], 2).replace(entropy=pad([[1, 5], [2, 3, 4]]))
    plain = RLOO(aggregation="token-mean").token_weights(batch)
    masked = RLOO(aggregation="token-mean", entropy_top=0.25)
    keep = torch.tensor([[0, 1, 0], [0, 0, 1]])  # the 0.75 quantile is 4
    assert torch.equal(masked.token_weights(batch), plain * keep)
    assert masked.metrics(batch, plain) == {"entropy_top/threshold": 4.0}


@pytest.mark.parametrize(
    ("level", "mode", "low", "high", "rho"),
    [
        ("token", "truncate", None, 3.0, [[2.0, 0.25], [3.0, 1.0]]),
        ("token", "truncate", 0.5, 3.0, [[2.0, 0.5], [3.0, 1.0]]),
        ("token", "mask", 0.5, 3.0, [[2.0, 0.0], [0.0, 1.0]]),
        ("sequence", "truncate", None, 3.0, [[0.5], [3.0]]),
        ("sequence", "mask", 0.6, 3.0, [[0.0], [0.0]]),
    ],
)
def test_mismatch_correction(make_batch, pad, level, mode, low, high, rho) -> None:
    # Trainer over sampler: 2 and 1/4 in the first rollout; 8 and unknown in the second.
    batch = make_batch([[1, 2], [3, 4]], [1, 0], 2).replace(
        old_logprobs=pad([[math.log(0.5), math.log(0.1)], [math.log(0.8), -1]]),
        sampling_logprobs=pad([[math.log(0.25), math.log(0.4)], [math.log(0.1), None]]),
    )
    correction = MismatchCorrection(level, mode, low, high)
    assert correction.rho(batch).tolist() == [pytest.approx(row, **EXACT) for row in rho]
    objective = RLOO(correction=correction)
    assert objective.needs == {"old_logprobs", "sampling_logprobs"}
    assert objective.linear  # the ratio is a constant of the update: it enters the weights
    torch.testing.assert_close(
        objective.token_weights(batch), RLOO().token_weights(batch) * torch.tensor(rho, dtype=torch.float64)
    )
    figures = objective.metrics(batch, objective.token_weights(batch))
    flat = [x for row in rho for x in row]
    assert figures["mismatch/rho_mean"] == pytest.approx(sum(flat) / len(flat), **EXACT)
    assert (figures["mismatch/rho_min"], figures["mismatch/rho_max"]) == pytest.approx((min(flat), max(flat)), **EXACT)


def test_off_policy_mask_drops_only_negative_rollouts_that_drifted(make_batch, pad) -> None:
    # Mean of old - now: 0.3, 0.3 and 0.1 over the tokens of each rollout.
    batch = make_batch([[1, 2], [3], [4]], [1, 0, 0], 3).replace(old_logprobs=pad([[-1.0, -1.0], [-1.0], [-1.0]]))
    logprobs = pad([[-1.2, -1.4], [-1.3], [-1.1]]).requires_grad_()
    objective = ClippedGRPO(off_policy_mask=OffPolicyMask(0.2))
    assert objective.needs == {"old_logprobs"}
    loss = objective.loss(logprobs, objective.token_weights(batch), batch)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient[0, 0] < 0
    assert gradient[1, 0] == 0
    assert gradient[2, 0] > 0


def test_a_field_that_was_not_computed_is_named(make_batch) -> None:
    batch = make_batch([[1], [2]], [1, 0], 2)
    for objective, message in (
        (GRPO(entropy_top=0.2), "GRPO needs batch.entropy"),
        (GRPO(correction=MismatchCorrection()), "MismatchCorrection needs batch.old_logprobs"),
    ):
        with pytest.raises(ValueError, match=message):
            objective.token_weights(batch)
    with pytest.raises(ValueError, match=r"KLPenalty needs batch\.start_logprobs"):
        GRPO(kl=KLPenalty()).loss(torch.zeros(2, 1), torch.zeros(2, 1), batch)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KLPenalty(estimator="k4"), "k1, k2, k3"),
        (lambda: MismatchCorrection(level="row"), "token, sequence"),
        (lambda: MismatchCorrection(mode="clip"), "truncate, mask"),
        (lambda: MismatchCorrection(low=4.0), "low=4.0 .* high=3.0"),
        (lambda: OffPolicyMask(behaviour="new"), "old, sampler"),
        (lambda: GRPO(aggregation="mean"), "token-sum, sequence-mean, token-mean, constant"),
        (lambda: GRPO(scale="var"), "std, none, batch-std"),
        (lambda: GRPO(entropy_top=20), "entropy_top=20"),
        (lambda: GRPO(constant=0), "constant=0"),
        (lambda: GRPO(negative_weight=-1), "negative_weight=-1"),
        (lambda: ClippedGRPO(inner_epochs=0), "inner_epochs=0"),
        (lambda: ClippedGRPO(level="row"), "token, sequence, sequence-token"),
        (lambda: ClippedGRPO(clip_low=-0.1), "clip_low=-0.1"),
        (lambda: DAPO(overlong_buffer=4096), "share of the cap"),
        (lambda: VESPO(correction=MismatchCorrection()), "level='token'"),
    ],
)
def test_wrong_settings_say_what_is_accepted(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()
