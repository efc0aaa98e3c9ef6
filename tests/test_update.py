"""One update: every split into micro-batches gives the same gradient, and steps happen exactly when they should."""

from __future__ import annotations

import math

import pytest
import torch

from rlvr_pl.errors import RunFailure
from rlvr_pl.objectives import GRPO, Objective
from rlvr_pl.types import Completion, Grade, GradeStatus, Rollout, StopReason, build_batch
from rlvr_pl.update import (
    GradientSum,
    NonFiniteError,
    accumulate_gradient,
    count_uniform_groups,
    measured,
    plan_micro_batches,
    token_logprobs,
    update_once,
)


def make_batch(rewards, lengths, *, group_size=4, prompts=(3, 5), seed=0):
    """Rollouts of random tokens 2..63; prompts of the two groups have different lengths."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n):
        return tuple(torch.randint(2, 64, (n,), generator=generator).tolist())

    heads = [draw(prompts[i % len(prompts)]) for i in range(len(rewards) // group_size)]
    rollouts = [
        Rollout(
            uid=f"q{i // group_size}",
            sample=i % group_size,
            prompt_ids=heads[i // group_size],
            completion=Completion(draw(n), StopReason.EOS, tuple([0.0] * n)),
            text="",
            grade=Grade(GradeStatus.CORRECT if r else GradeStatus.WRONG, float(r)),
        )
        for i, (r, n) in enumerate(zip(rewards, lengths))
    ]
    return build_batch(rollouts, group_size, update=1, cap=16)


MIXED = {"rewards": (1, 0, 0, 1, 0, 0, 1, 0), "lengths": (3, 9, 1, 4, 12, 2, 7, 5)}


class Ratio(Objective):
    """GRPO's weights, learned through the autograd path."""

    def token_weights(self, batch):
        return GRPO().token_weights(batch)

    def loss(self, logprobs, weights, batch):
        return -(weights * (logprobs - logprobs.detach()).exp()).sum()


def gradient(policy, objective, batch, max_tokens):
    weights = objective.token_weights(batch)
    total = GradientSum([(p, p) for p in policy.model.parameters()])
    loss, _ = accumulate_gradient(policy, objective, batch, weights, total, max_tokens=max_tokens)
    total.deliver()
    flat = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
    for p in policy.model.parameters():
        p.grad = None
    return loss, flat


@pytest.mark.parametrize("objective", [GRPO(), GRPO(aggregation="sequence-mean"), Ratio()])
def test_micro_batches_only_sum(tiny_policy, objective):
    """FP64: one rollout at a time (1 token a micro-batch), about three (40 tokens), and all give one gradient. The sums
    differ by rounding alone: about 1e3 additions of numbers near 1e-1, 1e3 * 1e-16 * 1e-1 = 1e-14; 1e-10 is far above
    that and far below any wrong denominator (at least 1/8)."""
    policy = tiny_policy()
    batch = make_batch(**MIXED)
    loss, whole = gradient(policy, objective, batch, 10**6)
    for max_tokens in (1, 40):
        part_loss, part = gradient(policy, objective, batch, max_tokens)
        assert part_loss == pytest.approx(loss, abs=1e-10)
        assert (part - whole).norm() <= 1e-10 * whole.norm()


def test_fused_linear_path_equals_autograd_path(tiny_policy):
    """Ratio's gradient at ratio 1 is the linear one; its value is -sum(w) instead of -sum(w log p)."""
    policy = tiny_policy()
    batch = make_batch(**MIXED)
    _, fused = gradient(policy, GRPO(), batch, 10**6)
    _, plain = gradient(policy, Ratio(), batch, 10**6)
    assert (fused - plain).norm() <= 1e-10 * plain.norm()


def test_token_logprobs_equal_those_of_the_models_logits(tiny_policy):
    policy = tiny_policy()
    batch = make_batch(**MIXED)
    logprobs, entropy = token_logprobs(policy, batch, temperature=0.7, with_entropy=True)
    for i in range(len(batch)):
        n = int(batch.lengths[i])
        ids = torch.tensor([*batch.prompt_ids[i], *batch.token_ids[i, :n].tolist()])
        logits = policy.model(ids[None]).logits[0].detach() / 0.7
        expected = torch.log_softmax(logits, -1)[len(batch.prompt_ids[i]) - 1 : -1]
        picked = expected.gather(1, batch.token_ids[i, :n, None])[:, 0]
        assert torch.allclose(logprobs[i, :n], picked, atol=1e-12)
        assert torch.allclose(entropy[i, :n], -(expected.exp() * expected).sum(1), atol=1e-12)
        assert not logprobs[i, n:].any()


