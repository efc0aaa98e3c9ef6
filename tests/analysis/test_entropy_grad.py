"""`rlvr-pl entropy-grad` on the embedded start policy: small batches, their records, and pooling."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SMALL = ("entropy-grad", "--n-questions", 6, "--k", 4, "--max-new-tokens", 48)


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two independent batches: the first with an objective of its own and AdamW steps, the second with the same
    contexts from a file."""
    from rlvr_pl.callbacks.drift import make_contexts
    from rlvr_pl.cli import main
    from rlvr_pl.data.pools import load_questions
    from rlvr_pl.policy import load_policy
    from rlvr_pl.sampling.base import Decoding
    from rlvr_pl.sampling.torch import TorchSampler

    folder = tmp_path_factory.mktemp("egrad")
    start, questions = load_policy("embedded:start"), load_questions("embedded:drift")
    make_contexts(start, TorchSampler(), questions, Decoding(max_new_tokens=48)).save(folder / "contexts.json")
    extra = ["--adamw", "--objective", '{"class_path": "ForkCredit", "init_args": {"credit": "rankc"}}']
    second = ["--question-offset", "6", "--seed", "1", "--contexts", str(folder / "contexts.json")]
    for i, words in enumerate((extra, second)):
        assert main([*map(str, SMALL), *words, "--out", str(folder / f"{i}.json"), "--json"]) == 0
    return [folder / "0.json", folder / "1.json"]


def test_a_batch_and_its_records_agree(batches: list[Path]) -> None:
    data = json.loads(batches[0].read_text())
    rollouts = data["rollouts"]
    assert data["rollouts"] and len(rollouts) <= 24 and data["mixed_rollouts"] <= 24
    assert data["weights_restored"] and data["grad_norm"] > 0
    assert set(data["directions"]) == {
        "seq",
        "mask",
        "seqmean",
        '{"class_path": "ForkCredit", "init_args": {"credit": "rankc"}}',
    }
    weight = {
        "seq": lambda r: r["advantage"] / 24,
        "mask": lambda r: 0.0 if r["truncated"] else r["advantage"] / 24,
        "seqmean": lambda r: r["advantage"] / 24 / r["length"],
    }
    for name, w in weight.items():
        found = data["directions"][name]
        expected = sum(w(r) * r["slope"] for r in rollouts)
        assert found["slope"] == pytest.approx(expected, rel=1e-9)
        assert sum(found["by_class"].values()) == pytest.approx(found["slope"], rel=1e-9)
        assert found["slope"] == pytest.approx(found["cosine"] * found["norm"] * data["grad_norm"])
        assert found["ci_low"] <= found["slope"] <= found["ci_high"]
        assert found["adamw"] is not None and found["adamw_clip"] is not None
    assert sum(c["rollouts"] for c in data["classes"].values()) == sum(r["advantage"] != 0 for r in rollouts)


def test_pooling(batches: list[Path], command, refused) -> None:
    pooled = command("entropy-grad", "--summarize", *batches)["checkpoints"]
    assert len(pooled) == 1 and [b["file"] for b in pooled[0]["batches"]] == [str(b) for b in batches]
    both = [json.loads(b.read_text()) for b in batches]
    assert both[0]["entropy"] == both[1]["entropy"]  # fixed contexts, sampled or read from a file
    for name, rate in pooled[0]["classes"].items():
        assert rate["rollouts"] == sum(b["classes"][name]["rollouts"] for b in both)
        parts = [b["classes"][name] for b in both if b["classes"][name]["rate"] is not None]
        mass = sum(p["mass"] for p in parts)
        if mass:
            assert rate["rate"] == pytest.approx(sum(p["rate"] * p["mass"] for p in parts) / mass)
    assert "pool independent batches" in refused("entropy-grad", "--summarize", batches[0], batches[0])


def test_files_that_hold_no_batch(tmp_path: Path, refused) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"record": "items"}')
    assert "not a file that" in refused("entropy-grad", "--summarize", path)
    path.write_text('{"record": "entropy-grad", "rollouts": [{"uid": "q"}]}')
    assert "rollout 0: 'advantage'" in refused("entropy-grad", "--summarize", path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--k", 1], "--k 1"),
        (["--question-offset", 10**6], "the order has"),
        (["--objective", "Nonsense"], "--objective Nonsense"),
        (["--objective", "ExpertIterationSFT"], "stored solutions"),
        (["--eta", 0], "--eta"),
        (["--checkpoint", "embedded:nothing"], "embedded:nothing"),
    ],
)
def test_wrong_use(words: list, message: str, refused) -> None:
    assert message in refused(*SMALL, *words)


def test_uniform_groups_alone_are_an_error(refused) -> None:
    assert "every group is uniform" in refused("entropy-grad", "--n-questions", 2, "--k", 2, "--max-new-tokens", 1)
