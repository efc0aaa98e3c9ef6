"""Both decoders against the plain transformers forward over the whole text, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlvr_pl.core import products
from rlvr_pl.sampling import fused
from rlvr_pl.sampling.decoder import Decoder, ForwardDecoder
from rlvr_pl.sampling.fused import FusedDecoder, fusable

SHAPE = {
    "vocab_size": 90,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FUSED = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8)),
    "qwen3-tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True)),
    "qwen3-yarn": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8, rope_parameters=YARN)),
    "qwen3-bias": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8, attention_bias=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama3": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3)),
    "llama-bias": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, hidden_act="gelu")),
}
NOT_FUSED = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=90, n_embd=24, n_layer=2, n_head=4, n_positions=128, bos_token_id=None, eos_token_id=None)
    ),
    "mistral-sliding": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=6)),
    "qwen3-sliding": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SHAPE, head_dim=8, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    ),
    "llama-dynamic": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    ),
}
# lengths and the rows that continue them: no padding and a window of 16 columns that is first wider than the text;
# padding within that window; padding beyond it
BATCHES = {
    "equal": ([[5, 6, 7], [8, 9, 10]], [0, 0, 1, 1, 1]),
    "padded": ([[5, 6, 7, 8, 9], [8], [10, 11, 12]], [0, 1, 1, 2, 2]),
    "long": ([list(range(10, 31)), [8], list(range(3, 20))], [0, 1, 2, 2]),
}


def make(kind: str) -> Any:
    """A model with weights large enough that its parts matter, norms and biases included."""
    torch.manual_seed(0)
    model = {**FUSED, **NOT_FUSED}[kind]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(4)
    return model


def decoder_of(model: Any) -> Decoder:
    return FusedDecoder(model, torch.float32) if fusable(model) else ForwardDecoder(model)


def expected_logits(model: Any, texts: list[list[int]]) -> Tensor:
    with torch.no_grad():
        return torch.stack([model(torch.tensor([text])).logits[0, -1].float() for text in texts])


def follow(decoder: Decoder, model: Any, batch: str, steps: int, scale: float = 1.25) -> float:
    """The largest error of the logits, relative to their largest, while rows grow and leave."""
    prompts, rows = BATCHES[batch]
    texts = [list(prompts[i]) for i in rows]
    generator = torch.Generator().manual_seed(1)
    worst = 0.0
    with torch.inference_mode():
        sequences = decoder.start(prompts, rows, steps, scale)
        for step in range(steps):
            expected = expected_logits(model, texts) * scale
            worst = max(worst, float((sequences.logits - expected).abs().max() / expected.abs().max()))
            if step in (2, 3, steps - 2) and len(texts) > 1:  # the first row leaves, the last one takes its place
                texts[0] = texts[-1]
                texts.pop()
                sequences.move(torch.tensor([len(texts)]), torch.tensor([0]), len(texts))
            tokens = torch.randint(0, 90, (len(texts),), generator=generator)
            for text, token in zip(texts, tokens.tolist()):
                text.append(token)
            sequences.step(tokens)
    return worst


@pytest.mark.parametrize("batch", list(BATCHES))
@pytest.mark.parametrize("kind", [*FUSED, *NOT_FUSED])
def test_logits_are_those_of_the_whole_text(kind: str, batch: str):
    model = make(kind)
    assert fusable(model) == (kind in FUSED)
    # FP32: two blocks of sums of up to 100 products, relative rounding 6e-8 each, amplified by the norms: below 1e-5
    assert follow(decoder_of(model), model, batch, 20) < 1e-5


@pytest.mark.skipif(products._OPERATOR is None, reason="this torch has no oneDNN product")
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_a_large_head_goes_to_onednn_in_blocks(monkeypatch: pytest.MonkeyPatch, rows: int):
    """Whole numbers, so that the sums of 24 products are exact in FP32. 9,000 columns are a block of 8,192 and one of
    808; rows are filled up to a multiple of 16."""
    model = make("qwen3")
    generator = torch.Generator().manual_seed(0)
    model.lm_head.weight = nn.Parameter(torch.randint(-3, 4, (9000, 24), generator=generator).float())
    decoder = FusedDecoder(model, torch.float32)
    unit = torch.randint(-3, 4, (rows, 24), generator=generator).float()
    real, shapes = products._OPERATOR, []
    monkeypatch.setattr(products, "_OPERATOR", lambda a, w, *rest: shapes.append(w.shape) or real(a, w, *rest))
    out = decoder._wide_logits(unit, torch.empty(rows, 9000))
    assert torch.equal(out, unit @ decoder.head)
    assert shapes == [(8192, 24), (808, 24)]
    packed = decoder._packed()
    assert all(block.is_mkldnn for _, block in packed._head_blocks)
    assert torch.equal(packed._wide_logits(unit, torch.empty(rows, 9000)), out)


def test_batches_of_few_steps_are_not_packed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused, "packed", lambda b: pytest.fail("packed"))
    decoder = FusedDecoder(make("qwen3").to(torch.bfloat16), torch.bfloat16)
    decoder.start([[3, 4, 5]], [0], fused._PACKED_STEPS - 1, 1.0)


@pytest.mark.skipif(not products.packable(torch.ones(1).bfloat16()), reason="no oneDNN products in BF16 here")
@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_packed_bfloat16_weights_give_the_same_logits(kind: str):
    decoder = FusedDecoder(make(kind).to(torch.bfloat16), torch.bfloat16)
    prompts, rows = BATCHES["padded"]
    packed = decoder._packed()
    assert all(x.qkv.is_mkldnn and x.out.is_mkldnn and x.gate_up.is_mkldnn and x.down.is_mkldnn for x in packed.layers)
    with torch.inference_mode():
        plain, other = (fused._FusedSequences(w, prompts, rows, 8, 1.25) for w in (decoder, packed))
        for step in range(8):
            assert torch.equal(plain.logits, other.logits)
            tokens = torch.full((len(rows),), 3 + step)
            plain.step(tokens)
            other.step(tokens)


def test_bfloat16_products_stay_near_the_exact_logits():
    for kind in ("qwen3", "llama3"):
        model = make(kind)
        rounded = make(kind).to(torch.bfloat16).to(torch.float32)  # BF16 weights, FP32 arithmetic
        # about ten roundings of 2^-9 one after the other
        assert follow(FusedDecoder(model.to(torch.bfloat16), torch.bfloat16), rounded, "padded", 6) < 0.04


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied", "qwen2", "gpt2"])
def test_load_takes_over_new_weights(kind: str):
    model = make(kind)
    decoder = decoder_of(model)
    follow(decoder, model, "equal", 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    decoder.load()
    assert follow(decoder, model, "equal", 3) < 1e-5


def test_load_reuses_the_fused_memory():
    decoder = FusedDecoder(make("qwen3"), torch.float32)
    before = [layer.qkv.data_ptr() for layer in decoder.layers]
    decoder.load()
    assert [layer.qkv.data_ptr() for layer in decoder.layers] == before


def test_each_prompt_is_prefilled_once(monkeypatch: pytest.MonkeyPatch):
    decoder = FusedDecoder(make("qwen3"), torch.float32)
    seen: list[int] = []
    run = decoder.run
    monkeypatch.setattr(decoder, "run", lambda s, tokens, *rest: seen.append(len(tokens)) or run(s, tokens, *rest))
    decoder.start([[3, 4, 5], [6, 7, 8]], [0] * 8 + [1] * 8, 4, 1.0)
    assert seen == [6]  # two prompts of three tokens, whatever the sixteen rows


def test_prefill_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch):
    model = make("qwen3")
    monkeypatch.setattr("rlvr_pl.sampling.fused._PREFILL_TOKENS", 5)  # one prompt a call
    assert follow(decoder_of(model), model, "padded", 4) < 1e-5


def test_changed_models_are_not_fused():
    class Adapted(nn.Linear):
        pass

    model = make("qwen3")
    model.model.layers[1].mlp.up_proj = Adapted(24, 40, bias=False)
    assert not fusable(model)

    class Own(Qwen3ForCausalLM):
        pass

    assert not fusable(Own(Qwen3Config(**SHAPE, head_dim=8)))
