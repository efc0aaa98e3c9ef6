"""What must not change the loss or the gradient: how an update is cut, padded and ordered.

All in FP64 on random batches. A loss here is a sum of at most 9 x 9 terms of size up to about 100 (a ratio of
exp(+-4) times a weight), in any order: rounding is below 1e-12 of the sum of magnitudes, and 1e-10 relative to the
largest entry leaves room for cancellation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_pl import objectives as o
from rlvr_pl.analysis.objectives import objective_classes
from rlvr_pl.objectives.base import check_weights
from rlvr_pl.types import Branch, RolloutBatch, Totals

Make = Callable[[], o.Objective]

SETTINGS: dict[str, dict] = {
    # At their defaults these would find nothing to do in batches of some fifty tokens.
    "PassAtK": {"k": 2},
    "ClipCov": {"share": 0.3, "low": 0.01, "high": 100.0},
    "KLCov": {"share": 0.3},
}
EVERY_CLASS: dict[str, Make] = {
    cls.__name__: (lambda cls=cls: cls(**SETTINGS.get(cls.__name__, {}))) for cls in objective_classes()
}
VARIANTS: dict[str, Make] = {
    "GRPO-all-terms": lambda: o.GRPO(
        scale="batch-std",
        aggregation="constant",
        mask_truncated=True,
        positive_weight=0.5,
        entropy_top=0.4,
        correction=o.MismatchCorrection(),
        kl=o.KLPenalty(0.3),
        entropy_bonus=o.EntropyBonus(0.1),
    ),
    "GRPO-k1": lambda: o.GRPO(kl=o.KLPenalty(0.3, "k1"), entropy_bonus=o.EntropyBonus(0.1)),
    "ClippedGRPO-epochs-k2": lambda: o.ClippedGRPO(
        inner_epochs=2, kl=o.KLPenalty(0.3, "k2"), off_policy_mask=o.OffPolicyMask(0.05), mask_truncated=True
    ),
    "ClippedGRPO-truncate": lambda: o.ClippedGRPO(correction=o.MismatchCorrection("token", "truncate", 0.5, 2.0)),
    "GSPO-token-epochs": lambda: o.GSPO(level="sequence-token", inner_epochs=2, entropy_top=0.5),
    "GMPO-epochs": lambda: o.GMPO(inner_epochs=2),
    "CISPO-epochs": lambda: o.CISPO(inner_epochs=2, level="sequence"),
    "SAPO-epochs": lambda: o.SAPO(inner_epochs=2),
    "VESPO-corrected": lambda: o.VESPO(correction=o.MismatchCorrection("token", "mask", 0.2, 4.0)),
    "KLCov-masked": lambda: o.KLCov(share=0.3, mask_truncated=True),
    "Fork-shuffled": lambda: o.ForkCredit(credit="shuffled", norm="forks", truncated="zero"),
    "Fork-rankc-add": lambda: o.ForkCredit(credit="rankc", combine="add", scope="group", norm="tokens"),
    "Fork-srank-centred": lambda: o.ForkCredit(credit="srank", combine="hybrid", center=True),
    "Fork-suffix": lambda: o.ForkCredit(spread="suffix"),
    "Fork-branch": lambda: o.ForkCredit(source="branch", forks_per_rollout=2, min_gap=2, entropy_quantile=0.3),
    "Fork-segment": lambda: o.ForkCredit(
        source="branch", spread="segment", combine="hybrid", forks_per_rollout=3, min_gap=2, entropy_quantile=0.3
    ),
}
ALL = {**EVERY_CLASS, **VARIANTS}
each_objective = pytest.mark.parametrize("make", ALL.values(), ids=ALL.keys())
# Each example is some ten small tensor programs; derandomized, so that a run of the tests is repeatable.
few_examples = settings(max_examples=10, deadline=None, derandomize=True)


@st.composite
def updates(draw: st.DrawFn) -> tuple[RolloutBatch, torch.Tensor]:
    """A batch with every field filled in, and the current log-probs [N, T]. NaN on padding."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    group_size, groups = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    n = group_size * groups
    lengths = torch.tensor(rng.integers(0, 9, n))
    mask = torch.arange(int(lengths.max()) + 1) < lengths[:, None]
    truncated = torch.tensor(rng.random(n) < 0.3)

    def field(low: float, high: float) -> torch.Tensor:
        return torch.tensor(rng.uniform(low, high, mask.shape)).where(mask, math.nan)

    old = field(-4, 0)
    batch = RolloutBatch(
        uids=tuple(f"q{i // group_size}" for i in range(n)),
        samples=tuple(i % group_size for i in range(n)),
        group_size=group_size,
        prompt_ids=((1, 2),) * n,
        token_ids=torch.tensor(rng.integers(0, 2, mask.shape)),  # two tokens: the tree has many forks
        mask=mask,
        rewards=torch.tensor(rng.choice([0.0, 0.0, 1.0, 1.0, 0.5, math.nan], n)),
        truncated=truncated,
        totals=Totals(n, int(mask.sum()), int(mask[truncated].sum())),
        update=3,
        seed=5,
        cap=8,
        old_logprobs=old,
        start_logprobs=old + field(-0.5, 0.5),
        sampling_logprobs=old + field(-0.5, 0.5),
        entropy=field(0, 3),
        sampling_entropy=field(0, 3),
    )
    return batch, old + field(-0.5, 0.5)


