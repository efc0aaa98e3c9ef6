"""rollout-stats, drift and plot on a run folder written by hand."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from rlvr_pl.cli import main
from rlvr_pl.core.collapse import CollapseCriterion
from rlvr_pl.errors import UserError
from rlvr_pl.records import JsonlFile, RunFolder


def command(name: str, *argv: str | Path) -> Any:
    """The result of a command, with its own parser."""
    room = importlib.import_module(f"rlvr_pl.analysis.{name}")
    parser = argparse.ArgumentParser()
    room.add_arguments(parser)
    return room.run(parser.parse_args([str(a) for a in argv]))


def row(update: int, sample: int, reward: float | None, length: int, kind: str) -> dict[str, Any]:
    return {
        "update": update,
        "group": 0,
        "uid": "q",
        "sample": sample,
        "reward": reward,
        "status": "correct" if reward == 1 else "wrong",
        "answer": "1",
        "boxed": True,
        "length": length,
        "stop_reason": "eos" if kind == "eos" else "length",
        "class": kind,
        "detector": None if kind in ("eos", "truncated") else "incompressible",
        "m_plus": 2.0 if reward == 1 else 0.0,
        "m_minus": 0.0 if reward == 1 else 3.0,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six updates of a right and a wrong rollout; the wrong one is cut off from update 3 on, and soup from update 5."""
    run = RunFolder(tmp_path / "orl")
    kinds = ["eos", "eos", "truncated", "truncated", "soup", "soup"]
    for update, kind in enumerate(kinds, 1):
        rows = [row(update, 0, 1.0, 10, "eos"), row(update, 1, 0.0, 30, kind)]
        JsonlFile(run.rollouts / "000001-000100.jsonl").append(rows)
        run.table("metrics.csv").append({"update": update, "grad_norm": update, "clipped": 1.0, "changed_share": 0.25})
    for update, correct in ((0, 20), (3, 18), (6, 5)):
        run.table("validation.csv").append({"update": update, "n": 20, "correct": correct})
    for update in (0, 3, 6):
        run.table("drift.csv").append({"update": update, "entropy": 0.2 + update / 10, "kl": update / 50, "nll": 0.1})
    rule = CollapseCriterion(window=2, val_floor=5)
    run.write_json("criterion.json", {"criterion": json.loads(rule.canonical), "sha256": rule.sha256})
    return run.path


def test_windows_from_records(folder):
    data = command("rollout_stats", folder, "--window", "4").data
    first, last = data["windows"]
    assert (first["first_update"], first["last_update"], last["first_update"], last["last_update"]) == (1, 4, 5, 6)
    assert (first["truncation"], last["truncation"], last["soup"]) == (2 / 8, 2 / 4, 2 / 4)
    assert first["m_ratio"] == 1.5  # 3 against 2 in every update
    assert first["plain_m_ratio"] == pytest.approx(3)  # lengths 30 against 10
    assert (first["grad_norm_median"], first["clipped"], first["nonzero"]) == (2.5, 4, 4)


def test_the_verdict_is_made_again(folder):
    """Windows of two updates: 0, 1/2, 1/2 of the rollouts are cut off; the second is the first to reach 0.5."""
    verdict = command("rollout_stats", folder).data["verdict"]
    assert (verdict["rule"], verdict["value"]) == ("truncation", 0.5)
    assert (verdict["first_update"], verdict["last_update"]) == (3, 6)
    assert verdict["sha256"] == CollapseCriterion(window=2, val_floor=5).sha256


def test_several_runs_and_the_printed_form(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    assert len(command("rollout_stats", folder, folder).data["runs"]) == 2
    assert main(["rollout-stats", str(folder), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"run", "updates", "windows", "verdict"}
    assert main(["rollout-stats", str(folder)]) == 0
    assert "collapsed in updates 3-6 by the truncation rule" in capsys.readouterr().out


def edit(folder: Path, change: Any) -> None:
    path = folder / "rollouts" / "000001-000100.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[3].pop("length"), r"jsonl:4: .*length"),
        (lambda rows: rows[3].update(stop_reason="bored"), r"jsonl:4: .*stop_reason"),
        (lambda rows: rows.__delitem__(slice(4, 6)), r"no rows of updates \[3\]"),
        (lambda rows: rows.clear(), "empty"),
    ],
)
def test_bad_records_are_named(folder, change, message):
    edit(folder, change)
    with pytest.raises(UserError, match=message):
        command("rollout_stats", folder)


