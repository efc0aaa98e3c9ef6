"""Every shortcut of the update beside the simple way: the same gradient, the same numbers, only sooner."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch

from rlvr_pl import update as room
from rlvr_pl.core import products
from rlvr_pl.objectives import BNPO, CISPO, DAPO, GMPO, GSPO, LUSPO, SAPO, VESPO, ClippedGRPO, KLPenalty
from rlvr_pl.objectives.base import Objective
from rlvr_pl.types import Completion, Grade, GradeStatus, Rollout, StopReason, build_batch
from rlvr_pl.update import GradientSum, accumulate_gradient, clip, update_once

REWARDS, LENGTHS = (1, 0, 0, 1, 0, 0.5, 1, 0), (3, 9, 1, 4, 12, 2, 7, 5)


def make_batch(rewards=REWARDS, lengths=LENGTHS):
    """Two groups of four with prompts of 3 and 5 tokens; tokens are drawn from 2..63."""
    generator = torch.Generator().manual_seed(0)

    def draw(n):
        return tuple(torch.randint(2, 64, (n,), generator=generator).tolist())

    heads = [draw(3), draw(5)]
    rollouts = [
        Rollout(
            uid=f"q{i // 4}",
            sample=i % 4,
            prompt_ids=heads[i // 4],
            completion=Completion(draw(n), StopReason.EOS),
            text="",
            grade=Grade(GradeStatus.CORRECT if r else GradeStatus.WRONG, float(r)),
        )
        for i, (r, n) in enumerate(zip(rewards, lengths))
    ]
    return build_batch(rollouts, 4, update=1, cap=16)


def gradient(policy, objective, batch, max_tokens=10**6):
    """Loss, and the gradient of every parameter in one vector."""
    parameters = list(policy.model.parameters())
    total = GradientSum([(p, p) for p in parameters])
    loss, _ = accumulate_gradient(
        policy, objective, batch, objective.token_weights(batch), total, max_tokens=max_tokens, temperature=0.8
    )
    total.deliver()
    flat = torch.cat([p.grad.flatten() for p in parameters])
    for p in parameters:
        p.grad = None
    return loss, flat


FAMILIES = [
    BNPO(),
    ClippedGRPO(clip_low=0.0, clip_high=0.0),
    ClippedGRPO(delta=0.5),  # below 1: positive tokens stand at the cap and have no gradient
    DAPO(),
    GSPO(),
    GSPO(level="sequence-token"),
    LUSPO(),
    CISPO(),
    CISPO(cap=0.2),
    SAPO(),
    GMPO(),
    VESPO(),
    BNPO(mask_truncated=True, negative_weight=0.5),
]


@pytest.mark.parametrize("objective", FAMILIES, ids=lambda o: f"{type(o).__name__}-{FAMILIES.index(o)}")
def test_first_pass_of_a_ratio_is_linear(tiny_policy, monkeypatch, objective):
    """FP64 sums of about 1e3 terms below 1 round to 1e3 * 1e-16 = 1e-13; 1e-9 lies far above that."""
    policy, batch = tiny_policy(), make_batch()
    assert objective.linear_on_first_pass
    calls = []
    fused = room.linear_loss
    monkeypatch.setattr(room, "linear_loss", lambda *a, **k: calls.append(1) or fused(*a, **k))
    loss, quick = gradient(policy, objective, batch)
    assert calls
    monkeypatch.setattr(type(objective), "linear_on_first_pass", False)
    calls.clear()
    plain_loss, plain = gradient(policy, objective, batch)
    assert not calls
    assert loss == pytest.approx(plain_loss, abs=1e-9)
    assert (quick - plain).norm() <= 1e-9 * plain.norm()
    assert plain.norm() > 0


def test_later_passes_and_other_terms_take_the_general_path():
    class Square(BNPO):
        def surrogate(self, log_ratios, logprobs, weights, batch):
            return -(logprobs**2) * weights

    class Shifted(BNPO):
        def loss(self, logprobs, weights, batch):
            return super().loss(logprobs, weights, batch) + logprobs.square().sum()

    assert not Square().linear_on_first_pass
    assert not Shifted().linear_on_first_pass
    assert not BNPO(kl=KLPenalty()).linear_on_first_pass
    batch = make_batch()
    old = batch.replace(old_logprobs=torch.zeros(batch.mask.shape))
    assert room._first_pass_weights(BNPO(), BNPO().token_weights(old), old) is None

    class Own(Objective):
        def token_weights(self, batch):
            return batch.mask.double()

        def loss(self, logprobs, weights, batch):
            return logprobs.square().sum()

    assert room._first_pass_weights(Own(), batch.mask.double(), batch) is None


def test_rows_of_a_tied_embedding_are_added_to_the_heads_gradient(tiny_policy, monkeypatch):
    """FP64 sums of about 1e3 terms: see above. The general path (GSPO's later passes) and several micro-batches too."""
    policy, batch = tiny_policy(tie_word_embeddings=True), make_batch()
    old = batch.replace(old_logprobs=torch.full(batch.mask.shape, -4.0))
    found = []
    for off in (False, True):
        if off:
            monkeypatch.setattr(room, "RowGradients", lambda table: Nothing())
        found.append(
            [gradient(policy, BNPO(), batch), gradient(policy, BNPO(), batch, 40), gradient(policy, GSPO(), old)]
        )
    for (loss, ours), (plain_loss, plain) in zip(*found):
        assert loss == pytest.approx(plain_loss, abs=1e-9)
        assert (ours - plain).norm() <= 1e-9 * plain.norm()
        assert plain.norm() > 0


class Nothing(contextlib.nullcontext):
    def add(self):
        pass


@pytest.mark.skipif(products._OPERATOR is None, reason="this torch has no oneDNN product")
def test_fp32_gradients_are_as_close_to_fp64_as_those_of_transformers(tiny_policy, monkeypatch):
    """Trunk and oneDNN beside transformers' forward and torch's products. Each side rounds at places of its own: ours
    may be four times as far from FP64 as theirs."""
    batch = make_batch()
    _, exact = gradient(tiny_policy(), BNPO(), batch)
    monkeypatch.setattr(products, "ROWS", 16)  # the batch has 8 x 17 padded tokens: eight blocks and a rest
    real, calls = products._OPERATOR, []
    monkeypatch.setattr(products, "_OPERATOR", lambda *a: calls.append(1) or real(*a))
    loss, ours = gradient(tiny_policy("float32"), BNPO(), batch)
    logprobs, _ = room.measured(tiny_policy("float32"), batch, max_tokens=10**6, temperature=0.8)
    # 2 layers of 4 products and 8 blocks, each once forward and twice backward, and once more to measure
    assert len(calls) == 2 * 4 * 8 * (3 + 1)
    monkeypatch.setattr(products, "_OPERATOR", None)
    monkeypatch.setattr(room.trunk, "fits", lambda model: False)
    plain_loss, theirs = gradient(tiny_policy("float32"), BNPO(), batch)
    plain_logprobs, _ = room.measured(tiny_policy("float32"), batch, max_tokens=10**6, temperature=0.8)
    assert (ours.double() - exact).norm() <= 4 * (theirs.double() - exact).norm()
    assert (theirs.double() - exact).norm() < 1e-5 * exact.norm()
    assert loss == pytest.approx(plain_loss, abs=1e-6)
    assert torch.allclose(logprobs, plain_logprobs, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0.1, 1 - 1e-7, 1.0, 1 + 1e-6, 1.5, 40.0])
