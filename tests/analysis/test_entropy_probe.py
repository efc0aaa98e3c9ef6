"""Slopes, directions and steps of a tiny random Qwen3, against finite differences and against each other."""

from __future__ import annotations

import pytest
import torch

from rlvr_pl.analysis import entropy_probe as probe
from rlvr_pl.objectives import ORL, ORLSeqmean
from rlvr_pl.types import Completion, Grade, GradeStatus, Rollout, RolloutBatch, StopReason, build_batch
from rlvr_pl.update import token_logprobs

EPS = 1e-4


def batch(seed: int, rows: int = 8, group_size: int = 4) -> RolloutBatch:
    """Random completions of 3 to 12 tokens of a 64-token vocabulary, half of them rewarded, some at the cap."""
    generator = torch.Generator().manual_seed(seed)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(2, 64, (n,), generator=generator).tolist())

    rollouts = [
        Rollout(
            f"q{i // group_size}",
            i % group_size,
            ids(4),
            Completion(ids(3 + (5 * i) % 10), StopReason.LENGTH if i % 3 == 2 else StopReason.EOS),
            "",
            Grade(GradeStatus.CORRECT, float(i % 2)),
        )
        for i in range(rows)
    ]
    return build_batch(rollouts, group_size, cap=12)


@pytest.fixture
def policy(tiny_policy, monkeypatch: pytest.MonkeyPatch):
    """An FP64 policy whose norms are FP64 too (transformers computes them in FP32, too coarse for differences), with
    logits of order one, so that entropies have slopes."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(Qwen3RMSNorm, "forward", forward)
    return tiny_policy("float64", initializer_range=0.3)


def moved(policy, gradient, step: float):
    """A copy of the policy `step` along `gradient`."""
    copy = probe.widened(policy)
    with torch.no_grad():
        for name, p in probe.parameters(copy).items():
            p.add_(gradient[name], alpha=step)
    return copy


def difference(measure, policy, gradient) -> torch.Tensor:
    """Central difference of `measure` along `gradient` made unit length, scaled back: its error is of order EPS^2."""
    length = probe.norm(gradient)
    step = EPS / length
    with torch.no_grad():
        return (measure(moved(policy, gradient, step)) - measure(moved(policy, gradient, -step))) / (2 * step)


def test_gradient_of_the_entropy(policy) -> None:
    contexts = batch(1)
    h, gradient = probe.entropy_gradient(probe.widened(policy), contexts, 64)
    assert h == pytest.approx(probe.entropy(policy, contexts, 10**6), rel=1e-12)
    found = difference(lambda p: probe.entropy(p, contexts, 64), policy, gradient)
    assert found == pytest.approx(probe.dot(gradient, gradient), rel=1e-5)


def test_slopes_against_finite_differences_and_backward(policy) -> None:
    rollouts, wide = batch(2), probe.widened(policy)
    _, gradient = probe.entropy_gradient(wide, batch(1), 64)
    slopes = probe.slopes_forward(wide, rollouts, gradient, 64)
    numeric = difference(lambda p: token_logprobs(p, rollouts)[0], policy, gradient)
    scale = float(slopes.abs().max())
    assert float((slopes - numeric).abs().max()) < 1e-5 * scale
    weights = ORLSeqmean().token_weights(rollouts)
    uneven = weights * torch.rand(weights.shape, generator=torch.Generator().manual_seed(0))
    backward = probe.slopes_backward(wide, rollouts, gradient, [rollouts.mask.double(), uneven])
    # both are FP64 sums of some thousand products: 1e-12 each
    assert float((backward[0] - slopes.sum(1)).abs().max()) < 1e-9 * scale
    assert float((backward[1] - (uneven * slopes).sum(1)).abs().max()) < 1e-9 * scale


def test_micro_batches_change_nothing(policy) -> None:
    rollouts, wide = batch(2), probe.widened(policy)
    _, gradient = probe.entropy_gradient(wide, batch(1), 1)
    whole = probe.entropy_gradient(wide, batch(1), 10**6)[1]
    assert probe.dot(gradient, whole) == pytest.approx(probe.dot(whole, whole), rel=1e-12)
    one = probe.slopes_forward(wide, rollouts, gradient, 1)
    assert torch.allclose(one, probe.slopes_forward(wide, rollouts, gradient, 10**6), rtol=1e-9, atol=1e-9)


def test_forward_and_backward_agree_in_single_precision(tiny_policy) -> None:
    wide, rollouts = probe.widened(tiny_policy("bfloat16", initializer_range=0.3)), batch(2)
    _, gradient = probe.entropy_gradient(wide, batch(1), 64)
    forward = probe.slopes_forward(wide, rollouts, gradient, 64).sum(1)
    backward = probe.slopes_backward(wide, rollouts, gradient, [rollouts.mask.double()])[0]
    # FP32 keeps 6e-8 of sums whose terms cancel by two or three digits
    assert float((forward - backward).abs().max()) < 1e-4 * float(backward.abs().max())


def test_direction_and_first_order_effect(policy) -> None:
    rollouts, contexts, wide = batch(2), batch(1), probe.widened(policy)
    _, gradient = probe.entropy_gradient(wide, contexts, 64)
    weights = ORL().token_weights(rollouts)
    d = probe.direction(wide, rollouts, weights, 64)
    effect = float((weights * probe.slopes_forward(wide, rollouts, gradient, 64)).sum())
    assert probe.dot(gradient, d) == pytest.approx(effect, rel=1e-9)
    found = difference(lambda p: probe.entropy(p, contexts, 64), policy, d)
    assert found == pytest.approx(effect, rel=1e-5)


def test_a_small_sign_step_does_what_the_gradient_says(policy) -> None:
    contexts, wide = batch(1), probe.widened(policy)
    _, gradient = probe.entropy_gradient(wide, contexts, 64)
    d = probe.direction(wide, batch(2), ORL().token_weights(batch(2)), 64)
    steps = probe.RealisedSteps(policy, wide, contexts, 64)
    first_order = sum(float((g * d[name].sign()).sum()) for name, g in gradient.items())
    change = steps.sign(d, 1e-8)
    # second order: 1e-8 times the curvature over 2e4 coordinates, at most about 1e-4 of the first
    assert change / 1e-8 == pytest.approx(first_order, rel=1e-3)
    # AdamW's first step is d/(|d| + 1e-8) and a decay of 1e-2 w: a sign step but for coordinates below 1e-6
    assert steps.adamw(d, 1e-8, None) / 1e-8 == pytest.approx(first_order, rel=0.05)
    assert steps.adamw(d, 1e-8, 1e-3) != steps.adamw(d, 1e-8, None)


def test_steps_are_taken_in_the_dtype_of_the_weights_and_leave_nothing_behind(tiny_policy) -> None:
    policy = tiny_policy("bfloat16")
    contexts, wide = batch(1), probe.widened(policy)
    before, wide_before = policy.weights_sha256(), wide.weights_sha256()
    steps = probe.RealisedSteps(policy, wide, contexts, 64)
    ones = {name: torch.ones_like(p) for name, p in probe.parameters(policy).items()}
    assert steps.sign(ones, 1e-12) == 0.0  # far below half an ulp of every weight
    by_hand = probe.widened(policy)
    with torch.no_grad():
        for name, p in probe.parameters(policy).items():
            probe.parameters(by_hand)[name].copy_(p + 0.01)  # added and rounded in BF16
    assert steps.sign(ones, 0.01) == probe.entropy(by_hand, contexts, 64) - steps.start
    assert steps.random_sign(0.01, 3) == steps.random_sign(0.01, 3) != steps.random_sign(0.01, 4)
    steps.adamw(ones, 0.01, 1.0)
    assert (policy.weights_sha256(), wide.weights_sha256()) == (before, wide_before)
