from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rlvr_pl.cli import main
from rlvr_pl.policy import load_policy
from rlvr_pl.types import Question

supplied = pytest.importorskip("reasoning_from_scratch.qwen3", reason="the extra 'supplied' is not installed")

CONFIG = {
    "vocab_size": 300,
    "context_length": 64,
    "emb_dim": 32,
    "n_heads": 6,
    "n_layers": 2,
    "hidden_dim": 40,
    "head_dim": 8,
    "qk_norm": True,
    "n_kv_groups": 3,
    "rope_base": 1_000_000.0,
    "dtype": torch.float32,
}


def make_model(**changes: Any) -> Any:
    """A random model of the supplied package; norm scales are random too, or a mix-up of them would not show."""
    torch.manual_seed(3)
    model = supplied.Qwen3Model(CONFIG | changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("scale"):
                parameter.uniform_(0.5, 1.5)
    return model.eval()


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    raw = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    raw.save(str(tmp_path / "tokenizer-base.json"))
    return tmp_path / "tokenizer-base.json"


def convert(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main(["import-supplied", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["import-supplied", *map(str, words), "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_logits_are_those_of_the_supplied_model(prefix, tokenizer_file, tmp_path, capsys):
    model = make_model()
    torch.save({prefix + key: value for key, value in model.state_dict().items()}, tmp_path / "m.pth")
    data = convert(capsys, tmp_path / "m.pth", "--tokenizer", tokenizer_file, "--out", tmp_path / "hf")
    policy = load_policy(tmp_path / "hf")
    assert data["parameters"] == sum(p.numel() for p in model.parameters())
    assert (data["dtype"], data["rounded"], data["max_context"]) == ("float32", 0, 40_960)
    ids = torch.randint(0, 300, (3, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = policy.model(ids).logits, model(ids)
    # FP32, logits of order 1: both sum a few hundred products of relative error 6e-8 in another order.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert policy.head is not policy.model.get_input_embeddings().weight


def test_prompt_and_end_token_are_those_of_the_recipe(tokenizer_file, tmp_path, capsys):
    from reasoning_from_scratch.ch03 import render_prompt

    torch.save(make_model().state_dict(), tmp_path / "m.pth")
    convert(capsys, tmp_path / "m.pth", "--tokenizer", tokenizer_file, "--out", tmp_path / "hf")
    policy = load_policy(tmp_path / "hf")
    theirs = supplied.Qwen3Tokenizer(tokenizer_file)
    assert policy.eos_ids == (theirs.eos_token_id,)
    assert policy.pad_id == theirs.pad_token_id
    for problem in ("2+2 ", "naïve \\frac{1}{2}\n"):
        assert list(policy.prompt_ids(Question("q", problem, "4"))) == theirs.encode(render_prompt(problem))
    convert(
        capsys,
        *(tmp_path / "m.pth", "--tokenizer", tokenizer_file, "--out", tmp_path / "hf", "--overwrite"),
        *("--eos", "<|im_end|>"),
    )
    assert load_policy(tmp_path / "hf").eos_ids == (257,)
    # A policy folder serves as source of tokenizer and configuration.
    (tmp_path / "hf/config.json").write_text(
        (tmp_path / "hf/config.json").read_text().replace("40960", "64").replace("1000000.0", "500.0")
    )
    again = ("--tokenizer", tmp_path / "hf", "--config-from", tmp_path / "hf")
    assert convert(capsys, tmp_path / "m.pth", *again, "--out", tmp_path / "again")["max_context"] == 64
    assert load_policy(tmp_path / "again").model.config.rope_parameters["rope_theta"] == 500.0


def test_a_half_precision_checkpoint_rounds_its_norm_scales_or_keeps_all(tokenizer_file, tmp_path, capsys):
    model = make_model(dtype=torch.bfloat16)
    scales = [p for name, p in model.named_parameters() if name.endswith("scale")]
    assert {p.dtype for p in scales} == {torch.float32}
    changed = sum(int((p.bfloat16().float() != p).sum()) for p in scales)
    torch.save(model.state_dict(), tmp_path / "m.pth")
    words = (tmp_path / "m.pth", "--tokenizer", tokenizer_file)
    data = convert(capsys, *words, "--out", tmp_path / "half")
    assert (data["dtype"], data["rounded"]) == ("bfloat16", changed)
    data = convert(capsys, *words, "--out", tmp_path / "full", "--dtype", "float32")
    assert (data["dtype"], data["rounded"]) == ("float32", 0)
    kept = load_policy(tmp_path / "full").model.state_dict()
    assert torch.equal(kept["model.norm.weight"], model.final_norm.scale)
    assert torch.equal(kept["lm_head.weight"], model.out_head.weight.float())


class Pwned:
    def __reduce__(self) -> Any:
        return (print, ("code was run",))


def test_what_is_no_such_checkpoint_is_refused_and_no_code_runs(tokenizer_file, tmp_path, capsys):
    path, good = tmp_path / "m.pth", make_model().state_dict()
    words = (path, "--tokenizer", tokenizer_file, "--out", tmp_path / "hf")
    assert "no such file" in refused(capsys, *words)
    path.write_bytes(b"")
    assert "cannot be read as a checkpoint" in refused(capsys, *words)
    torch.save({"x": Pwned()}, path)
    assert "cannot be read as a checkpoint" in refused(capsys, *words)
    for content, expected in [
        ([1, 2], "must hold a state dict"),
        ({"state_dict": good}, "must hold a state dict"),
        ({"bert.weight": torch.zeros(2)}, "it knows no 'bert.weight'"),
        ({}, "lacks"),
        ({k: v for k, v in good.items() if "W_query" not in k}, "lacks"),
        ({k: v for k, v in good.items() if "blocks.1.norm1" not in k}, "the weights do not fit"),
        (good | {"out_head.weight": torch.zeros(7, 32)}, "the weights do not fit"),
    ]:
        torch.save(content, path)
        assert expected in refused(capsys, *words)
    torch.save(good, path)
    path.write_bytes(path.read_bytes()[:5000])
    assert "cannot be read as a checkpoint" in refused(capsys, *words)
    torch.save(good, path)
    assert "has no token '<stop>'" in refused(capsys, *words, "--eos", "<stop>")
    assert "wrong tokenizer: its ids reach 257" in _with_small_vocabulary(capsys, path, words)
    assert not (tmp_path / "hf").exists()
    (tmp_path / "hf").mkdir()
    assert "exists; choose another folder" in refused(capsys, *words)


def _with_small_vocabulary(capsys: pytest.CaptureFixture[str], path: Path, words: tuple[object, ...]) -> str:
    torch.save(make_model(vocab_size=200).state_dict(), path)
    return refused(capsys, *words)
