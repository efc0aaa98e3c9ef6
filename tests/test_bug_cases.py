"""Faults that users of other trainers reported, each by its own input and the behaviour that is right.

Every case of the public list has a test of its name, here or nearer to the code that it is about.
"""

from __future__ import annotations

import ast
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlvr_pl import precision
from rlvr_pl.callbacks.sampler_canary import logprob_gaps
from rlvr_pl.core.logprobs import chunked_logprobs
from rlvr_pl.core.passk import mean_pass_at_k, pass_at_k
from rlvr_pl.core.windows import RolloutFacts, figures, tally
from rlvr_pl.objectives import GRPO
from rlvr_pl.precision import BF16Precision
from rlvr_pl.sampling import nucleus
from rlvr_pl.sampling.base import Decoding, SampleRequest
from rlvr_pl.sampling.torch import TorchSampler
from rlvr_pl.types import Completion, Grade, GradeStatus, Rollout, StopReason, build_batch
from rlvr_pl.update import GradientSum, accumulate_gradient, token_logprobs

TESTS = Path(__file__).resolve().parent
NOT_APPLICABLE: dict[str, str] = {}
"""Cases that this package cannot have, with the reason."""


def test_every_public_case_has_a_test_of_its_name(shared: Path) -> None:
    ids = {case["id"] for case in json.loads((shared / "cases" / "bug_cases.json").read_text())}
    assert len(ids) == 40
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in TESTS.rglob("test_*.py")]
    names = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert {i for i in ids if f"test_{i.replace('-', '_')}" not in names} == set(NOT_APPLICABLE)


def rollout(prompt, ids, reward=1.0, reason=StopReason.EOS, sample=0) -> Rollout:
    status = GradeStatus.CORRECT if reward == 1 else GradeStatus.WRONG
    return Rollout("q", sample, tuple(prompt), Completion(tuple(ids), reason), "", Grade(status, reward))


def sampled(policy, count: int, decoding: Decoding, worker: int = 0) -> list[Completion]:
    """`count` completions of one prompt by a sampler of its own; `worker` counts in the samples' numbers."""
    sampler = TorchSampler()
    sampler.sync(policy)
    keys = [("rollout", 42, 1, 0, "q", 0, worker * count + i) for i in range(count)]
    return sampler.generate([SampleRequest((5, 6), key) for key in keys], decoding)


# ---- masks ---------------------------------------------------------------------------------------------------------


def test_mask_multi_eos(tiny_policy) -> None:
    """EOS ids {1, 2}: the sampler stops at either, the mask keeps it, and nothing after it is drawn. At T = 1 some of
    the 64 nearly uniform completions of up to 40 tokens end with each (a chance of 2/64 a token)."""
    policy = replace(tiny_policy("float32"), eos_ids=(1, 2))
    completions = sampled(policy, 64, Decoding(1.0, 1.0, 40))
    for c in completions:
        ended = [i for i in c.token_ids if i in (1, 2)]
        assert ended == ([c.token_ids[-1]] if c.stop_reason is StopReason.EOS else [])
        assert c.stop_reason is StopReason.EOS or len(c.token_ids) == 40
    assert {c.token_ids[-1] for c in completions if c.stop_reason is StopReason.EOS} == {1, 2}
    batch = build_batch([rollout([3], [5, 6, 2]), rollout([3], [5, 6, 7, 8], reason=StopReason.LENGTH)], 2)
    assert batch.mask.int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch.truncated.tolist() == [False, True]


def test_mask_first_token(tiny_policy) -> None:
    """Prompt [1, 2], response [3, 4, EOS]: 3 | 1 2, 4 | 1 2 3 and EOS | 1 2 3 4, and nothing else. FP64 rounds at 1e-16
    a step; a token too many or too few changes the loss by about log 64 = 4."""
    policy, eos = tiny_policy(), 1
    batch = build_batch([rollout([1, 2], [3, 4, eos])], 1)
    log_softmax = torch.log_softmax(policy.model(torch.tensor([[1, 2, 3, 4, eos]])).logits[0], -1)
    expected = [log_softmax[position, token].item() for position, token in ((1, 3), (2, 4), (3, eos))]
    logprobs, _ = token_logprobs(policy, batch)
    assert logprobs[0].tolist() == pytest.approx(expected, abs=1e-12)
    total = GradientSum([(p, p) for p in policy.model.parameters()])
    weights = torch.ones(1, 3, dtype=torch.float64)
    loss, tokens = accumulate_gradient(policy, GRPO(), batch, weights, total, max_tokens=100)
    assert (loss, tokens) == (pytest.approx(-sum(expected), abs=1e-12), 3)


# ---- figures -------------------------------------------------------------------------------------------------------


def test_reward_nan_metric() -> None:
    # four updates whose rewards are 0.5, NaN, NaN, 0.8: the window's mean is 1.3/2 of the 2 that have one
    def update(reward: float):
        return tally([RolloutFacts(0, reward, False, 3, False, "eos")])

    window = figures([update(r) for r in (0.5, math.nan, math.nan, 0.8)])
    assert window["reward"] == pytest.approx(0.65, abs=1e-12)
    assert sum(update(r)["scored"] for r in (0.5, math.nan, math.nan, 0.8)) == 2
    nothing = figures([update(math.nan)])["reward"]
    assert nothing is None or math.isnan(nothing)


