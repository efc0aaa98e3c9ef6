"""The precision plugin: what BF16 rounds away, and what FP32 masters keep."""

from __future__ import annotations

import pytest
import torch

from rlvr_pl.precision import BF16Precision


def trained(master_weights: bool, lr: float, steps: int, start: torch.Tensor, grad: float = 1.0):
    """AdamW steps with a constant gradient through the plugin, as the module does them."""
    weight = torch.nn.Parameter(start.to(torch.bfloat16))
    optimizer = torch.optim.AdamW([weight], lr=lr, weight_decay=0.0)
    plugin = BF16Precision(master_weights)
    plugin.connect(torch.nn.Module(), [optimizer], [])
    for _ in range(steps):
        for _, stepped in plugin.trained_parameters(optimizer):
            stepped.grad = torch.full_like(stepped, grad)
        optimizer.step()
        plugin.round_masters()
    return weight, plugin, optimizer


def test_bf16_noop():
    """w = 1, constant gradient, rate 1e-3, 100 steps. Adam's step is the rate: 1e-3 < 2^-9, half a BF16 step below 1,
    so BF16 stays at 1; masters reach 1 - 100 * 1e-3 = 0.9, rounded to BF16 within 2^-9."""
    still, _, _ = trained(False, 1e-3, 100, torch.ones(4))
    assert torch.equal(still, torch.ones(4, dtype=torch.bfloat16))
    moved, plugin, optimizer = trained(True, 1e-3, 100, torch.ones(4))
    ((_, master),) = plugin.trained_parameters(optimizer)
    assert master.dtype is torch.float32
    assert torch.allclose(master, torch.full((4,), 0.9), atol=1e-5)
    assert torch.allclose(moved.float(), torch.full((4,), 0.9), atol=2**-9)


def test_masters_move_every_weight_where_bf16_leaves_most_alone():
    """Rate 1e-5 on weights spread over 1e-4..1: BF16 moves w only if 1e-5 is at least half its spacing, |w| * 2^-8 / 2
    at the most, so only |w| below about 5e-3, a third of the decades; the masters move all."""
    start = torch.logspace(-4, 0, 1000)
    bf16, _, _ = trained(False, 1e-5, 1, start)
    masters, plugin, optimizer = trained(True, 1e-5, 1, start)
    first = start.to(torch.bfloat16)
    assert float((bf16 != first).float().mean()) < 0.5
    assert torch.equal(bf16[start > 6e-3], first[start > 6e-3])
    ((_, master),) = plugin.trained_parameters(optimizer)
    assert bool((master != first.float()).all())
    assert torch.equal(masters, master.to(torch.bfloat16))


def test_masters_survive_a_checkpoint():
    _, plugin, optimizer = trained(True, 1e-5, 3, torch.ones(8))
    state = plugin.state_dict()
    ((_, master),) = plugin.trained_parameters(optimizer)
    fresh, other, optimizer2 = trained(True, 1e-5, 0, torch.zeros(8))
    other.load_state_dict(state)
    ((_, restored),) = other.trained_parameters(optimizer2)
    assert torch.equal(restored, master)
    assert torch.equal(fresh, master.to(torch.bfloat16))


def test_a_checkpoint_of_the_other_precision_is_refused():
    _, plugin, _ = trained(True, 1e-5, 1, torch.ones(8))
    _, other, _ = trained(False, 1e-5, 1, torch.ones(8))
    with pytest.raises(ValueError, match="master_weights"):
        other.load_state_dict(plugin.state_dict())


@pytest.mark.parametrize("master_weights", [False, True])
def test_weights_become_bf16_and_buffers_stay(tiny_policy, master_weights):
    """The rotary frequencies are a buffer; the logits must be those of the saved BF16 policy, bit for bit."""
    saved, trained_one = tiny_policy("float32"), tiny_policy("float32")
    for weight in saved.model.parameters():
        weight.data = weight.data.bfloat16()
    frequencies = trained_one.model.model.rotary_emb.inv_freq.clone()
    BF16Precision(master_weights).convert_module(trained_one.model)
    assert {p.dtype for p in trained_one.model.parameters()} == {torch.bfloat16}
    assert torch.equal(trained_one.model.model.rotary_emb.inv_freq, frequencies)
    ids = torch.arange(2, 62)[None]
    with torch.no_grad():
        assert torch.equal(trained_one.model(ids).logits, saved.model(ids).logits)
