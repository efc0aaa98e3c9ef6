"""The fast forward and backward of the blocks beside transformers' own, in FP64 and in FP32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from rlvr_pl import trunk

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "llama": LlamaConfig(**SHAPE),
    "llama, biases, long rope": LlamaConfig(
        **SHAPE,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={**LLAMA3, "rope_theta": 1e4, "original_max_position_embeddings": 16},
    ),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "qwen3, tied, one head": Qwen3Config(**(SHAPE | {"num_key_value_heads": 4}), head_dim=8, tie_word_embeddings=True),
}


def make(name: str, dtype: torch.dtype):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name]).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases start as ones and zeros, which would hide a mistake
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def batch():
    """Three right-padded rows of 11, 7 and 2 tokens; one of them holds the pad id as a token."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 61, (3, 11), generator=generator)
    real = torch.arange(11) < torch.tensor([11, 7, 2])[:, None]
    ids[0, 4] = 0
    return ids.masked_fill(~real, 0), real


def run(model, forward):
    """States of the real tokens, and the gradient of every parameter for a random gradient of the states."""
    ids, real = batch()
    states = forward(ids)[real]
    generator = torch.Generator().manual_seed(2)
    states.backward(torch.randn(states.shape, generator=generator, dtype=torch.float64).to(states.dtype))
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for p in model.parameters():
        p.grad = None
    return states.detach(), gradients


@pytest.fixture
def wide_norms(monkeypatch):
    """transformers computes RMSNorm in FP32 even for FP64 models; here in the model's own dtype."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

    for norm in (LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm):
        monkeypatch.setattr(norm, "forward", forward)


@pytest.mark.parametrize("name", MODELS)
def test_states_and_gradients_in_fp64(name, wide_norms):
    """Sums of some 1e3 terms of order 1 in FP64 round to 1e-13; 1e-9 is far above that and far below any mistake."""
    model = make(name, torch.float64)
    states, gradients = run(model, lambda ids: model.model(input_ids=ids, use_cache=False).last_hidden_state)
    own, own_gradients = run(model, lambda ids: trunk.hidden_states(model, ids))
    assert (own - states).abs().max() < 1e-9
    assert own_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert gradient.norm() > 0
        assert (own_gradients[name] - gradient).norm() <= 1e-9 * gradient.norm(), name


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_fp32_is_as_close_to_fp64_as_transformers_is(name):
    """Each side rounds at places of its own, so neither is bound to the other: ours is to be no farther from FP64 than
    four times what transformers' FP32 is."""
    model, exact = make(name, torch.float32), make(name, torch.float32).double()
    assert trunk.fits(model)
    _, truth = run(exact, lambda ids: trunk.hidden_states(exact, ids))
    _, theirs = run(model, lambda ids: model.model(input_ids=ids, use_cache=False).last_hidden_state)
    _, ours = run(model, lambda ids: trunk.hidden_states(model, ids))

    def error(found):
        return sum(float((found[k].double() - truth[k]).norm() / truth[k].norm()) for k in truth)

    assert error(ours) <= 4 * error(theirs)
    assert error(theirs) < 1e-4


def test_frozen_weights_stay_without_gradient():
    model = make("qwen3", torch.float32)
    model.model.layers[0].requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    _, gradients = run(model, lambda ids: trunk.hidden_states(model, ids))
    assert gradients
    assert not any(name.startswith(("model.layers.0.", "model.embed_tokens")) for name in gradients)


def test_fits_only_what_it_computes():
    model = make("qwen3", torch.float32)
    assert trunk.fits(model)
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    assert not trunk.fits(model)
    handle.remove()
    assert trunk.fits(model)
    model.model.layers[0].gradient_checkpointing = True
    assert not trunk.fits(model)
    model.model.layers[0].gradient_checkpointing = False
    model.model.layers[0].compile()
    assert not trunk.fits(model)
    model.model.layers[0]._compiled_call_impl = None
    model.config.hidden_act = "gelu"
    assert not trunk.fits(model)
    assert not trunk.fits(make("qwen3", torch.bfloat16))
    assert not trunk.fits(make("qwen3", torch.float64))
