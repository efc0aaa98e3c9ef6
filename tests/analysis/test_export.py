"""`rlvr-pl export`: the folder, the card's facts, and an upload that only happens when asked for."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from rlvr_pl.cli import main

WORDS = [
    "fit",
    "--policy.name=embedded:base",
    "--data.updates=2",
    "--data.validation=embedded:drift",
    "--model.group_size=4",
    "--model.max_new_tokens=12",
    "--optimizer=AdamW",
    "--optimizer.lr=1e-3",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    pytest.importorskip("peft", reason="the package peft is not installed")
    folder = tmp_path_factory.mktemp("runs")
    assert main([*WORDS, f"--run={folder}/full"]) == 0
    lora = ['--policy.peft={"r": 2}', "--policy.snapshots=adapter", "--precision.master_weights=true"]
    assert main([*WORDS, *lora, f"--run={folder}/lora"]) == 0
    return folder


def exported(capsys, *words):
    capsys.readouterr()
    assert main(["export", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_becomes_a_folder_with_a_card(runs, tmp_path, capsys):
    found = exported(capsys, runs / "full", "--out", tmp_path / "out")
    assert (found["merged"], found["dtype"], found["pushed_to"]) == (False, "BF16", None)
    text = (tmp_path / "out" / "README.md").read_text()
    state = json.loads((runs / "full" / "run.json").read_text())
    assert state["start_sha256"][:16] in text and "| updates | 2 of 2 |" in text
    assert "on the run's 64 held-out questions" in text and '"lr": 0.001' in text
    assert text.startswith("---\nlibrary_name: transformers\n") and "\n# full\n" in text
    names = {p.name for p in (tmp_path / "out").iterdir()}
    wanted = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "prompt_template.json"}
    assert wanted <= names
    assert main(["export", str(runs / "full"), "--out", str(tmp_path / "out")]) == 2
    assert "exists" in capsys.readouterr().err
    assert main(["export", str(runs / "full"), "--out", str(tmp_path), "--overwrite"]) == 2
    assert "no model folder" in capsys.readouterr().err


def test_an_adapter_is_kept_or_merged(runs, tmp_path, capsys):
    from rlvr_pl.policy import load_policy

    kept = exported(capsys, runs / "lora", "--out", tmp_path / "kept")
    assert not kept["merged"] and (tmp_path / "kept" / "adapter_config.json").exists()
    merged = exported(capsys, runs / "lora", "--merge", "--out", tmp_path / "merged")
    assert (merged["merged"], merged["dtype"]) == (True, "F32")
    assert load_policy(tmp_path / "kept").weights_sha256() == load_policy(tmp_path / "merged").weights_sha256()
    half = exported(capsys, runs / "lora", "--merge", "--dtype=bfloat16", "--out", tmp_path / "half")
    assert half["dtype"] == "BF16"
    assert main(["export", str(runs / "lora"), "--dtype=bfloat16", "--out", str(tmp_path / "no")]) == 2


def test_upload_only_when_asked(runs, tmp_path, capsys, monkeypatch):
    import huggingface_hub

    calls = []

    class Api:
        def create_repo(self, name, private, exist_ok):
            calls.append(("repo", name, private))
            return SimpleNamespace(repo_id=name if "/" in name else f"me/{name}")

        def upload_folder(self, repo_id, folder_path):
            calls.append(("upload", repo_id, folder_path))
            if repo_id == "me/broken":
                raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    out = tmp_path / "out"
    exported(capsys, runs / "full", "--out", out)
    again = [runs / "full", "--out", out, "--overwrite"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert exported(capsys, *again, "--push-to=me/policy")["pushed_to"] is None
    assert calls == []
    assert "\n# me/policy\n" in (out / "README.md").read_text()
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert exported(capsys, *again, "--push-to=policy")["pushed_to"] == "me/policy"
    assert calls == [("repo", "policy", False), ("upload", "me/policy", str(out))]
    assert exported(capsys, *again, "--push-to=me/policy", "--private")["pushed_to"] == "me/policy"
    assert calls[2] == ("repo", "me/policy", True)
    assert main(["export", *map(str, again), "--push-to=me/broken"]) == 1
    assert "is ready, but was not uploaded to me/broken: no network" in capsys.readouterr().err
    assert main(["export", *map(str, again), "--push-to=a/b/c"]) == 2


def test_what_is_no_run_or_snapshot_is_refused(runs, tmp_path, capsys):
    assert main(["export", str(tmp_path)]) == 2
    assert main(["export", str(runs / "full"), "--snapshot=update-000040"]) == 2
    assert "no snapshot 'update-000040'; there are final" in capsys.readouterr().err
