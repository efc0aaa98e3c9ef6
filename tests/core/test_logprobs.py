"""Chunked log-probs, the fused linear loss and the drift sums against plain full-logits computations."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlvr_pl.core import logprobs as module
from rlvr_pl.core import products
from rlvr_pl.core.logprobs import chunked_logprobs, entropy_and_kl, linear_loss, token_logprobs_reference

GOLDEN = Path(__file__).parent.parent / "golden" / "trl_losses.json"


def case(rows: int, width: int, vocabulary: int, seed: int = 0, dtype: torch.dtype = torch.float64):
    """hidden, head (leaves), targets, weights."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    return hidden, head, targets, torch.randn(rows, generator=generator, dtype=torch.float64)


def plain(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(hidden @ head.T / temperature, -1)
    return logp.gather(-1, targets[..., None])[..., 0], -(logp.exp() * logp).sum(-1)


def test_by_hand():
    # logits [2, 0] at T 0.5 are [4, 0]: log softmax = 4 - log(e^4 + 1) = -log(1 + e^-4) = -0.0181499...
    # entropy = -(p log p + q log q) with q = 1/(1 + e^4) = 0.0179862, p = 0.9820138:
    #         = 0.9820138 * 0.0181499 + 0.0179862 * 4.0181499 = 0.0178235 + 0.0722713 = 0.0900948
    hidden, head = torch.tensor([[2.0]]), torch.tensor([[1.0], [0.0]])
    logprob, entropy = chunked_logprobs(hidden, head, torch.tensor([0]), temperature=0.5, with_entropy=True)
    assert logprob.item() == pytest.approx(-0.0181499, abs=1e-7)
    assert entropy.item() == pytest.approx(0.0900948, abs=1e-7)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    vocabulary=st.integers(1, 40),
    vocab_chunk=st.integers(1, 50),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    seed=st.integers(0, 10**6),
)
def test_values_and_gradients_equal_the_plain_way(rows, vocabulary, vocab_chunk, temperature, seed):
    hidden, head, targets, weights = case(rows, 5, vocabulary, seed)
    logprobs, entropy = chunked_logprobs(
        hidden, head, targets, temperature=temperature, vocab_chunk=vocab_chunk, with_entropy=True
    )
    expected, expected_entropy = plain(hidden, head, targets, temperature)
    found_grads = torch.autograd.grad((weights * logprobs).sum() + 0.3 * (weights**2 * entropy).sum(), [hidden, head])
    expected_grads = torch.autograd.grad(
        (weights * expected).sum() + 0.3 * (weights**2 * expected_entropy).sum(), [hidden, head]
    )
    # FP64 sums of at most 40 terms of magnitude below 100: 40 * 100 * 1e-16 and a margin
    for a, b in zip((logprobs, entropy, *found_grads), (expected, expected_entropy, *expected_grads)):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_gradients_survive_a_finite_difference_check():
    hidden, head, targets, _ = case(3, 4, 11)

    def function(hidden: Tensor, head: Tensor):
        return chunked_logprobs(hidden, head, targets, temperature=0.7, vocab_chunk=4, with_entropy=True)

    assert torch.autograd.gradcheck(function, (hidden, head), check_forward_ad=True, check_undefined_grad=True)


def test_cpu_tiles_of_rows_and_columns(monkeypatch: pytest.MonkeyPatch):
    # tiles far smaller than the problem, in both directions: 300 rows in blocks of 64, 5,000 columns in blocks of 2,048
    monkeypatch.setattr(module, "_CPU_TILE", 2**10)
    hidden, head, targets, weights = case(300, 3, 5000)
    found = chunked_logprobs(hidden, head, targets)
    expected, _ = plain(hidden, head, targets)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    grads = torch.autograd.grad((weights * found).sum(), [hidden, head])
    for a, b in zip(grads, torch.autograd.grad((weights * expected).sum(), [hidden, head])):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_never_more_logits_than_rows_times_chunk(monkeypatch: pytest.MonkeyPatch):
    sizes = []
    original = module._logits
    monkeypatch.setattr(module, "_logits", lambda *a: sizes.append(original(*a).numel()) or original(*a))
    hidden, head, targets, _ = case(10, 3, 100)
    chunked_logprobs(hidden, head, targets, vocab_chunk=7, with_entropy=True)[0].sum().backward()
    assert max(sizes) <= 10 * 7
    assert sum(sizes) == 2 * 10 * 100  # forward once, backward once