def test_pass_at_k_small_n() -> None:
    with pytest.raises(ValueError, match="k"):
        pass_at_k(2, 0, 5)
    with pytest.raises(ValueError, match="k"):
        mean_pass_at_k([(8, 1), (2, 0)], 5)
    # 1 - C(3,4)/C(4,4) = 1; 1 - C(3,2)/C(4,2) = 1 - 3/6; none right: 0
    assert [pass_at_k(n, c, k) for n, c, k in ((4, 1, 4), (4, 1, 2), (4, 0, 4), (64, 0, 64))] == [1.0, 0.5, 0.0, 0.0]


# ---- log-probs and sampling ----------------------------------------------------------------------------------------


def test_temperature_logprob(tiny_policy) -> None:
    """Logits [2, 0]: log softmax([4, 0])[0] = -log(1 + e^-4) = -0.01815 at T = 0.5, -log(1 + e^-2) = -0.12693 at 1."""
    hidden, head = torch.eye(1, dtype=torch.float64), torch.tensor([[2.0], [0.0]], dtype=torch.float64)
    for temperature, expected in ((0.5, -math.log1p(math.exp(-4))), (1.0, -math.log1p(math.exp(-2)))):
        value = chunked_logprobs(hidden, head, torch.tensor([0]), temperature=temperature)
        assert value.item() == pytest.approx(expected, abs=1e-12)
    # on policy, at the sampler's own temperature and without a nucleus, every ratio is 1: FP32 rounds log-probs of size
    # 4 at 2.4e-7 each, over sums of 64 terms; 1e-4 is far above that and far below T = 0.7 instead of 1 (about 0.1)
    policy = tiny_policy("float32")
    found = sampled(policy, 8, Decoding(0.7, 1.0, 12))
    batch = build_batch([Rollout("q", i, (5, 6), c, "", Grade(GradeStatus.WRONG, 0.0)) for i, c in enumerate(found)], 8)
    same, _ = token_logprobs(policy, batch, temperature=0.7)
    other, _ = token_logprobs(policy, batch, temperature=1.0)
    assert batch.sampling_logprobs is not None
    assert (same - batch.sampling_logprobs)[batch.mask].abs().max() < 1e-4
    assert (other - batch.sampling_logprobs)[batch.mask].abs().max() > 1e-3


def drawn(probs: list[float], top_p: float) -> set[int]:
    """Every token that some uniform draws, on a grid of 1000."""
    uniform = torch.arange(1000, dtype=torch.float64) / 1000
    ids, _ = nucleus.sample(torch.tensor([probs]).repeat(1000, 1), uniform, top_p)
    return set(ids.tolist())


def test_top_p_ties() -> None:
    assert drawn([0.25] * 4, 0.5) == {0, 1}
    assert drawn([0.4, 0.3, 0.3, 0.0], 0.7) == {0, 1}
    assert drawn([0.3, 0.3, 0.4, 0.0], 0.7) == {0, 2}
    assert drawn([0.25] * 4, 0.75) == {0, 1, 2}


def test_same_seed_workers(tiny_policy) -> None:
    """Two samplers with one seed: the samples' numbers name the draws, so no worker copies the other. Two equal random
    completions of 12 out of 64 tokens have a chance of about 64^-12."""
    policy = tiny_policy("float32")
    decoding = Decoding(1.0, 1.0, 12)
    both = [c.token_ids for worker in (0, 1) for c in sampled(policy, 4, decoding, worker)]
    assert len(set(both)) == 8
    assert both == [c.token_ids for worker in (0, 1) for c in sampled(policy, 4, decoding, worker)]
    assert both == [c.token_ids for c in sampled(policy, 8, decoding)]


def test_stale_weights(tiny_policy) -> None:
    """One large step: a sampler that was told agrees with the trainer to rounding (FP32, 64 terms: below 1e-4), one
    that was not is off by far more."""
    policy, decoding = tiny_policy("float32"), Decoding(1.0, 1.0, 12)
    requests = [SampleRequest((5, 6), ("k", i)) for i in range(4)]
    told, stale = TorchSampler(), TorchSampler()
    for sampler in (told, stale):
        sampler.sync(policy)
        sampler.generate(requests, decoding)  # fills caches
    with torch.no_grad():
        for p in policy.model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    told.sync(policy)

    def gap(sampler: TorchSampler) -> float:
        return max(logprob_gaps(policy, list(zip(requests, sampler.generate(requests, decoding))), decoding))

    assert gap(told) < 1e-4
    assert gap(stale) > 1e-2


# ---- precision -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "large", "warns"), [(1e-5, True, True), (3e-6, True, False), (1e-5, False, False)])
def test_lr_precision_coupling(monkeypatch, capsys, rate, large, warns) -> None:
    monkeypatch.setattr(precision, "LARGE", 4 if large else 5)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))], lr=rate)
    BF16Precision(master_weights=True).connect(torch.nn.Module(), [optimizer], [])
    assert ("1e-6 to 3e-6" in capsys.readouterr().err) == warns
    other = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))], lr=rate)
    BF16Precision(master_weights=False).connect(torch.nn.Module(), [other], [])
    assert capsys.readouterr().err == ""
