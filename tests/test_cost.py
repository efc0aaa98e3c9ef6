"""The ledger, its files, and arms side by side."""

from __future__ import annotations

import json
import math

import pytest

from rlvr_pl.cli import main
from rlvr_pl.cost import COSTS, CostLedger, ledger_path, spread
from rlvr_pl.errors import UserError


def test_parts_add_up():
    search = CostLedger(sampled_tokens=100, prefill_tokens=10, graded=8, wall_seconds=1.5)
    learned = CostLedger(trained_tokens=40, optimizer_steps=2, wall_seconds=0.25)
    assert search + learned == CostLedger(100, 10, 8, 40, 2, 1.75)
    assert list((search + learned).as_dict()) == [*COSTS, "wall_seconds"]


def test_a_written_ledger_is_read_back_and_that_of_fit_too(tmp_path):
    ledger = CostLedger(1, 2, 3, 4, 5, 6.25)
    ledger.write(tmp_path / "a.json")
    assert CostLedger.read(tmp_path / "a.json") == ledger
    (tmp_path / "fit.json").write_text(json.dumps({"updates": 9, **ledger.as_dict()}))
    assert CostLedger.read(tmp_path / "fit.json") == ledger


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "not JSON"),
        ("[]", "not a cost ledger"),
        ('{"sampled_tokens": 1}', "not a cost ledger"),
        (json.dumps({**CostLedger().as_dict(), "graded": -1}), "graded is -1"),
        (json.dumps({**CostLedger().as_dict(), "graded": 1.5}), "graded is 1.5"),
        (json.dumps({**CostLedger().as_dict(), "graded": True}), "graded is True"),
    ],
)
def test_what_is_no_ledger(tmp_path, content, told):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UserError, match=told):
        CostLedger.read(tmp_path / "a.json")


def test_where_ledgers_lie(tmp_path):
    assert ledger_path(tmp_path) == tmp_path / "cost.json"
    assert ledger_path(tmp_path / "s.jsonl") == tmp_path / "s.cost.json"
    assert ledger_path(tmp_path / "s.json") == tmp_path / "s.json.cost.json"  # never the records themselves


def test_spread_is_the_largest_over_the_smallest():
    found = spread({"a": CostLedger(sampled_tokens=100, graded=5), "b": CostLedger(sampled_tokens=110)})
    assert found["sampled_tokens"] == 1.1
    assert found["graded"] == math.inf  # one arm has none
    assert found["trained_tokens"] == 1.0  # neither has


def arm(folder, name: str, **amounts) -> str:
    (folder / name).mkdir()
    CostLedger(**amounts).write(folder / name / "cost.json")
    return str(folder / name)


def run(capsys, *words: str) -> dict:
    assert main(["cost", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_papers_arms_match_in_sampling_and_not_in_training(tmp_path, capsys):
    """Section 3: 2.74M tokens of search against 2.86M of ORL, but one pass over 626 solutions against every rollout."""
    orl = arm(tmp_path, "orl", sampled_tokens=2_860_000, graded=4832, trained_tokens=2_000_000, optimizer_steps=151)
    CostLedger(sampled_tokens=2_740_000, graded=5120).write(tmp_path / "s.cost.json")
    (tmp_path / "s.jsonl").touch()
    distilled = arm(tmp_path, "distill", trained_tokens=600_000, optimizer_steps=80)
    found = run(capsys, orl, f"expit={tmp_path / 's.jsonl'},{distilled}")
    assert found["arms"]["expit"]["sampled_tokens"] == 2_740_000
    assert found["arms"]["expit"]["trained_tokens"] == 600_000
    # 2.86 / 2.74 = 1.044 and 5120 / 4832 = 1.060, against the default of 5%
    assert found["matched"]["sampled_tokens"] and not found["matched"]["graded"]
    assert not found["matched"]["trained_tokens"] and not found["matched"]["optimizer_steps"]
    assert run(capsys, "--tolerance", "0.1", orl, str(tmp_path / "s.jsonl"))["matched"]["graded"]
    assert run(capsys, str(tmp_path / "s.cost.json"), f"same={tmp_path / 's.jsonl'}")["ratio"]["graded"] == 1


def test_an_unfinished_arm_is_named(tmp_path, capsys):
    a, b = arm(tmp_path, "a"), arm(tmp_path, "b")
    (tmp_path / "b" / "run.json").write_text('{"state": "stopped"}')
    assert run(capsys, a, b)["unfinished"] == ["b"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere"], "no such run folder or file"),
        (["."], "no ledger"),
        (["a", "x/a"], "same name"),
        (["a", "--tolerance", "-1"], "--tolerance"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, capsys, words, told):
    monkeypatch.chdir(tmp_path)
    arm(tmp_path, "a")
    assert main(["cost", *words]) == 2
    assert told in capsys.readouterr().err