def test_bad_folders_and_rules_are_named(folder, tmp_path):
    with pytest.raises(UserError, match="no run folder"):
        command("rollout_stats", tmp_path / "nothing")
    (tmp_path / "bare").mkdir()
    with pytest.raises(UserError, match="no rollout records"):
        command("rollout_stats", tmp_path / "bare")
    with pytest.raises(UserError, match="--window 0"):
        command("rollout_stats", folder, "--window", "0")
    stored = RunFolder(folder).read_json("criterion.json")
    RunFolder(folder).write_json("criterion.json", {**stored, "criterion": {**stored["criterion"], "window": 3}})
    with pytest.raises(UserError, match="does not have the hash"):
        command("rollout_stats", folder)


def test_a_cell_that_is_no_number_is_named(folder):
    with (folder / "drift.csv").open("a") as f:
        f.write("9,many,0.1,0.1\n")
    with pytest.raises(UserError, match=r"drift\.csv:5: entropy is 'many'"):
        command("plot", folder)


def test_plot_writes_both_files(folder, tmp_path):
    result = command("plot", folder)
    png, svg = (Path(f) for f in result.data["files"])
    assert (png, svg) == (folder / "plot.png", folder / "plot.svg")
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 20_000
    text = svg.read_text()
    for words in ("Entropy on fixed contexts", "Greedy validation", "token soup", "shaded: updates 3-6", "update"):
        assert words in text
    assert result.data["runs"] == [{"run": str(folder), "updates": 6, "collapsed": True}]


def test_plot_of_several_runs_names_them(folder, tmp_path):
    command("plot", folder, folder, "--labels", "supplied", "mask", "--out", tmp_path / "arms.png")
    text = (tmp_path / "arms.svg").read_text()
    assert "supplied (collapsed)" in text and "mask (collapsed)" in text


def test_plot_of_a_run_with_rollouts_alone(folder):
    for name in ("metrics.csv", "validation.csv", "drift.csv"):
        (folder / name).unlink()
    assert command("plot", folder).data["runs"][0]["collapsed"]
    assert (folder / "plot.svg").read_text().count("not recorded") == 4  # entropy, KL, validation, gradient norm


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--out", "x.gif"], "ending must be .png"),
        (["--out", "nowhere/x.png"], "does not exist"),
        (["--labels", "a", "b"], "names 2 runs, but 1"),
        (["--window", "0"], "--window 0"),
    ],
)
def test_plot_refuses(folder, argv, message):
    with pytest.raises(UserError, match=message):
        command("plot", folder, *argv)


def test_drift_command(tmp_path, capsys):
    kept = tmp_path / "contexts.json"
    argv = ["--start", "embedded:base", "--checkpoints", "embedded:start", "embedded:base", "--n", "6"]
    data = command("drift", *argv, "--save-contexts", kept).data
    moved, same = data["checkpoints"]
    assert (moved["name"], same["name"]) == ("embedded:start", "embedded:base")
    assert same["kl"] == 0.0 and same["entropy"] == data["start"]["entropy"] and same["entropy_ratio"] == 1.0
    assert moved["kl"] > 0 and moved["tokens"] == data["contexts"]["tokens"] > 0
    assert data["contexts"]["n"] == 6
    again = command("drift", *argv, "--contexts", kept).data
    assert again["checkpoints"] == data["checkpoints"]
    with pytest.raises(UserError, match="the file exists"):
        command("drift", *argv, "--save-contexts", kept)
    with pytest.raises(UserError, match="--n 0"):
        command("drift", *argv[:-1], "0")