@pytest.mark.parametrize("number", range(3))
def test_golden(number: int):
    golden = json.loads(GOLDEN.read_text())["logprob_cases"][number]
    hidden, head = (torch.tensor(golden[k]).requires_grad_() for k in ("hidden", "weight"))
    targets, upstream = torch.tensor(golden["targets"]), torch.tensor(golden["upstream"])
    logprobs, entropy = chunked_logprobs(
        hidden, head, targets, temperature=golden["temperature"], vocab_chunk=8, with_entropy=True
    )
    grads = torch.autograd.grad((upstream * logprobs).sum() + 0.3 * entropy.sum(), [hidden, head])
    wanted = [torch.tensor(golden[k]) for k in ("log_probs", "entropy", "grad_hidden", "grad_weight")]
    # the file's figures are FP32, to 1e-5 by its own statement
    for found, expected in zip((logprobs, entropy, *grads), wanted):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    vocabulary=st.integers(1, 40),
    vocab_chunk=st.integers(1, 50),
    row_chunk=st.one_of(st.none(), st.integers(1, 10)),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    zeros=st.sets(st.integers(0, 8)),
    seed=st.integers(0, 10**6),
)
def test_linear_loss_equals_autograd(rows, vocabulary, vocab_chunk, row_chunk, temperature, zeros, seed):
    hidden, head, targets, weights = case(rows, 5, vocabulary, seed)
    weights[[z for z in zeros if z < rows]] = 0
    loss, logprobs = linear_loss(
        hidden,
        head,
        targets,
        weights,
        temperature=temperature,
        vocab_chunk=vocab_chunk,
        row_chunk=row_chunk,
        with_logprobs=True,
    )
    expected_logprobs, _ = plain(hidden, head, targets, temperature)
    expected = -(weights * expected_logprobs).sum()
    # twice the loss: the upstream gradient must reach the stored ones
    grads = torch.autograd.grad(2 * loss, [hidden, head])
    expected_grads = torch.autograd.grad(2 * expected, [hidden, head])
    for a, b in zip((loss, *grads), (expected, *expected_grads)):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    active = weights != 0
    torch.testing.assert_close(logprobs[active], expected_logprobs[active].detach(), rtol=1e-11, atol=1e-11)
    assert logprobs[~active].isnan().all() and not logprobs.requires_grad


def test_linear_loss_of_nothing_is_zero():
    hidden, head, targets, weights = case(4, 3, 7)
    loss = linear_loss(hidden, head, targets, 0 * weights)
    loss.backward()
    assert loss.item() == 0 and hidden.grad is not None and head.grad is not None
    assert not hidden.grad.any() and not head.grad.any()


def test_zero_weight_rows_may_hold_nan():
    hidden, head, targets, weights = case(4, 3, 7)
    weights[2] = 0
    with torch.no_grad():
        hidden[2] = torch.nan
    loss = linear_loss(hidden, head, targets, weights)
    loss.backward()
    assert loss.isfinite() and hidden.grad is not None and head.grad is not None
    assert hidden.grad.isfinite().all() and head.grad.isfinite().all()


def test_linear_loss_backward_runs_once():
    hidden, head, targets, weights = case(4, 3, 7)
    loss = linear_loss(hidden, head, targets, weights)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        loss.backward()


@pytest.mark.skipif(products._OPERATOR is None, reason="this torch has no oneDNN product")
@pytest.mark.parametrize("row_chunk", [None, 70])
def test_large_float32_heads_by_onednn(monkeypatch: pytest.MonkeyPatch, row_chunk: int | None):
    """Each side rounds at places of its own, so neither is bound to the other: oneDNN's is to be no farther from FP64
    than four times what torch's own products are. 150 rows fill blocks of 128 (70 rounded up) and 64 (22 padded), 5,000
    columns one tile of 4,096 and one of 904."""
    wide = case(150, 24, 5000)
    weights = wide[3].masked_fill(torch.arange(150) % 7 == 0, 0.0)
    truth = linear_loss(*wide[:3], weights, temperature=0.8)
    exact = [truth, *torch.autograd.grad(truth, wide[:2])]
    real, calls = products._OPERATOR, []

    def distance(operator) -> float:
        monkeypatch.setattr(products, "_OPERATOR", operator)
        hidden, head = (x.detach().float().requires_grad_() for x in wide[:2])
        loss = linear_loss(hidden, head, wide[2], weights.float(), temperature=0.8, row_chunk=row_chunk)
        found = [loss, *torch.autograd.grad(loss, [hidden, head])]
        return max(float((x.double() - y).norm() / y.norm()) for x, y in zip(found, exact))

    ours = distance(lambda *a: calls.append(a[0].shape) or real(*a))
    assert set(calls) <= {(128, 24), (64, 24), (128, 4096), (64, 4096), (128, 904), (64, 904), (4096, 128), (4096, 64),
                          (904, 128), (904, 64)} and calls  # fmt: skip
    theirs = distance(None)
    assert ours <= 4 * theirs
    assert theirs < 1e-5