def test_measured_matches_the_differentiable_pass(tiny_policy):
    policy = tiny_policy()
    batch = make_batch(**MIXED)
    logprobs, entropy = measured(policy, batch, max_tokens=30, temperature=1.0, with_entropy=True)
    exact, exact_entropy = token_logprobs(policy, batch, with_entropy=True)
    # kept as FP32: relative rounding 6e-8 of values below 10
    assert torch.allclose(logprobs.double(), exact, atol=1e-6)
    assert torch.allclose(entropy.double(), exact_entropy, atol=1e-6)


def test_plan_keeps_to_its_budget_and_loses_no_row():
    batch = make_batch(**MIXED)
    # padded widths: prompt 3 or 5 plus the length
    widths = [6, 12, 4, 7, 17, 7, 12, 10]
    plan = plan_micro_batches(batch, range(8), 24)
    assert sorted(i for rows in plan for i in rows) == list(range(8))
    assert all(len(rows) == 1 or len(rows) * max(widths[i] for i in rows) <= 24 for rows in plan)
    assert plan[0] == [4]  # 17 is the longest; two of them would need 34


def adamw(policy):
    return torch.optim.AdamW(policy.model.parameters(), lr=1e-2, weight_decay=0.1)


def snapshot(policy, optimizer):
    state = {k: v.clone() for s in optimizer.state.values() for k, v in s.items() if k == "step"}
    return [p.detach().clone() for p in policy.model.parameters()], state


def test_uniform_update_is_skipped_or_stepped_as_the_supplied_code_does(tiny_policy):
    """After one real step, a uniform batch: "skip" leaves weights and optimizer state alone; "step" is AdamW's step on
    a zero gradient: m <- .9 m, v <- .999 v, decay, all applied by torch itself in the reference."""
    mixed, uniform = make_batch(**MIXED), make_batch((1,) * 4 + (0,) * 4, MIXED["lengths"])
    policies = [tiny_policy() for _ in range(3)]
    optimizers = [adamw(p) for p in policies]
    for policy, optimizer in zip(policies, optimizers):
        assert update_once(policy, GRPO(), mixed, GRPO().token_weights(mixed), optimizer).stepped
    weights = GRPO().token_weights(uniform)
    assert not weights.any()
    before, _ = snapshot(policies[0], optimizers[0])
    state = [v["exp_avg"].clone() for v in optimizers[0].state.values()]

    skipped = update_once(policies[0], GRPO(), uniform, weights, optimizers[0], uniform_update="skip")
    assert not skipped.stepped
    assert all(torch.equal(a, b) for a, b in zip(before, policies[0].model.parameters()))
    assert all(torch.equal(a, v["exp_avg"]) for a, v in zip(state, optimizers[0].state.values()))

    stepped = update_once(policies[1], GRPO(), uniform, weights, optimizers[1], uniform_update="step")
    assert (stepped.stepped, stepped.grad_norm, stepped.clipped) == (True, 0.0, False)
    for p in policies[2].model.parameters():
        p.grad = torch.zeros_like(p)
    optimizers[2].step()
    assert all(torch.equal(a, b) for a, b in zip(policies[1].model.parameters(), policies[2].model.parameters()))
    assert not torch.equal(policies[1].head, policies[0].head)


