"""Recorder, snapshots and the whole set of monitors under kills."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlvr_pl.analysis.rollout_stats import statistics
from rlvr_pl.analysis.run_records import RunRecords
from rlvr_pl.callbacks import recorder
from rlvr_pl.callbacks.damage_stop import DamageStop
from rlvr_pl.callbacks.drift_monitor import DriftMonitor
from rlvr_pl.callbacks.recorder import RolloutRecorder, rollout_file
from rlvr_pl.callbacks.rollout_stats import RolloutStats
from rlvr_pl.callbacks.snapshots import Snapshots, snapshots
from rlvr_pl.core.collapse import CollapseCriterion
from rlvr_pl.records import RunFolder


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_row_says_all_there_is_to_say(run, scripted):
    done = run(RolloutRecorder(texts=True), sampler=scripted(lambda update: 0.25), updates=2)
    rows = read(done.folder.rollouts / "000001-000100.jsonl")
    assert len(rows) == 2 * 4
    first = rows[0]
    expected = ["update", "group", "uid", "sample", "reward", "status", "answer", "boxed", "length", "stop_reason"]
    assert list(first) == [*expected, "class", "detector", "m_plus", "m_minus", "text"]
    assert (first["update"], first["sample"], first["reward"], first["status"]) == (1, 0, 1.0, "correct")
    assert (first["stop_reason"], first["class"], first["detector"]) == ("length", "truncated", None)
    assert first["m_plus"] > 0 and first["m_minus"] == 0
    assert rows[1]["m_plus"] == 0 and rows[1]["m_minus"] > 0
    assert "text" not in read(run(RolloutRecorder(), updates=1, fresh=True).folder.rollouts / "000001-000100.jsonl")[0]


def test_a_hundred_updates_a_file():
    folder = RunFolder("x")
    names = [rollout_file(folder, update).name for update in (1, 100, 101, 1000, 1001)]
    assert names[0] == names[1] == "000001-000100.jsonl"
    assert names[2:] == ["000101-000200.jsonl", "000901-001000.jsonl", "001001-001100.jsonl"]


def test_resume_drops_what_the_checkpoint_does_not_know(run, monkeypatch, tmp_path):
    """Killed at update 11 with a checkpoint at 8: rows of 9 to 11 go, one file whole, one in part."""
    monkeypatch.setattr(recorder, "UPDATES_PER_FILE", 3)
    whole = run(RolloutRecorder(), folder=tmp_path / "whole")
    done = run(RolloutRecorder(), kill_after=11)
    last = done.folder.rollouts / "000010-000012.jsonl"
    with last.open("a") as f:
        f.write('{"update": 11, "uid"')  # torn by the kill
    again = run(RolloutRecorder(), resume=True)
    for path in whole.folder.rollouts.glob("*.jsonl"):
        assert (again.folder.rollouts / path.name).read_bytes() == path.read_bytes()


def test_a_torn_line_is_set_aside(run, capsys):
    done = run(RolloutRecorder(), kill_after=6)
    path = done.folder.rollouts / "000001-000100.jsonl"
    with path.open("a") as f:
        f.write('{"update": 7, "uid"')
    again = run(RolloutRecorder(), resume=True)
    rows = read(again.folder.rollouts / "000001-000100.jsonl")
    assert [r["update"] for r in rows] == [u for u in range(1, 13) for _ in range(4)]
    assert path.with_name(path.name + ".torn").read_text() == '{"update": 7, "uid"\n'
    assert "cut off" in capsys.readouterr().err


def all_monitors() -> list:
    criterion = CollapseCriterion(window=5, val_floor=1)
    return [DriftMonitor(n=4, every_n_updates=5), RolloutStats(5), RolloutRecorder(), DamageStop(criterion)]


@pytest.mark.parametrize("kill", [2, 4, 9])
def test_a_killed_run_writes_the_same_files(run, scripted, tmp_path, kill):
    """Killed before the first checkpoint (of 4), right at one, and between two; then continued."""
    script = lambda: scripted(lambda update: 1.0 if update > 5 else 0.0)  # noqa: E731
    whole = run(*all_monitors(), sampler=script(), validate_every=4, folder=tmp_path / "whole")
    assert whole.module.updates_done == 10
    run(*all_monitors(), sampler=script(), validate_every=4, kill_after=kill)
    again = run(*all_monitors(), sampler=script(), validate_every=4, resume=True)
    files = ["updates.csv", "windows.csv", "drift.csv", "drift_contexts.json", "criterion.json", "verdict.json"]
    files += ["rollouts/000001-000100.jsonl"]
    for name in files:
        assert (again.folder.path / name).read_bytes() == (whole.folder.path / name).read_bytes(), name
    for one, two in zip(again.module.policy.model.parameters(), whole.module.policy.model.parameters()):
        assert torch.equal(one, two)


def test_the_offline_command_makes_the_same_windows_and_verdict(run, scripted, grader, tmp_path):
    """From rollouts, metrics, validation and the frozen rule alone, nothing the monitors wrote themselves."""
    done = run(
        *all_monitors(),
        sampler=scripted(lambda update: 0.5 if update % 3 else 0.25),
        grader=grader(lambda call: 20 if call < 1 else 1),
        validate_every=7,
    )
    found = statistics(RunRecords(done.folder.path), window=5)
    written = done.folder.table("windows.csv").rows()
    assert done.module.updates_done == 7 and [w["last_update"] for w in found["windows"]] == [5, 7]
    for ours, theirs in zip(found["windows"], written):
        for name, value in ours.items():
            text = theirs["update" if name == "last_update" else name]
            assert value == (float(text) if text else None), name
    verdict = done.folder.read_json("verdict.json")
    assert found["verdict"] == {name: verdict[name] for name in found["verdict"]}
    assert (verdict["rule"], verdict["value"]) == ("validation", 1)


def test_snapshots_load_elsewhere(run):
    done = run(Snapshots(every_n_updates=3, keep=2))
    assert [p.name for p in snapshots(done.folder.snapshots)] == ["update-000009", "update-000012"]
    loaded = AutoModelForCausalLM.from_pretrained(done.folder.snapshots / "update-000012", dtype=torch.bfloat16)
    ours = done.module.policy.model.state_dict()
    assert all(torch.equal(weight, ours[name]) for name, weight in loaded.state_dict().items())


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match="every_n_updates=0"):
        Snapshots(0)
    with pytest.raises(ValueError, match="keep=0"):
        Snapshots(keep=0)