@pytest.mark.skipif(products._OPERATOR is None, reason="this torch has no oneDNN product")
@pytest.mark.parametrize("temperature", [0.8, 1.0])
def test_sweeps_of_float32_heads_by_onednn(monkeypatch: pytest.MonkeyPatch, temperature: float):
    """As for `linear_loss`: no farther from FP64 than four times what torch's own products are. 150 rows are filled up
    to 192, 2,500 columns make one tile of 2,048 and one of 452."""
    wide = case(150, 24, 2500)
    other = [x.detach() for x in case(150, 24, 2500, seed=1)[:2]]

    def values(hidden: Tensor, head: Tensor) -> list[Tensor]:
        logprobs, entropy = chunked_logprobs(hidden, head, wide[2], temperature=temperature, with_entropy=True)
        weights = wide[3].to(hidden.dtype)
        grads = torch.autograd.grad((weights * logprobs).sum() + 0.3 * (weights**2 * entropy).sum(), [hidden, head])
        drift = entropy_and_kl(hidden.detach(), head.detach(), *(x.to(hidden.dtype) for x in other), wide[2])
        return [logprobs, entropy, *grads, *drift]

    exact = values(*wide[:2])
    real, calls = products._OPERATOR, []

    def distance(operator) -> float:
        monkeypatch.setattr(products, "_OPERATOR", operator)
        found = values(*(x.detach().float().requires_grad_() for x in wide[:2]))
        return max(float((x.double() - y).norm() / y.norm()) for x, y in zip(found, exact))

    ours = distance(lambda *a: calls.append(a[0].shape) or real(*a))
    # rows of logits and of both gradients; 2,048 and 452 columns
    assert set(calls) == {(192, 24), (192, 2048), (192, 452), (2048, 192), (452, 192)}
    theirs = distance(None)
    assert ours <= 4 * theirs
    assert theirs < 1e-5


@pytest.mark.parametrize("wanted", ["hidden", "head", "nothing"])
def test_linear_loss_computes_only_the_gradients_asked_for(wanted: str):
    hidden, head, targets, weights = case(4, 3, 7)
    expected = torch.autograd.grad(linear_loss(hidden, head, targets, weights), [hidden, head])
    if wanted == "nothing":
        with torch.no_grad():
            assert not linear_loss(hidden, head, targets, weights).requires_grad
        return
    if wanted == "hidden":
        loss = linear_loss(hidden, head.detach(), targets, weights)
        assert torch.equal(torch.autograd.grad(loss, hidden)[0], expected[0])
    else:
        loss = linear_loss(hidden.detach(), head, targets, weights)
        assert torch.equal(torch.autograd.grad(loss, head)[0], expected[1])


def test_any_leading_shape():
    hidden, head, targets, weights = case(6, 3, 7)
    shaped = hidden.view(2, 3, 3)
    found = chunked_logprobs(shaped, head, targets.view(2, 3))
    assert found.shape == (2, 3)
    assert torch.equal(found.flatten(), chunked_logprobs(hidden, head, targets))
    torch.testing.assert_close(
        token_logprobs_reference(shaped, head, targets.view(2, 3)), found, rtol=1e-12, atol=1e-12
    )
    loss = linear_loss(shaped, head, targets.view(2, 3), weights.view(2, 3))
    assert torch.equal(loss, linear_loss(hidden, head, targets, weights))


