"""The whole loop on the embedded default, and kills at random moments. Counts are asserted, gains are not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlvr_pl.cli import main
from rlvr_pl.cost import CostLedger

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["expert-iteration", "--checkpoint", "embedded:start", "--k", "8", "--seed", "1", "--rationalize", "--json"]


def told(capsys, *words: str) -> dict:
    capsys.readouterr()
    assert main([*WORDS, *words]) == 0
    return json.loads(capsys.readouterr().out)


def check_panel(panel: dict, n: int) -> None:
    assert panel["n"] == n
    assert panel["after"] - panel["before"] == panel["gained"] - panel["lost"]
    assert panel["delta_pp"] == pytest.approx(100 * (panel["after"] - panel["before"]) / n, rel=1e-12)  # one division
    assert panel["ci_low"] <= panel["delta_pp"] <= panel["ci_high"]


@pytest.mark.slow
def test_search_distill_and_validate_160_questions(tmp_path, capsys):
    found = told(capsys, "--n-questions", "160", "--run", str(tmp_path / "r"))
    (step,) = found["rounds"]
    search, bridges, learned = step["search"], step["rationalize"], step["distill"]
    assert (search["questions"], search["samples"], search["added"]) == (160, 1280, 1280)
    assert search["solved"] + bridges["questions"] == 160
    assert sum(bridges["rationales"].values()) == 4 * bridges["questions"]
    assert sum(bridges["continuations"].values()) == 4 * bridges["rationales"]["bridged"]
    assert bridges["solutions"] > 0
    assert sum(learned["samples"].values()) == 1280
    assert learned["samples"]["wrong"] == 1280 - search["correct"]
    assert learned["sources"] == {"search": learned["samples"]["solution"], "bridge": bridges["solutions"]}
    assert learned["questions"] == search["solved"] + bridges["with_solution"]
    assert learned["updates"] == 2 * -(-learned["solutions"] // 16)  # two epochs of batches of 16
    check_panel(step["trained"], 160)
    check_panel(step["held_out"], 350)
    parts = (search["cost"], bridges["cost"], learned["cost"])
    total = sum((CostLedger(**part) for part in parts), CostLedger())
    assert found["cost"] == step["cost"] == total.as_dict()
    assert found["cost"]["graded"] == 1280 + sum(bridges["rationales"].values()) + sum(
        bridges["continuations"].values()
    )


@pytest.mark.slow
def test_rounds_follow_on_one_another_and_go_on_where_they_stopped(tmp_path, capsys):
    words = ["--n-questions", "24", "--set", "data.validation=embedded:drift"]
    one = told(capsys, *words, "--run", str(tmp_path / "r"), "--rounds", "1")
    two = told(capsys, *words, "--run", str(tmp_path / "r"), "--rounds", "2")
    assert two["rounds"][0] == one["rounds"][0]
    assert two["rounds"][1]["start"] == one["policy"]
    assert [r["round"] for r in two["rounds"]] == [1, 2]
    check_panel(two["held_out"], 64)
    first, second = ({row["uid"] for row in read(tmp_path / "r" / f"round-{n}" / "samples.jsonl")} for n in (1, 2))
    assert len(first) == len(second) == 24 and not first & second

    # interrupted after the search of round 2, in the middle of round 2's distillation, and before its report
    folder = tmp_path / "r" / "round-2"
    weights = (folder / "distill" / "snapshots" / "final" / "model.safetensors").read_bytes()
    (folder / "report.json").unlink()
    shutil.rmtree(folder / "items")
    shutil.rmtree(folder / "distill" / "snapshots")
    state = json.loads((folder / "distill" / "run.json").read_text())
    (folder / "distill" / "run.json").write_text(json.dumps({**state, "state": "running"}))
    for checkpoint in (folder / "distill" / "checkpoints").iterdir():
        checkpoint.unlink()
    lines = (folder / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "samples.jsonl").write_bytes(b"".join(lines[:100]))
    again = told(capsys, *words, "--run", str(tmp_path / "r"), "--rounds", "2")
    assert (folder / "samples.jsonl").read_bytes() == b"".join(lines)
    assert (folder / "distill" / "snapshots" / "final" / "model.safetensors").read_bytes() == weights
    for name in ("trained", "held_out"):
        assert again["rounds"][1][name] == two["rounds"][1][name]

    assert main([*WORDS, *words, "--run", str(tmp_path / "r"), "--temperature", "1.0"]) == 2
    assert "began with other settings (temperature)" in capsys.readouterr().err


@pytest.mark.slow
def test_killed_at_random_moments_and_continued_the_records_have_the_same_bytes():
    command = [sys.executable, str(ROOT / "benchmarks" / "search_crash.py"), "--kills", "5", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for counts in json.loads(done.stdout).values():
        assert counts["kills"] == 5
        assert counts["finished"] == counts["identical"] >= 1


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[1:]]
