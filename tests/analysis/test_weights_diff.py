"""`rlvr-pl weights-diff` on hand-made model folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlvr_pl.analysis import weights_diff
from rlvr_pl.cli import main


def folder(path: Path, tensors: dict[str, torch.Tensor], *, tied: bool = False, shards: int = 1) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    for i in range(shards):
        save_file(dict(list(tensors.items())[i::shards]), path / f"model-{i}.safetensors")
    return path


def model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    names += [f"model.layers.{i}.mlp.up_proj.weight" for i in range(2)]
    names += ["model.layers.0.self_attn.q_norm.weight", "model.norm.weight"]
    shapes = [(50, 4), (50, 4), (6, 4), (6, 4), (4,), (4,)]
    return {name: (0.05 * torch.randn(shape, generator=generator)).bfloat16() for name, shape in zip(names, shapes)}


def test_by_module_and_by_magnitude(tmp_path: Path, command) -> None:
    start = model()
    start["model.layers.0.mlp.up_proj.weight"] = torch.tensor([[0.0005, 0.005, 0.05, 0.5]] * 6).bfloat16()
    after = {name: w.clone() for name, w in start.items()}
    after["model.layers.0.mlp.up_proj.weight"][:2, 0] *= 1.5
    after["model.layers.1.mlp.up_proj.weight"][0, 0] *= 2
    after["lm_head.weight"][:10] += 1
    data = command("weights-diff", folder(tmp_path / "a", start), folder(tmp_path / "b", after, shards=3))
    assert data["weights"] == 2 * 200 + 2 * 24 + 4 + 4
    assert data["changed"] == 2 + 1 + 40
    assert data["changed_share"] == pytest.approx(43 / 456)
    shares = {name: (m["weights"], m["changed"]) for name, m in data["by_module"].items()}
    assert shares == {
        "embed_tokens": (200, 0),
        "lm_head": (200, 40),
        "mlp.up_proj": (48, 3),
        "norm": (4, 0),
        "self_attn.q_norm": (4, 0),
    }
    up = data["by_module"]["mlp.up_proj"]["by_magnitude"]
    assert up["[0.0001, 0.001)"]["changed"] == 2
    assert up["[0.1, inf)"]["weights"] >= 6
    assert sum(row["weights"] for row in data["by_magnitude"].values()) == 456


def test_where_no_terminal_shows_a_bar_nothing_is_left_of_it(tmp_path: Path, capsys) -> None:
    a, b = folder(tmp_path / "a", model()), folder(tmp_path / "b", model())
    assert main(["weights-diff", str(a), str(b), "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_pieces_do_not_change_the_counts(tmp_path: Path, command, monkeypatch: pytest.MonkeyPatch) -> None:
    start, after = model(), model()
    after["model.embed_tokens.weight"][7:31] *= -1
    a, b = folder(tmp_path / "a", start), folder(tmp_path / "b", after)
    whole = command("weights-diff", a, b)
    monkeypatch.setattr(weights_diff, "_PIECE", 12)  # three rows at once
    assert command("weights-diff", a, b) == whole
    assert whole["changed"] == 96


def test_one_bit_is_a_change_and_two_dtypes_compare_by_value(tmp_path: Path, command) -> None:
    start = {"model.norm.weight": torch.tensor([0.0, 1.0, 0.5, 3.0]).bfloat16()}
    after = {"model.norm.weight": torch.tensor([-0.0, 1.0, 0.5 + 2**-8, 3.0]).bfloat16()}
    a = folder(tmp_path / "a", start)
    assert command("weights-diff", a, folder(tmp_path / "b", after))["changed"] == 2  # the sign of zero, the last bit
    wide = {"model.norm.weight": after["model.norm.weight"].float()}
    assert command("weights-diff", a, folder(tmp_path / "c", wide))["changed"] == 1  # 0.0 equals -0.0


def test_a_tied_start_lends_its_embedding_to_the_head(tmp_path: Path, command) -> None:
    after = model()
    after["lm_head.weight"] = after["model.embed_tokens.weight"].clone()
    start = {name: w.clone() for name, w in after.items() if name != "lm_head.weight"}
    after["lm_head.weight"][0] += 1
    data = command("weights-diff", folder(tmp_path / "a", start, tied=True), folder(tmp_path / "b", after))
    assert (data["by_module"]["lm_head"]["changed"], data["by_module"]["embed_tokens"]["changed"]) == (4, 0)


def test_models_that_do_not_match(tmp_path: Path, refused) -> None:
    a = folder(tmp_path / "a", model())
    other = model()
    other["model.norm.weight"] = torch.zeros(5).bfloat16()
    assert "model.norm.weight: has shape" in refused("weights-diff", a, folder(tmp_path / "b", other))
    del other["model.norm.weight"]
    assert "has no tensor model.norm.weight" in refused("weights-diff", a, folder(tmp_path / "c", other))
    broken = folder(tmp_path / "d", model())
    (broken / "model-0.safetensors").write_bytes(b"not safetensors")
    assert "cannot be read as safetensors" in refused("weights-diff", a, broken)
    (broken / "model-0.safetensors").unlink()
    assert "no *.safetensors" in refused("weights-diff", a, broken)
    assert "no such folder" in refused("weights-diff", a, tmp_path / "gone")