def ready(objective: o.Objective, batch: RolloutBatch) -> tuple[RolloutBatch, torch.Tensor]:
    """What the update does before the loss. A continuation's outcome depends on the rollout and the position alone."""
    branches = []
    for request in objective.requests(batch):
        key = [int(batch.uids[request.row][1:]), batch.samples[request.row], request.position]
        rng = np.random.default_rng(key)
        rewards, cut = rng.integers(0, 2, request.count), rng.random(request.count) < 0.2
        branches.append(Branch(request, tuple(map(float, rewards)), tuple(map(bool, cut)), 10))
    batch = batch.replace(branches=tuple(branches))
    batch = batch.replace(extras=objective.prepare(batch))
    weights = objective.token_weights(batch)
    check_weights(objective, weights, batch)
    return batch, weights


def loss_and_gradients(
    objective: o.Objective, batch: RolloutBatch, logprobs: torch.Tensor, parts: list[list[int]] | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss [], and its gradients [N, T] with respect to log-probs and entropies, summed over micro-batches."""
    batch, weights = ready(objective, batch)
    logprobs, entropy = (x.detach().clone().requires_grad_() for x in (logprobs, batch.entropy))
    total = logprobs.new_zeros(())
    for rows in parts or [list(range(len(batch)))]:
        part = batch.select(rows)
        width = part.mask.shape[1]
        part = part.replace(entropy=entropy[rows][:, :width])
        total = total + objective.loss(logprobs[rows][:, :width], weights[rows][:, :width], part)
    gradients = torch.autograd.grad(total, [logprobs, entropy], allow_unused=True, materialize_grads=True)
    return total.detach(), *(g * batch.mask for g in gradients)


def assert_same(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for x, y in zip(found, expected, strict=True):
        assert x.isfinite().all()
        scale = max(1.0, float(y.abs().max())) if y.numel() else 1.0
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10 * scale)


@each_objective
@few_examples
@given(updates(), st.randoms(use_true_random=False))
def test_cut_into_micro_batches_and_ranks(make: Make, update, random) -> None:
    batch, logprobs = update
    rows = list(range(len(batch)))
    random.shuffle(rows)
    cuts = sorted({0, len(rows), *(random.randrange(len(rows) + 1) for _ in range(3))})
    parts = [rows[a:b] for a, b in pairwise(cuts)]
    assert_same(loss_and_gradients(make(), batch, logprobs, parts), loss_and_gradients(make(), batch, logprobs))


@each_objective
@few_examples
@given(updates())
def test_padding(make: Make, update) -> None:
    batch, logprobs = update

    def wider(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, torch.full((len(x), 5), math.nan if x.is_floating_point() else 0, dtype=x.dtype)], 1)

    names = ("token_ids", "mask", "old_logprobs", "start_logprobs", "sampling_logprobs", "entropy", "sampling_entropy")
    wide = batch.replace(**{name: wider(getattr(batch, name)) for name in names})
    loss, *gradients = loss_and_gradients(make(), wide, wider(logprobs))
    trimmed = (loss, *(g[:, : batch.mask.shape[1]] for g in gradients))
    assert_same(trimmed, loss_and_gradients(make(), batch, logprobs))


@each_objective
@few_examples
@given(updates(), st.randoms(use_true_random=False))
def test_order_of_groups_and_of_rows_within(make: Make, update, random) -> None:
    batch, logprobs = update
    groups = [list(range(g, g + batch.group_size)) for g in range(0, len(batch), batch.group_size)]
    random.shuffle(groups)
    for group in groups:
        random.shuffle(group)
    order = [i for group in groups for i in group]
    width = batch.mask.shape[1]
    shuffled = batch.select(order)
    loss, *gradients = loss_and_gradients(make(), shuffled, logprobs[order][:, : shuffled.mask.shape[1]])
    back = torch.tensor(order).argsort()
    restored = (torch.nn.functional.pad(g, (0, width - g.shape[1]))[back] for g in gradients)
    assert_same((loss, *restored), loss_and_gradients(make(), batch, logprobs))


@pytest.mark.parametrize("name", [name for name, make in ALL.items() if make().shift_invariant])
@few_examples
@given(updates(), st.lists(st.integers(-4, 4), min_size=3, max_size=3))
def test_constant_added_to_the_rewards_of_a_group(name: str, update, constants: list[int]) -> None:
    batch, logprobs = update
    shift = torch.tensor(constants).double().repeat_interleave(batch.group_size)[: len(batch)]
    shifted = batch.replace(rewards=batch.rewards + shift)
    assert_same(loss_and_gradients(ALL[name](), shifted, logprobs), loss_and_gradients(ALL[name](), batch, logprobs))


@each_objective
@few_examples
@given(updates())
def test_masked_rollouts_may_hold_nan_and_an_all_masked_batch_has_loss_zero(make: Make, update) -> None:
    objective = make()
    if not hasattr(objective, "mask_truncated") and not isinstance(objective, o.ForkCredit):
        assert isinstance(objective, o.ExpertIterationSFT)  # it has stored solutions, not sampled rollouts
        return
    batch, logprobs = update
    objective.mask_truncated, objective.truncated = True, "mask"
    nothing = torch.full_like(logprobs, math.nan)
    dead = batch.replace(
        truncated=torch.ones(len(batch), dtype=torch.bool),
        totals=Totals(len(batch), batch.totals.tokens, batch.totals.tokens),
    )
    for found in loss_and_gradients(objective, dead, nothing):
        assert (found == 0).all()
    # The same for single rollouts: what lies in them is never read.
    reference = loss_and_gradients(objective, batch, logprobs)
    hidden = nothing.where(batch.truncated[:, None], logprobs)
    assert_same(loss_and_gradients(objective, batch, hidden), reference)


@pytest.mark.parametrize("name", sorted({name for name, make in ALL.items() if make().shift_invariant} - {"DAPO"}))
@few_examples
@given(updates())
def test_uniform_groups_have_weight_zero(name: str, update) -> None:
    objective = ALL[name]()
    if isinstance(objective, o.ExpertIterationSFT):
        return
    batch, _ = update
    # 0.7 is not a binary fraction: the mean of equal rewards may be off by a rounding error.
    batch = batch.replace(rewards=torch.full_like(batch.rewards, 0.7))
    _, weights = ready(objective, batch)
    assert (weights == 0).all()