def test_clip_reports_the_norm_before_clipping(tiny_policy):
    batch = make_batch(**MIXED)
    weights = GRPO().token_weights(batch)
    one, two = tiny_policy(), tiny_policy()
    sgd = [torch.optim.SGD(p.model.parameters(), lr=1.0) for p in (one, two)]
    unclipped = update_once(one, GRPO(), batch, weights, sgd[0], max_grad_norm=None)
    small = unclipped.grad_norm / 10
    clipped = update_once(two, GRPO(), batch, weights, sgd[1], max_grad_norm=small)
    assert clipped.grad_norm == pytest.approx(unclipped.grad_norm, rel=1e-12)
    assert (unclipped.clipped, clipped.clipped) == (False, True)
    start = tiny_policy()
    moved = [
        math.sqrt(sum(float(((a - b) ** 2).sum()) for a, b in zip(p.model.parameters(), start.model.parameters())))
        for p in (one, two)
    ]
    # SGD at rate 1 moves by the gradient: its norm, and after clipping a tenth of it (torch divides by norm + 1e-6)
    assert moved[0] == pytest.approx(unclipped.grad_norm, rel=1e-9)
    assert moved[1] == pytest.approx(small, rel=1e-5)


def test_out_of_memory_halves_the_micro_batch_and_changes_nothing(tiny_policy, monkeypatch, capsys):
    import rlvr_pl.update as room

    policy = tiny_policy()
    batch = make_batch(**MIXED)
    loss, whole = gradient(policy, GRPO(), batch, 10**6)
    real = room._backward

    def greedy(policy, objective, part, weights, temperature):
        if len(part) > 2:
            real(policy, objective, part.select([0]), weights[:1], temperature)  # leaves a half-done gradient behind
            raise torch.OutOfMemoryError("no room")
        return real(policy, objective, part, weights, temperature)

    monkeypatch.setattr(room, "_backward", greedy)
    again, halves = gradient(policy, GRPO(), batch, 10**6)
    assert again == pytest.approx(loss, abs=1e-10)
    assert (halves - whole).norm() <= 1e-10 * whole.norm()
    assert "out of memory" in capsys.readouterr().err


def test_a_cpu_without_memory_halves_too_and_says_when_one_rollout_does_not_fit(tiny_policy, monkeypatch, capsys):
    import rlvr_pl.update as room

    def hungry(policy, objective, part, weights, temperature):
        torch.empty(2**50, dtype=torch.uint8)  # a petabyte: torch's own complaint, a plain RuntimeError

    monkeypatch.setattr(room, "_backward", hungry)
    batch = make_batch(**MIXED)
    with pytest.raises(RunFailure, match=r"rollout q1#0 alone, 12 tokens after a prompt of 5;"):
        gradient(tiny_policy(), GRPO(), batch, 10**6)
    # 8 rollouts, 4, 2, 1: halved three times before the longest stands alone
    assert capsys.readouterr().err.count("halved") == 3


def test_a_loss_that_is_not_finite_stops_before_the_step(tiny_policy):
    policy = tiny_policy()
    batch = make_batch(**MIXED)
    weights = GRPO().token_weights(batch)
    optimizer = adamw(policy)
    with torch.no_grad():
        policy.head[5, 0] = math.nan
    before = [p.detach().clone() for p in policy.model.parameters()]
    with pytest.raises(NonFiniteError, match=r"rollouts q"):
        update_once(policy, GRPO(), batch, weights, optimizer)
    assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(before, policy.model.parameters()))


def test_uniform_groups_are_counted():
    batch = make_batch((1, 1, 1, 1, 0, 1, 0, 0), MIXED["lengths"])
    assert count_uniform_groups(batch) == 1


def test_padding_to_steps_changes_nothing(tiny_policy, monkeypatch):
    """FP64 sums only gain zeros: equal to rounding (1e-16 a sum of 1e3 terms). BF16 rows of the head's gradient round
    at 2^-8 each, and so does their difference."""
    import rlvr_pl.core.logprobs as head
    import rlvr_pl.update as room

    batch = make_batch(**MIXED)
    results = {}
    for step in (1, 16):
        monkeypatch.setattr(room, "WIDTH_STEP", step)
        monkeypatch.setattr(head, "_ROW_STEP", step)
        results[step] = [gradient(tiny_policy(dtype), GRPO(), batch, 10**6) for dtype in ("float64", "bfloat16")]
    for (loss, plain), (padded_loss, padded), tolerance in zip(results[1], results[16], (1e-12, 2**-8)):
        assert padded_loss == pytest.approx(loss, rel=tolerance)
        assert (plain - padded).norm() <= tolerance * plain.norm()