def test_bfloat16_inputs_are_summed_in_float32():
    # 4,000 equal logits: log-prob = -log(4000) = -8.294050; a BF16 sum of 4,000 ones would stop at 256
    hidden = torch.zeros(1, 4, dtype=torch.bfloat16, requires_grad=True)
    head = torch.ones(4000, 4, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.tensor([3])
    found, entropy = chunked_logprobs(hidden, head, targets, vocab_chunk=1000, with_entropy=True)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(-math.log(4000), rel=1e-6)
    assert entropy.item() == pytest.approx(math.log(4000), rel=1e-6)


def test_bfloat16_gradients_are_those_of_its_own_logits():
    hidden, head, targets, weights = case(40, 16, 300, dtype=torch.bfloat16)
    logits = (hidden @ head.T).float()  # rounded to BF16 by the product, as the model's head rounds them
    expected = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    loss = -(weights * expected).sum()
    expected_grads = torch.autograd.grad(loss, [hidden, head])
    for found in (
        -(weights * chunked_logprobs(hidden, head, targets, vocab_chunk=64)).sum(),
        linear_loss(hidden, head, targets, weights, vocab_chunk=64, row_chunk=16),
    ):
        assert found.item() == pytest.approx(loss.item(), rel=1e-5)
        for a, b in zip(torch.autograd.grad(found, [hidden, head]), expected_grads):
            assert a.dtype == torch.bfloat16
            # every factor and the result are rounded to BF16 (2^-9 relative, a few times) in another order
            assert (a - b).norm() < 2**-6 * b.norm()


@pytest.mark.parametrize("moving", ["hidden", "head", "both"])
def test_forward_mode(moving: str):
    hidden, head, targets, _ = (x.detach() for x in case(6, 4, 13))
    tangent = [torch.randn_like(hidden), torch.randn_like(head)]
    if moving == "hidden":
        tangent[1].zero_()
    elif moving == "head":
        tangent[0].zero_()

    def chunked(hidden: Tensor, head: Tensor):
        return chunked_logprobs(hidden, head, targets, temperature=0.8, vocab_chunk=5, with_entropy=True)

    found, found_dot = torch.func.jvp(chunked, (hidden, head), tuple(tangent))
    expected, expected_dot = torch.func.jvp(
        lambda hidden, head: plain(hidden, head, targets, 0.8), (hidden, head), tuple(tangent)
    )
    for a, b in zip((*found, *found_dot), (*expected, *expected_dot)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("vocab_chunk", [1, 7, 1000])
def test_drift_sums_equal_the_plain_way(vocab_chunk: int):
    hidden_a, head_a, targets, _ = (x.detach() for x in case(9, 6, 50))
    hidden_b, head_b, _, _ = (x.detach() for x in case(9, 4, 50, seed=1))
    entropy, kl, nll = entropy_and_kl(hidden_a, head_a, hidden_b, head_b, targets, vocab_chunk)
    log_a, log_b = (torch.log_softmax(h @ w.T, -1) for h, w in ((hidden_a, head_a), (hidden_b, head_b)))
    torch.testing.assert_close(entropy, -(log_b.exp() * log_b).sum(-1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(kl, (log_a.exp() * (log_a - log_b)).sum(-1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(nll, -log_b.gather(1, targets[:, None])[:, 0], rtol=1e-12, atol=1e-12)


def test_small_drift_in_float32_is_not_lost_in_rounding():
    hidden, head, targets, _ = (x.detach() for x in case(64, 16, 500))
    moved = head + 1e-3 * torch.randn(head.shape, generator=torch.Generator().manual_seed(2), dtype=head.dtype)
    exact = entropy_and_kl(hidden, head, hidden, moved, targets)
    found = entropy_and_kl(hidden.float(), head.float(), hidden.float(), moved.float(), targets, 64)
    assert exact[1].mean() < 1e-4 and found[1].dtype == torch.float32
    # a logit of magnitude 10 carries an FP32 error of about 1e-6, which enters the KL of a token times its gap (1e-3
    # times a few) and averages over 64 tokens; entropy and NLL carry it as it is
    assert found[1].mean().item() == pytest.approx(exact[1].mean().item(), rel=1e-2)
    assert found[0].mean().item() == pytest.approx(exact[0].mean().item(), rel=1e-6)
    assert found[2].mean().item() == pytest.approx(exact[2].mean().item(), rel=1e-6)


def test_no_drift_is_exactly_zero():
    hidden, head, targets, _ = (x.detach().float() for x in case(9, 6, 50))
    _, kl, _ = entropy_and_kl(hidden, head, hidden, head, targets.long(), 7)
    assert not kl.any()


def test_infinite_logits_give_nan_not_a_crash():
    hidden, head, targets, _ = (x.detach() for x in case(2, 3, 7))
    hidden[0] = torch.inf
    found = chunked_logprobs(hidden, head, targets, vocab_chunk=3)
    assert found[0].isnan() and found[1].isfinite()


@pytest.mark.parametrize(
    "change", [{"temperature": 0.0}, {"temperature": -1.0}, {"vocab_chunk": 0}, {"targets": torch.tensor([0])}]
)
def test_wrong_arguments(change: dict):
    hidden, head, targets, _ = case(2, 3, 7)
    with pytest.raises(ValueError):
        chunked_logprobs(hidden, head, change.pop("targets", targets), **change)


def test_wrong_weights_and_vocabularies():
    hidden, head, targets, weights = case(2, 3, 7)
    with pytest.raises(ValueError, match="weights"):
        linear_loss(hidden, head, targets, weights[:1])
    with pytest.raises(ValueError, match="vocabularies"):
        entropy_and_kl(hidden, head, hidden, head[:5], targets.clamp(max=4))