def test_clip_gives_torchs_bits(size, dtype):
    """Below the threshold nothing is multiplied, where torch multiplies by 1."""
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(n, generator=generator, dtype=torch.float64) for n in (7, 300)]
    norm = math.sqrt(sum(float(v.square().sum()) for v in values))
    ours, theirs = ([torch.nn.Parameter(torch.zeros_like(v, dtype=dtype)) for v in values] for _ in range(2))
    for p, q, v in zip(ours, theirs, values):
        p.grad = (v * (size / norm)).to(dtype)
        q.grad = p.grad.clone()
    expected = float(torch.nn.utils.clip_grad_norm_(theirs, 1.0))
    assert clip(ours, 1.0) == expected
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(ours, theirs))


def test_finite_finds_what_isfinite_finds():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for bad in (math.nan, math.inf, -math.inf):
            for at in (0, 500, 999):
                x = torch.linspace(-1, 1, 1000, dtype=torch.float64).mul(3e38).to(dtype)  # extremes 6e38 apart
                assert room._finite(x)
                x[at] = bad
                assert not room._finite(x)
    assert room._finite(torch.empty(0, 4))


def test_changed_share_counts_small_tensors_whole_and_samples_large_ones(monkeypatch):
    """With 10 watched weights a tensor, one of 12 x 8 is watched at every 9th place (96 // 10 = 9), 0 to 90: these
    are 11 and visit every column. Columns 0 and 1 hold places 0, 9, 72 and 81 of them: 4 of 11. The tensor of 5 is
    counted whole, 2 of 5. Together (4/11 * 96 + 2) / 101."""
    monkeypatch.setattr(room, "WATCHED", 10)
    large, small = torch.zeros(12, 8), torch.zeros(5)
    pairs = [(torch.nn.Parameter(w), torch.nn.Parameter(w)) for w in (large, small)]
    before = [room._watched(w).clone() for w, _ in pairs]
    large[:, :2] = 1
    small[1:3] = 1
    assert room._changed_share(before, pairs) == pytest.approx((4 / 11 * 96 + 2) / 101, abs=1e-12)


def test_changed_share_of_an_update_is_exact_at_these_sizes(tiny_policy):
    policy, batch = tiny_policy("float32"), make_batch()
    start = [p.detach().clone() for p in policy.model.parameters()]
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-9)  # too small for many of the weights
    result = update_once(policy, BNPO(), batch, BNPO().token_weights(batch), optimizer)
    changed = sum(int((a != b).sum()) for a, b in zip(start, policy.model.parameters()))
    assert result.changed_share == changed / sum(p.numel() for p in start)
    assert 0 < result.changed_share < 1
